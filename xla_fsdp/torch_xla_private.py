"""All uses of torch_xla's undocumented interface.

Names are imported and looked up only when they are used: importing torch_xla takes seconds and
chooses a device, and other versions may lack some of the names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from models import UnusedModule

if TYPE_CHECKING:
    import torch

WRITTEN_FOR = {"torch_xla": "2.9.0"}

REPLICATED = Ellipsis
"""Instead of the indices of a shard that is the whole tensor."""


def prepare_import() -> None:
    """Make torch_xla's first import faster (no run uses its export to StableHLO, which imports
    Inductor) and its compiler quieter; call it before that."""
    sys.modules.setdefault("torch_xla.stablehlo", UnusedModule("torch_xla.stablehlo"))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _xlac(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch_xla's C++ part, "name" or "module.name"."""
    import torch_xla

    return attrgetter(name)(torch_xla._XLAC)(*args, **kwargs)


# -- the host's TPU chips, without starting them ---------------------------------------

TPU_PCI_VENDOR = "0x1ae0"
TPU_PCI_DEVICES = {"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076"}
METADATA_URL = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
"""As torch_xla/_internal/tpu.py has them, which cannot be imported without torch_xla."""


def host_tpu() -> Any:
    """Return torch_xla's functions about this host's TPU chips and slice.

    Here are used ``num_available_chips``, ``num_available_devices``,
    ``num_expected_global_devices`` (of the slice), ``version`` (5 for v5p and v5e),
    ``get_tpu_type`` ("v5p"; OSError or KeyError if it is unknown), ``get_tpu_env``,
    ``get_worker_ips`` and ``worker_id``. All but the first may ask the metadata server.
    """
    from torch_xla._internal import tpu

    return tpu


def set_libtpu_defaults(generation: int) -> None:
    """Set the environment as importing torch_xla does on a TPU of this generation."""
    import torch_xla

    tpu = host_tpu()
    functions = tpu.num_available_chips, tpu.version
    tpu.num_available_chips, tpu.version = lambda: 1, lambda: generation
    try:
        torch_xla._setup_default_env()
    finally:
        tpu.num_available_chips, tpu.version = functions


# -- devices and shards of a running program ------------------------------------------

local_device_names = partial(_xlac, "_xla_get_runtime_devices")
"""() -> the names of this host's devices, "TPU:5" for example."""


def local_shard_indices(tensor: torch.Tensor) -> list[Any]:
    """Return the part that each of this host's devices has: a slice for each dimension, or
    ``REPLICATED``."""
    (places,) = _xlac("_get_local_shard_replica_and_indices", [tensor])
    return [indices for _, indices in places]


mark_sharding = partial(_xlac, "_xla_mark_sharding")
"""(tensor, a Mesh's ``get_op_sharding(spec)``). torch_xla's own function of this name tries to
import torchax and JAX at each call: a second of the start, then a millisecond a call."""


def op_sharding_arguments(mesh: Any, spec: tuple) -> tuple[Any, Any, Any, Any]:
    """Return tile assignment, groups, replication groups and type of a sharding on the mesh."""
    return mesh._get_op_sharding_args(spec)


# -- programs built by hand -----------------------------------------------------------

call_computation = partial(_xlac, "_xla_user_computation")
"""(name, arguments, computation) -> results. Puts the call of a computation into the graph."""
call_tpu_kernel = partial(_xlac, "_xla_tpu_custom_call")
"""(arguments, configuration, shapes, dtypes) -> results. The same of a Mosaic kernel."""
dot_general = partial(_xlac, "_xla_dot_general")
"""(left, right, ((summed of left, summed of right), ((), ())), preferred_element_type=...)"""


