"""All uses of torch_tpu's undocumented interface.

Before using another version of torch_tpu, compare these functions with its source. It is imported
only if TorchTPU is selected, because importing torch_tpu loads the TPU runtime.
"""

import contextlib
import hashlib
import importlib.util
import re
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

WRITTEN_FOR = {"torch_tpu": "0.2.0"}

_KINDS = {
    "TPU v4": "v4",
    "TPU v5p": "v5p",
    "TPU v5e": "v5litepod",
    "TPU v6e": "v6e",
    "TPU v7": "tpu7x",
}
"""Accelerator types, by torch_tpu's names of the chips that it finds on the PCI bus."""


def tpus_of_host() -> int | None:
    """Return the number of TPU devices on this host's PCI bus; None without the package.

    It starts none: it reads one file of torch_tpu, which needs nothing of the package. Once that is
    imported, PyTorch starts its runtime at the first backward pass, TPU or not.
    """
    hardware = _hardware()
    return hardware["get_tpu_device_count"]() if hardware else None


def kind_of_host() -> str:
    """Return the accelerator type of this host's chips, "v5litepod" say; "" where there is none."""
    hardware = _hardware()
    return _KINDS.get(hardware["get_tpu_device_name"](), "") if hardware else ""


def _hardware() -> dict[str, Any] | None:
    package = importlib.util.find_spec("torch_tpu")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "_internal" / "utils" / "hardware.py"
    return runpy.run_path(str(file))


def register() -> None:
    """Register the device "tpu" in PyTorch, unless importing PyTorch has done so already.

    It has not with TORCH_DEVICE_BACKEND_AUTOLOAD=0.
    """
    from torch_tpu import _loader

    _loader.load()


def register_without_tpu() -> None:
    """Register the device "tpu" on a host that has none: TPU_LIBRARY_PATH is a PJRT plugin."""
    from torch_tpu import _loader

    _loader._init_device("tpu")


def compile_text(module: str) -> None:
    """Compile a StableHLO module that is written so for this process's device."""
    from torch_tpu._internal.compile import tpu_torch_compile

    tpu_torch_compile.compile_mlir(tpu_torch_compile.parse_mlir_text(module))


def device_attributes() -> dict[str, Any]:
    """Return what the runtime knows of this process's device; starts it.

    "device_kind" is a name as "TPU v5 lite", or "cpu" with a plugin for the host's processor;
    "coords", its place in the slice, is there if the runtime knows it.
    """
    from torch_tpu._internal.device import _device_ops_backend

    return _device_ops_backend._get_local_device_attributes()


def peak_bf16_flops() -> float | None:
    """Return the peak FLOP/s of one device in bf16 by Google's pages; None if it is unknown."""
    from torch_tpu._internal.utils import hardware

    return hardware.get_bf16_flops_per_device()


def issue(tensors: Sequence[torch.Tensor]) -> None:
    """Hand to the device what computes ``tensors``, without waiting for it.

    Operations outside of torch.compile may wait until their results are needed.
    """
    from torch_tpu._internal import sync

    sync.synchronize(list(tensors), wait=False)


def counts() -> dict[str, int]:
    """Return how many graphs this process has compiled since its start, and executed."""
    from torch_tpu._internal.device import _device_ops_backend

    stats: Any = _device_ops_backend._get_cache_stats()
    return {"compilations": stats.num_compilations, "executions": stats.num_cache_reqs}


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], written: Sequence[int]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a graph with its collectives as one program; see ``Device.compile_graph``.

    torch.compile's backend "tpu" compiles by the same class, but divides a graph at collectives,
    and donates no input.
    """
    from torch_tpu._internal.compile.compiler import StaticCompiler

    (output,) = graph.graph.find_nodes(op="output")
    placeholders = graph.graph.find_nodes(op="placeholder")
    results = list(output.args[0])
    output.args = ([*results, *(placeholders[i] for i in written)],)
    graph.recompile()
    like = [values.detach() for values in inputs]
    with _bodies_not_compiled_alone():
        program = StaticCompiler()(graph, like, donated_inputs=list(written), module_name="step")

    def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        found = program(*given)
        for i, values in zip(written, found[len(results) :], strict=True):
            given[i].data = values  # the memory of the old ones, which were donated
        return found[: len(results)]

    return run


@contextlib.contextmanager
def _bodies_not_compiled_alone() -> Iterator[None]:
    """Lower the body of a scan inside, which torch_tpu 0.2.0 would also compile as a program of its
    own, and then not run."""
    from torch_tpu._internal.compile import scan

    def lower(body: torch.fx.GraphModule, args: list[Any]) -> SimpleNamespace:
        return SimpleNamespace(module=scan._build_body_mlir(body, args))

    with mock.patch.object(scan.export, "fx_to_mlir", lower):
        yield


@contextlib.contextmanager
def named_loops(file_of: Callable[[Sequence[str]], str | None]) -> Iterator[None]:
    """Let the operations in loops of graphs that are compiled inside come from a file each.
    ``file_of``: takes the files of an operation's stack, the innermost first.

    torch_tpu 0.2.0 prints the body of a loop and parses it again, so that an operation comes from a
    line of this text. Here the loop is a kernel, a text with other places.
    """
    from torch_tpu._internal.compile import tpu_torch_compile

    create = tpu_torch_compile.create_scan_op

    def create_named(inits: Any, inputs: Any, body_module: Any, **how: Any) -> list[torch.Tensor]:
        text = tpu_torch_compile.serialize_mlir_text(body_module, enable_debug_info=True)
        definitions = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.M))
        lines = [line for line in text.splitlines() if not line.startswith("#loc")]
        stacks = [_stack(line.rpartition(" loc(")[2], definitions) for line in lines]

        def place(found: re.Match[str]) -> str:
            operation, *files = stacks[int(found[1]) - 1] or [""]
            file = file_of(files)
            return f'loc("{operation}"("{file}":1:0))' if file else found[0]

        given = [tpu_torch_compile.placeholder_like(x) for x in (*inits, *inputs)]
        like = create(given[: len(inits)], given[len(inits) :], body_module, **how)
        module = tpu_torch_compile.build_mlir(like, given)
        text = tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=True)
        text = re.sub(r'loc\("-":(\d+):\d+\)', place, text)
        return call_kernel(text, [*inits, *inputs], [(x.shape, x.dtype) for x in like])

    with mock.patch.object(tpu_torch_compile, "create_scan_op", create_named):
        yield


def _stack(location: str, definitions: Mapping[str, str]) -> list[str]:
    """Return the names in a location of MLIR: its operation, then functions and files of its stack,
    the innermost first."""
    names: list[str] = []
    for name, other in re.findall(r'"([^"]*)"|(#loc\d+)', location):
        names += [name] if name else _stack(definitions.get(other, ""), definitions)
    return names


@contextlib.contextmanager
def reverse_scans() -> Iterator[None]:
    """Trace scans inside as loops from last to first. (Flips, as in PyTorch, would be copies.)"""
    from torch_tpu._internal.compile import scan

    traceback: Any = importlib.import_module("torch.fx.traceback")  # names of newer PyTorch
    with traceback.preserve_node_meta(), traceback.annotate({scan.SCAN_REVERSE_ANNOTATION: True}):
        yield


def barrier(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors through XLA's optimization barrier."""
    return torch.ops.tpu._optimization_barrier(list(tensors))


