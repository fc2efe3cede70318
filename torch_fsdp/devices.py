"""The devices that FSDP2 runs on, with the operations that PyTorch has no common interface for.

docs/contributing.md explains how to add a device.
"""

import functools
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_fsdp import torch_tpu_private
from torch_fsdp.profiler import TorchProfiler
from tpu_attention import jax_private
from tpu_attention.kernels import LARGEST_VECTOR_MEMORY
from tpu_machines import LIBTPU_VARIABLE, libtpu_flags
from training.backend import Profiler
from training.errors import UsageError

Mark = Any
"""A moment in what a device computes, of ``Device.mark``."""


class Device:
    """One kind of device: a subclass in this file, and an entry of ``KINDS``.

    The defaults fit a device that runs each operation as it is called. Constructing one starts
    nothing. Before ``start`` only the attributes, ``count`` and ``lacks`` may be used.
    """

    where: torch.device
    """The device of this process's tensors, after ``start``."""
    is_host: bool
    """True if its memory is the host's."""
    noun: str
    """Its name in messages: "CUDA GPU"."""
    status_command: str
    """The command that shows which of them a host has."""
    collectives: str
    """The backend for ``init_process_group``. gloo for tensors on the CPU, by which checkpoints are
    planned and offloaded gradients reduced, and the device's own for its tensors."""
    collectives_name: str
    """The device's own collectives in the line that describes a run."""
    fused_adamw: bool
    """True if PyTorch has a fused AdamW for it, with ``found_inf``."""
    compiler = "inductor"
    """The backend of torch.compile for it."""
    compiles_blocks = False
    """True if torch.compile was measured to make blocks faster: it is on by default then."""
    compiles_all = False
    """True if it compiles each new operation and shape, also without torch.compile."""
    kernel_memory: int | None = None
    """Bytes of vector memory that a TPU kernel may ask for; None if the device is no TPU."""
    written_for: Mapping[str, str] = {}
    """The versions of packages whose private names it uses."""

    @property
    def name(self) -> str:
        """The product's name."""
        return self.noun

    def start(self, *, tf32: bool, products: str) -> None:
        """Start the device number LOCAL_RANK of this host.

        ``tf32``: fp32 matrix products and convolutions may be computed in TF32. ``products``: what
        the blocks' products compute in, as in ``TorchPlan``.
        """

    def count(self) -> int | None:
        """Return the number on this host; None if any number of processes can share it."""
        return None

    def slices(self) -> int | None:
        """Return on how many TPU slices this job runs; None if the device is no TPU."""
        return None

    def arrange(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the ranks of all processes as a mesh whose last axes communicate most. A
        collective call."""
        return torch.arange(math.prod(shape)).view(shape)

    def mesh(self, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of these ranks and axes. A collective call."""
        return DeviceMesh(self.where.type, ranks, mesh_dim_names=names)

    def lacks(self, precision: str) -> str | None:
        """Return the error message if this process cannot compute in "fp32", "bf16", "fp16" or
        "fp8" on it, else None."""
        return None

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors from the host, from any thread, while a step runs; return copies that are
        ready to be used."""
        return [tensor.to(self.where) for tensor in tensors]

    def read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start to copy small tensors to the host, without waiting for what computes them.

        The returned function waits and returns the copies; another thread may call it.
        """
        return lambda: [tensor.cpu() for tensor in tensors]

    def seed(self, seed: int) -> None:
        """Seed the device's own random numbers; the caller seeds the CPU's."""
        if not self.is_host:
            torch.get_device_module(self.where).manual_seed(seed)

    def synchronize(self) -> None:
        """Wait until the device has finished all that was issued."""
        if not self.is_host:
            torch.accelerator.synchronize()

    def compile_graph(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], written: Sequence[int]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        """Return a function that computes ``graph``, and writes into the inputs with the indices
        ``written``. ``inputs``: tensors like those it will be given."""
        return graph

    def barrier(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the tensors, in a graph in a way that its compiler does not see through."""
        return tensors

    def moved_to(self, memory: Literal["pinned_host", "device"], x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in the host's memory or back on the device, in a graph."""
        return x

    def to_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Return gradients, (shards, rows of a shard, ...), as they are reduced and scattered
        along the first dimension."""
        return parts.flatten(0, 1)

    def scan(
        self,
        body: torch.fx.GraphModule,
        state: list[torch.Tensor],
        inputs: list[torch.Tensor],
        captured: Sequence[torch.Tensor],
        *,
        reverse: bool,
    ) -> list[torch.Tensor]:
        """Return the last state and the stacked outputs of a loop over the first dimension of
        ``inputs``, in a trace. ``body``: (state, a slice of each input, captured) -> (next state, a
        slice of each output)."""
        if reverse:
            inputs = [x.flip(0) for x in inputs]
        found = list(torch.ops.higher_order.scan(body, state, inputs, tuple(captured)))
        if reverse:
            found[len(state) :] = [x.flip(0) for x in found[len(state) :]]
        return found

    def mark(self) -> Mark:
        """Return the moment at which the device has done what was issued until now, without
        waiting for it. By the host's clock: of an asynchronous device the moment of issuing."""
        return time.perf_counter()

    def seconds_of(self, spans: Sequence[tuple[Mark, Mark]]) -> float | None:
        """Return the sum of the seconds between pairs of ``mark``, in the order in which they were
        made; None if the device has not reached the last one yet."""
        return sum(end - start for start, end in spans)

    def profiler(self, folder: Path, rank: int) -> Profiler:
        """Return a profiler of this process, which writes into ``folder``."""
        return TorchProfiler(folder, rank)

    def counters(self) -> dict[str, int]:
        """Return running counts of what was compiled."""
        return {"compilations": torch._dynamo.utils.counters["stats"]["unique_graphs"]}

    def memory(self) -> dict[str, int]:
        """Return the bytes of its memory: "used" now, "peak" so far, and "limit"; {} if unknown."""
        if self.is_host:
            return {}
        properties = torch.get_device_module(self.where).get_device_properties()
        return {
            "used": torch.accelerator.memory_allocated(),
            "peak": torch.accelerator.max_memory_allocated(),
            "limit": properties.total_memory,
        }

    def peak_flops(self, kind: str) -> float | None:
        """Return its dense matrix FLOP/s in "bf16", "fp16", "tf32", "fp32" or "fp8", or None."""
        return None


class Cpu(Device):
    """The host's processor with gloo, any number of processes a host: to try out and for tests."""

    where = torch.device("cpu")
    is_host = True
    noun = "CPU"
    status_command = "lscpu"
    collectives = collectives_name = "gloo"
    fused_adamw = True

    def lacks(self, precision: str) -> str | None:
        if precision == "fp16":
            return "--precision fp16 requires CUDA: on the CPU use bf16 or fp32"
        return "--fp8 requires CUDA" if precision == "fp8" else None


class Cuda(Device):
    """An NVIDIA GPU: streams and events, pinned memory, NCCL."""

    is_host = False
    noun = "CUDA GPU"
    status_command = "nvidia-smi"
    collectives = "cpu:gloo,cuda:nccl"
    collectives_name = "NCCL"
    fused_adamw = True
    compiles_blocks = True
    _copies: torch.cuda.Stream

    def __init__(self) -> None:
        self.where = torch.device("cuda")

    def start(self, *, tf32: bool, products: str) -> None:
        self.where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self.where)
        self._copies = torch.cuda.Stream()
        # PyTorch's default is TF32 in convolutions but not in matrix products. PyTorch 2.9
        # deprecates this interface; its torch.compile still uses it, and refuses a mixture of both.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use the new API settings")
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32

    def count(self) -> int | None:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def lacks(self, precision: str) -> str | None:
        if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"{self.name} does not support bf16: use --precision fp16 or fp32"
        if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
            return f"{self.name} does not support FP8: use --fp8 none"
        return None

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name()

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # On a stream of their own, so that copies run while the step does; the device is set again
        # because this may run in a thread.
        with torch.cuda.device(self.where), torch.cuda.stream(self._copies):
            copies = [tensor.pin_memory().to(self.where, non_blocking=True) for tensor in tensors]
            self._copies.synchronize()
            for copy in copies:
                copy.record_stream(torch.cuda.default_stream())
        return copies

    def read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        copied = torch.cuda.Event(blocking=True)
        copied.record()

        def wait() -> list[torch.Tensor]:
            copied.synchronize()
            return copies

        return wait

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_of(self, spans: Sequence[tuple[Mark, Mark]]) -> float | None:
        if spans and not spans[-1][1].query():
            return None
        return sum(start.elapsed_time(end) for start, end in spans) / 1e3

    def peak_flops(self, kind: str) -> float | None:
        name = self.name
        flops = next((flops for part, flops in _CUDA_FLOPS.items() if part in name), {})
        return flops.get("bf16" if kind == "fp16" else kind)


_CUDA_FLOPS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12, "fp8": 4500e12},
    "GH200": {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12},
    "H200 NVL": {"bf16": 835e12, "tf32": 417e12, "fp32": 60e12, "fp8": 1671e12},
    "H200": {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12},
    "H100 PCIe": {"bf16": 756e12, "tf32": 378e12, "fp32": 51e12, "fp8": 1513e12},
    "H100 NVL": {"bf16": 835e12, "tf32": 417e12, "fp32": 60e12, "fp8": 1671e12},
    "H100": {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12},
    "L40S": {"bf16": 362e12, "tf32": 183e12, "fp32": 91.6e12, "fp8": 733e12},
    "L4": {"bf16": 121e12, "tf32": 60e12, "fp32": 30.3e12, "fp8": 242e12},
    "A100": {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "A10": {"bf16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12},
}
"""Dense FLOP/s of matrix products, from NVIDIA's data sheets, by a part of the name that CUDA gives
a GPU; the first one that fits. fp16's are bf16's."""


class Tpu(Device):
    """A TPU by TorchTPU, the package torch_tpu: one process a device.

    Operations outside of torch.compile are compiled by XLA too, each by itself.
    """

    is_host = False
    noun = "TPU"
    status_command = "tpu-info"
    collectives = "cpu:gloo,tpu:tpu_dist"
    collectives_name = "TorchTPU"
    fused_adamw = False
    compiler = "tpu"
    compiles_all = True
    kernel_memory = LARGEST_VECTOR_MEMORY
    written_for: Mapping[str, str] = torch_tpu_private.WRITTEN_FOR | jax_private.WRITTEN_FOR
    register = staticmethod(torch_tpu_private.register)

    def start(self, *, tf32: bool, products: str) -> None:
        if kind := torch_tpu_private.kind_of_host():  # libtpu reads them when it starts
            set_before = os.environ.get(LIBTPU_VARIABLE, "")
            os.environ[LIBTPU_VARIABLE] = libtpu_flags(set_before, kind)
        self.register()
        self.where = torch.device("tpu")
        # A process that is forked while the runtime's threads hold a lock waits for it for ever:
        # loader processes come from one that has no runtime, and does not load it either.
        multiprocessing.set_start_method("forkserver", force=True)
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        # Nearly all of torch.tpu is "experimental", and says so at each call.
        warnings.filterwarnings("ignore", message="<TorchTpu/ApiStage/")
        # A TPU's default is bf16, also with torch_xla. With more, torch_tpu 0.2.0's attention in
        # bf16 does not compile for heads of 160 (libtpu 0.0.52: "Bad lhs type").
        torch.set_float32_matmul_precision("highest" if products == "fp32" else "medium")

    @functools.cached_property
    def name(self) -> str:
        return torch_tpu_private.device_attributes()["device_kind"]

    def count(self) -> int | None:
        return torch_tpu_private.tpus_of_host() or 0

    def slices(self) -> int | None:
        return int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)  # of a launcher, or GKE's

    def arrange(self, shape: tuple[int, ...]) -> torch.Tensor:
        """By the places of the devices in their slice, and slices along the first axis."""
        if math.prod(shape) == 1 or "coords" not in torch_tpu_private.device_attributes():
            return super().arrange(shape)
        distributed = torch.get_device_module("tpu").distributed
        ranks = distributed.topology_aware_mesh(shape, allow_split_physical_axes=True)
        # A process group sorts its ranks, and FSDP2 numbers shards by them; DTensor's offsets, by
        # which checkpoints are written, follow the mesh. Both are the same in sorted rows.
        return ranks.sort(dim=-1).values

    def lacks(self, precision: str) -> str | None:
        needed = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")
        missing = [name for name in needed if name not in os.environ]
        if missing and os.environ.get("WORLD_SIZE", "1") != "1":
            return (
                f"--backend torchtpu in several processes requires {' and '.join(missing)} in the "
                "environment: start with launch.xla_dist, which sets them, or before torchrun run: "
                'set -a; eval "$(python3 -m torch.tpu.distributed)"; set +a'
            )
        if precision == "fp16":
            return "--precision fp16 requires --backend cuda: on a TPU use bf16"
        return None

    def compile_graph(
        self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], written: Sequence[int]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        return torch_tpu_private.compile_graph(graph, inputs, written)

    def barrier(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return torch_tpu_private.barrier(tensors)

    def moved_to(self, memory: Literal["pinned_host", "device"], x: torch.Tensor) -> torch.Tensor:
        return torch_tpu_private.moved_to(memory, x)

    def to_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        if "7x" not in self.name:
            return super().to_scatter(parts)
        # XLA would make an all-reduce of a reduce-scatter that divides a tile of 8 rows. A
        # dimension of its own for the shards prevents it; on other chips that does not help.
        if parts.shape[1] % 8:
            return parts
        rows = super().to_scatter(parts)
        # Else a product may have its result in columns, which are copied before and after.
        return torch_tpu_private.row_major(rows) if rows.dim() == 2 else rows

    def scan(
        self,
        body: torch.fx.GraphModule,
        state: list[torch.Tensor],
        inputs: list[torch.Tensor],
        captured: Sequence[torch.Tensor],
        *,
        reverse: bool,
    ) -> list[torch.Tensor]:
        with torch_tpu_private.reverse_scans() if reverse else nullcontext():
            return super().scan(body, state, inputs, captured, reverse=False)

    def read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        torch_tpu_private.issue(tensors)
        return super().read(tensors)

    def profiler(self, folder: Path, rank: int) -> Profiler:
        # Its parts of the trace are files for XProf of their own.
        config = torch.get_device_module("tpu").profiler.TpuProfilerConfig(
            run_dir=folder, worker_rank=str(rank)
        )
        return TorchProfiler(folder, rank, experimental_config=config)

    def counters(self) -> dict[str, int]:
        return torch_tpu_private.counts()

    def peak_flops(self, kind: str) -> float | None:
        return torch_tpu_private.peak_bf16_flops() if kind == "bf16" else None


KINDS: dict[str, list[type[Device]]] = {"cuda": [Cuda, Cpu], "torchtpu": [Tpu]}
"""By backend, in this order: the first one that a host has is used."""


def choose(backend: str) -> Device:
    """Return the device that this process is to use, not yet started.

    Raises UsageError if this host has none for the backend.
    """
    for kind in KINDS[backend]:
        device = kind()
        if device.count() != 0:
            return device
    if torch_tpu_private.tpus_of_host() is None:
        raise UsageError(
            "--backend torchtpu requires the package torch_tpu, in a separate environment: "
            "python3 -m pip install -r requirements-torchtpu.txt"
        )
    raise UsageError(
        "--backend torchtpu: torch_tpu finds no TPU on this host: check the output of tpu-info"
    )
