"""What is used of torch_xla beyond its documented interface, in one place.

Nothing is imported or looked up before it is called: importing torch_xla takes seconds and chooses
a device, and another version may lack one name of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WRITTEN_FOR = {"torch_xla": "2.9.0"}

REPLICATED = Ellipsis
"""Instead of the indices of a shard that is the whole tensor."""


def _xlac() -> Any:
    import torch_xla

    return torch_xla._XLAC


def _tpu() -> Any:
    from torch_xla._internal import tpu

    return tpu


# -- the host's TPU chips, without starting them ---------------------------------------


def available_chips() -> int:
    """Return how many TPU chips this host has."""
    return _tpu().num_available_chips()


def available_devices() -> int:
    """Return how many devices of this host programs can use."""
    return _tpu().num_available_devices()


def expected_devices() -> int:
    """Return how many devices this host's slice has, all of its hosts together."""
    return _tpu().num_expected_global_devices()


def tpu_generation() -> int:
    """Return 5 for a v5p or v5e. May ask the metadata server."""
    return _tpu().version()


def tpu_type() -> str:
    """Return the slice's kind, "v5p" say. Raises OSError or KeyError if it is unknown."""
    return _tpu().get_tpu_type()


def tpu_variables() -> dict[str, str]:
    """Return the variables of the TPU VM's metadata, such as MEGASCALE_NUM_SLICES."""
    return _tpu().get_tpu_env()


def hosts_of_slice() -> tuple[list[str], int]:
    """Return the addresses of the slice's hosts, and which of them this one is."""
    return _tpu().get_worker_ips(), _tpu().worker_id()


def set_libtpu_defaults(generation: int) -> None:
    """Set the environment as importing torch_xla does on a TPU of this generation."""
    import torch_xla

    tpu = _tpu()
    functions = tpu.num_available_chips, tpu.version
    tpu.num_available_chips, tpu.version = lambda: 1, lambda: generation
    try:
        torch_xla._setup_default_env()
    finally:
        tpu.num_available_chips, tpu.version = functions


# -- devices and shards of a running program ------------------------------------------


def local_device_names() -> list[str]:
    """Return the names of this host's devices, "TPU:5" for example."""
    return _xlac()._xla_get_runtime_devices()


def local_shard_indices(tensor: torch.Tensor) -> list[Any]:
    """Return the part that each of this host's devices has: a slice for each dimension, or
    ``REPLICATED``."""
    (places,) = _xlac()._get_local_shard_replica_and_indices([tensor])
    return [indices for _, indices in places]


def op_sharding_arguments(mesh: Any, spec: tuple) -> tuple[Any, Any, Any, Any]:
    """Return tile assignment, groups, replication groups and type of a sharding on the mesh."""
    return mesh._get_op_sharding_args(spec)


# -- programs built by hand -----------------------------------------------------------


def call_computation(
    name: str, arguments: Sequence[torch.Tensor], computation: Any
) -> list[torch.Tensor]:
    """Put the call of a computation into the graph; returns its results."""
    return _xlac()._xla_user_computation(name, arguments, computation)