def call_kernel(
    module: str,
    inputs: Sequence[torch.Tensor],
    results: Sequence[tuple[Sequence[int], torch.dtype]],
) -> list[torch.Tensor]:
    """Return the results, of these shapes and dtypes, of a StableHLO module of one TPU kernel.

    ``torch.tpu.pallas.jax_op`` does the same of a JAX function, which it lowers itself.
    """
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.pallas import tpu_torch_pallas

    name, key = "vit", hashlib.blake2b(module.encode(), digest_size=16).hexdigest()
    if not tpu_torch_pallas.lookup_custom_kernel(name, key):
        parsed = tpu_torch_compile.parse_mlir_text(module)
        artifact = tpu_torch_compile.serialize_mlir_portable_artifact(parsed)
        tpu_torch_pallas.register_custom_kernel(name, key, serialized_mlir_module=artifact)
    shapes = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in results]
    return tpu_torch_pallas.call_custom_kernel(name, key, inputs=inputs, output_shapes=shapes)


class AbsentRanks(dist.Store):
    """A store by which rank 0 starts process groups "tpu_dist" alone, as if all ranks were there.

    Each rank enters its device there, "world_topo:RANK" and its attributes, and for each axis of a
    mesh the group that it is in, "pg_sub:AXIS:RANK": strings that follow their lengths. It reads
    those of all others.
    """

    mesh: torch.Tensor
    """The ranks, arranged as the mesh whose groups are made next."""

    def __init__(
        self, ranks: int, coordinates: Callable[[int], Sequence[int]], slices: int = 1
    ) -> None:
        """``coordinates``: of a rank's device x, y, z and its core on the chip. The ranks of a
        slice follow one another."""
        super().__init__()
        self._ranks, self._coordinates, self._slices = ranks, coordinates, slices
        self._values: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    def get(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        node, _, rank = key.rpartition(":")
        own = self._values[f"{node}:0"].decode().partition(":")[2]
        length, _, rest = own.partition(":")
        entered, told = rest[: int(length)], rest[int(length) :]
        kind, *axis = entered.split(":")[:-1]
        if kind == "pg_sub":
            told = self._group(int(rank), int(axis[0]), told)
        else:
            told = self._device(int(rank), told)
        entered = f"{entered.rpartition(':')[0]}:{rank}"
        told = f"{len(entered)}:{entered}{told}"
        return f"{len(told)}:{told}".encode()

    def _device(self, rank: int, first: str) -> str:
        """Return a rank's id, process, x, y, z, core, slice and kind, as rank 0 says its own."""
        device = first.split(",")
        slice_, number = divmod(rank, self._ranks // self._slices)
        # Each slice has ids of its own in libtpu, from a multiple of 100,000 on.
        device[0] = str(int(device[0]) + 100_000 * slice_ + number)
        device[1:6] = map(str, (rank, *self._coordinates(rank)))
        device[6] = str(int(device[6]) + slice_)  # -1: there is but one
        return ",".join(device)

    def _group(self, rank: int, axis: int, first: str) -> str:
        """Return a rank's place in its group along an axis, the rank, and what names the group, as
        rank 0 says it of its own."""
        groups = self.mesh.movedim(axis, -1).flatten(end_dim=-2)
        (group,) = (sorted(each) for each in groups.tolist() if rank in each)
        name = first.partition(":")[2] + (str(group[0]) if group[0] else "")
        return f"{group.index(rank)},{rank}:{name}"

    def add(self, key: str, amount: int) -> int:
        if amount == 0:  # how many have come
            return self._ranks
        self._values[key] = self._values.get(key, 0) + amount
        return self._values[key]

    def wait(self, keys: Sequence[str], *timeout: Any) -> None:
        """Return at once: what has to come is there."""

    def check(self, keys: Sequence[str]) -> bool:
        return True

    def set_timeout(self, timeout: Any) -> None:
        """Ignore the timeout."""

    def clone(self) -> dist.Store:
        return self