def moved_to(memory: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the memory "pinned_host" or "device"."""
    has_side_effect, target = True, "annotate_device_placement"
    attributes = {"_xla_buffer_placement": memory}
    arguments = ([x], target, [x.shape], [x.dtype], has_side_effect, "", 0, attributes)
    (moved,) = _xlac("_xla_custom_call", *arguments)
    return moved


lowering_context = partial(_xlac, "lowering.LoweringContext")
"""(name) -> a context that lowers recorded computations and numbers the data they are given."""


def seed_parameter(tensors: list[torch.Tensor], context: Any) -> int | None:
    """Return the number of the random seed among a lowered computation's parameters, if it has
    one; ``context`` is the lowering context of ``tensors``."""
    ids, nodes = _xlac("_get_tensors_xla_device_data_node", tensors)
    seed_id = _xlac("_get_seed_info_id")
    return context.tensor_parameter_id(nodes[ids.index(seed_id)]) if seed_id in ids else None


# -- what was recorded so far ---------------------------------------------------------

recorded_number = partial(_xlac, "_xla_get_tensor_id")
"""(tensor) -> a number, the same for tensors of the same recorded value; it only grows."""
need_computing = partial(_xlac, "_check_tensor_need_materialization")
"""(tensors) -> for each, True if it is a recorded computation and not data on the device."""
sharding_mark = partial(_xlac, "_get_xla_sharding_spec")
"""(tensor) -> the sharding that the program gave it, in XLA's notation; "" if none."""
hlo_proto = partial(_xlac, "_get_xla_tensors_hlo_proto")
"""(tensors) -> the recorded graph of these results as a serialized HLO module."""
replace_value = partial(_xlac, "_replace_xla_tensor")
"""(tensor, other) -> None. Gives a tensor another one's value, whatever size its storage has."""


def data_behind(tensor: torch.Tensor) -> set[int]:
    """Return numbers of all data that a recorded value is computed from; -1 for some constants."""
    return set(_xlac("_get_tensors_xla_device_data_node", [tensor])[0])


def forget_all_reduces(device: str) -> None:
    """Make the next collective independent of those before it, as after an execution."""
    _xlac("_set_all_reduce_token", device, None)


# -- names in the graph ---------------------------------------------------------------


keep_scopes = partial(_xlac, "_set_ir_debug", True)
"""() -> None. Records the scopes of each operation, from now on, for the HLO."""
open_scope = partial(_xlac, "profiler.scope_pusher")
"""(name) -> an object that keeps a scope open in this thread until it is freed."""
trace_span = partial(_xlac, "profiler.TraceMe")
"""(name, **numbers) -> a context manager that names a span in a trace. torch_xla's own ``Trace``
also names operations, and its ``StepTrace`` ends the graph."""


# -- nested FSDP ----------------------------------------------------------------------


def without_wrappers(name: str) -> str:
    """Return a parameter's name in the plain model, without FSDP's wrappers."""
    wrappers = {"", "_fsdp_wrapped_module", "_fpw_module"}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return True if an inner unit of FSDP has sharded the parameter already."""
    return hasattr(parameter, "_is_sharded")


def original_parameters(unit: Any, shard: Any) -> tuple[str, list[tuple[str, torch.Size]]]:
    """Return the name in the unit of a shard's parameter, and names and shapes of the plain ones
    that it holds: several if it is flat."""
    name = shard._orig_name
    _, is_flat, number = name.rpartition("flat_param_")
    if not is_flat:
        return name, [(name, shard._orig_size)]
    names, shapes, _ = unit.module.metadata(int(number))
    return name, list(zip(names, shapes, strict=True))


def free_gathered(unit: Any) -> None:
    """Free the gathered weights of one unit of FSDP; its next pass gathers them again."""
    unit._free_full_params(apply_opt_barrier=False)
    drop_views(unit)


def drop_views(unit: Any) -> None:
    """Drop the views that flat parameters of one unit leave in the modules: they would keep the
    gathered weights."""
    flat = unit.module
    views = [(module, name) for _, module, name in flat._param_infos]
    views += [(module, name) for _, _, module, name, _, _ in flat._shared_param_infos]
    for module, name in views:
        module.__dict__.pop(name, None)
    flat._fpw_module.__dict__.pop("_unflattened_param_views", None)


def scatter_gradients_as_rows(unit: Any, devices: int) -> None:
    """Let a unit scatter its flat gradients, padded by FSDP, as rows of 128: with one dimension
    the TPU compiler makes it an all-reduce."""
    from torch_xla.distributed.fsdp.utils import BucketizedReduceScatter

    class AsRows(BucketizedReduceScatter):
        def __call__(self, input: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> None:
            super().__call__(input.view(-1, 128), lambda shard: callback(shard.flatten()))

    unit.reduce_scatter_op = AsRows(0, shard_count=devices, groups=None, pin_layout=False)