def moved_to(memory: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the memory "pinned_host" or "device"."""
    (moved,) = _xlac()._xla_custom_call(
        [x],
        "annotate_device_placement",
        [x.shape],
        [x.dtype],
        True,  # has a side effect
        "",
        0,
        {"_xla_buffer_placement": memory},
    )
    return moved


def call_tpu_kernel(
    arguments: list[torch.Tensor],
    config: str,
    shapes: list[list[int]],
    dtypes: list[torch.dtype],
) -> list[torch.Tensor]:
    """Put the call of a Mosaic kernel into the graph; returns results of these shapes, dtypes."""
    return _xlac()._xla_tpu_custom_call(arguments, config, shapes, dtypes)


def kernel_config(lowered: Any) -> str | None:
    """Return the configuration of the first Mosaic kernel in a module that JAX lowered, as JSON."""
    from torch_xla.experimental.custom_kernel import _extract_backend_config

    return _extract_backend_config(lowered)


def dot_general_int8(
    left: torch.Tensor, right: torch.Tensor, along_left: Sequence[int], along_right: Sequence[int]
) -> torch.Tensor:
    """Return int32 sums of products of two int8 tensors along these dimensions of each.

    The other dimensions of ``left`` come before those of ``right``.
    """
    import torch

    summed: tuple = ((list(along_left), list(along_right)), ([], []))
    return _xlac()._xla_dot_general(left, right, summed, preferred_element_type=torch.int32)


def dynamic_slice(stacked: Any, index: Any) -> Any:
    """Return ``stacked[index]``, of two ops of the builder."""
    from torch_xla.experimental.scan import dynamic_slice

    return dynamic_slice(stacked, index)


def dynamic_update_slice(stacked: Any, value: Any, index: Any) -> Any:
    """Return ``stacked`` with ``value`` at ``index``, of ops of the builder."""
    from torch_xla.experimental.scan import dynamic_update_slice

    return dynamic_update_slice(stacked, value, index)


def lowering_context(name: str) -> Any:
    """Return a context that lowers recorded computations and numbers the data they are given."""
    return _xlac().lowering.LoweringContext(name)


def seed_parameter(tensors: list[torch.Tensor], context: Any) -> int | None:
    """Return the number of the random seed among a lowered computation's parameters, if it has one.

    ``context`` is the lowering context of ``tensors``.
    """
    ids, nodes = _xlac()._get_tensors_xla_device_data_node(tensors)
    seed_id = _xlac()._get_seed_info_id()
    return context.tensor_parameter_id(nodes[ids.index(seed_id)]) if seed_id in ids else None


# -- what was recorded so far ---------------------------------------------------------


def recorded_number(tensor: torch.Tensor) -> int:
    """Return a number that is the same for tensors of the same recorded value; it only grows."""
    return _xlac()._xla_get_tensor_id(tensor)


def data_behind(tensor: torch.Tensor) -> set[int]:
    """Return numbers of all data that a recorded value is computed from; -1 for some constants."""
    return set(_xlac()._get_tensors_xla_device_data_node([tensor])[0])


def need_computing(tensors: list[torch.Tensor]) -> list[bool]:
    """Return, for each tensor, True if it is a recorded computation and not data on the device."""
    return _xlac()._check_tensor_need_materialization(tensors)


def sharding_mark(tensor: torch.Tensor) -> str:
    """Return the sharding that the program gave a tensor, in XLA's notation; "" if none."""
    return _xlac()._get_xla_sharding_spec(tensor)


def hlo_proto(results: list[torch.Tensor]) -> bytes:
    """Return the recorded graph of these results as a serialized HLO module."""
    return _xlac()._get_xla_tensors_hlo_proto(results)


def replace_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give ``tensor`` the value of another one, whatever size its storage has."""
    _xlac()._replace_xla_tensor(tensor, value)


def forget_all_reduces(device: str) -> None:
    """Make the next collective independent of those before it, as after an execution."""
    _xlac()._set_all_reduce_token(device, None)


# -- names in the graph ---------------------------------------------------------------


def keep_scopes() -> None:
    """Record the scopes of each operation, from now on, for the HLO."""
    _xlac()._set_ir_debug(True)


def open_scope(name: str) -> Any:
    """Open a scope in this thread; it is closed when the returned object is freed."""
    return _xlac().profiler.scope_pusher(name)


# -- nested FSDP ----------------------------------------------------------------------

FLAT_PARAMETER = "flat_param_"
"""The start of the name of a flat parameter, which holds several parameters; a number follows."""
_WRAPPERS = {"", "_fsdp_wrapped_module", "_fpw_module"}


def without_wrappers(name: str) -> str:
    """Return a parameter's name in the plain model, without FSDP's wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return True if an inner unit of FSDP has sharded the parameter already."""
    return hasattr(parameter, "_is_sharded")


def original_name(shard: torch.Tensor) -> str:
    """Return the name, in its unit, of the parameter of a shard."""
    return shard._orig_name  # type: ignore[attr-defined]


def original_shape(shard: torch.Tensor) -> torch.Size:
    """Return the shape of the parameter of a shard."""
    return shard._orig_size  # type: ignore[attr-defined]


def flattened_parameters(unit: Any, number: int) -> tuple[list[str], list[torch.Size]]:
    """Return the names in the unit and the shapes of the parameters in its flat parameter of this
    number."""
    names, shapes, _ = unit.module.metadata(number)
    return names, shapes


def sharded_parameters(unit: Any) -> list[Any]:
    """Return the shards of the parameters that one unit of FSDP has sharded."""
    return unit.sharded_params


def free_gathered(unit: Any) -> None:
    """Free the gathered weights of one unit of FSDP; its next pass gathers them again."""
    unit._free_full_params(apply_opt_barrier=False)


def linear_option(pytorchs_own: bool) -> dict[str, bool]:
    """Return the option of FSDP that leaves linear layers PyTorch's own, or replaces them."""
    return {"_use_xla_patched_linear": not pytorchs_own}


def scatter_gradients_as_rows(unit: Any, devices: int) -> None:
    """Let a unit scatter its flat gradients as rows of 128.

    With one dimension the TPU compiler makes it an all-reduce. FSDP pads flat gradients to whole
    rows for each device.
    """
    from torch_xla.distributed.fsdp.utils import BucketizedReduceScatter

    class AsRows(BucketizedReduceScatter):
        def __call__(self, input: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> None:
            super().__call__(input.view(-1, 128), lambda shard: callback(shard.flatten()))

    unit.reduce_scatter_op = AsRows(0, shard_count=devices, groups=None, pin_layout=False)
