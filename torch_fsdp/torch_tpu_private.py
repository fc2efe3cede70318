"""All uses of torch_tpu's undocumented interface.

Before using another version of torch_tpu, compare these functions with its source. It is imported
only if TorchTPU is selected, because importing torch_tpu loads the TPU runtime.
"""

import contextlib
import importlib.util
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

WRITTEN_FOR = {"torch_tpu": "0.2.0"}


def tpus_of_host() -> int | None:
    """Return the number of TPU devices on this host's PCI bus; None without the package.

    It starts none: it reads one file of torch_tpu, which needs nothing of the package. Once that is
    imported, PyTorch starts its runtime at the first backward pass, TPU or not.
    """
    package = importlib.util.find_spec("torch_tpu")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "_internal" / "utils" / "hardware.py"
    return runpy.run_path(str(file))["get_tpu_device_count"]()


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
def reverse_scans() -> Iterator[None]:
    """Trace scans inside as loops from last to first. (Flips, as in PyTorch, would be copies.)"""
    from torch_tpu._internal.compile import scan

    traceback: Any = importlib.import_module("torch.fx.traceback")  # names of newer PyTorch
    with traceback.preserve_node_meta(), traceback.annotate({scan.SCAN_REVERSE_ANNOTATION: True}):
        yield


def barrier(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors through XLA's optimization barrier."""
    return torch.ops.tpu._optimization_barrier(list(tensors))


class AbsentRanks(dist.Store):
    """A store by which rank 0 starts process groups "tpu_dist" alone, as if all ranks were there.

    Each rank of a group enters its device there: "world_topo:RANK" and its attributes, strings
    that follow their lengths. It reads those of all others.
    """

    def __init__(self, ranks: int, coordinates: Callable[[int], Sequence[int]]) -> None:
        """``coordinates``: of a rank's device x, y, z and its core on the chip; its id is the
        rank."""
        super().__init__()
        self._ranks, self._coordinates = ranks, coordinates
        self._values: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    def get(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        node, _, rank = key.rpartition(":")
        own = self._values[f"{node}:0"].decode().partition(":")[2]
        length, _, rest = own.partition(":")
        entered, device = rest[: int(length)], rest[int(length) :].split(",")
        entered = f"{entered.rpartition(':')[0]}:{rank}"
        # Id, process, x, y, z, core; then its slice and kind, the same for all.
        device[:6] = map(str, (rank, rank, *self._coordinates(int(rank))))
        told = f"{len(entered)}:{entered}{','.join(device)}"
        return f"{len(told)}:{told}".encode()

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
