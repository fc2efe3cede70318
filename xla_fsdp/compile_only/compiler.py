"""The TPU compiler, without a TPU: libtpu's compile-only client for a topology."""

from __future__ import annotations

import importlib.util
import re
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from training.errors import UsageError
from xla_fsdp import jax_private
from xla_fsdp.compile_only.devices import devices_of, first_line, prepare_jax
from xla_fsdp.compile_only.graphs import Graph, Step, local_bytes
from xla_fsdp.compile_only.kernel_cycles import write_kernel_cycles
from xla_fsdp.compile_only.processes import libtpu_process
from xla_fsdp.compile_only.topologies import Topology
from xla_fsdp.libtpu_flags import VARIABLE, raise_if_refused


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a graph; bytes are those of one device."""

    fits: bool
    argument_bytes: int | None
    output_bytes: int | None
    temporary_bytes: int | None
    peak_bytes: int
    """Bytes of HBM in use at once, arguments included.

    It is the figure that decides: the compiler accepts a limit above it and refuses one below,
    whatever the sum of the others. Where it does not fit, this is the least that is needed.
    """
    capacity_bytes: int
    result_shardings: list[str]
    """How each result lies, as marked or as the compiler chose, in XLA's notation."""
    hlo: str
    """The scheduled module of a device, empty where it does not fit, with its kernels' cycles."""
    seconds: float


def check_installed() -> None:
    """Raises UsageError if libtpu or jaxlib is missing."""
    for name in ("libtpu", "jax", "jaxlib"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--compile_only needs {name}: python3 -m pip install -r requirements-tpu.txt"
            )


def compile_graph(
    graph: Graph, replicas: int, topology: Topology, by_host: bool, variables: dict[str, str]
) -> Compiled:
    """Compile for the slice: ``replicas`` copies of a program that each run on their part of it.

    Every argument's sharding must already be resolved. ``by_host``: the mesh counts the devices
    host by host, not by their numbers. ``variables`` are those of the environment that libtpu is to
    start with. It runs in a process of its own. Raises UsageError if libtpu refuses the program, or
    ends so.
    """
    with (
        tempfile.NamedTemporaryFile(mode="r") as complaints,
        libtpu_process(variables, complaints.name) as process,
    ):
        try:
            compiled = process.submit(_compile, graph, replicas, topology, by_host).result()
        except BrokenProcessPool:
            text = complaints.read()
            raise_if_refused(text)
            check = re.search(r"Check failed: .*", text)
            raise UsageError(
                f"libtpu crashed on this step ({check[0] if check else text[-300:]}): try another "
                "slice, batch size or mesh"
            ) from None
    return replace(compiled, hlo=write_kernel_cycles(compiled.hlo, topology, variables))


def _compile(graph: Graph, replicas: int, topology: Topology, by_host: bool) -> Compiled:
    module = as_stablehlo(graph)
    jax_private.mark_main(module, graph.sharding_of, graph.results, graph.donated)
    devices = devices_of(topology)
    numbers = np.array(_device_ids(devices, by_host)).reshape(replicas, -1)
    left = [mark is None for mark in graph.results]
    start = time.perf_counter()
    try:
        executable = jax_private.compile_for(devices, numbers, module, left)
    except Exception as error:  # noqa: BLE001
        asked = hbm_asked_for(str(error), local_bytes(graph.arguments.values(), lambda _: None))
        if asked is None:
            raise UsageError(_refusal(first_line(error))) from None
        seconds, capacity = time.perf_counter() - start, topology.chip.hbm_bytes
        return Compiled(False, None, None, None, asked, capacity, [], "", seconds)
    seconds = time.perf_counter() - start
    memory = executable.get_compiled_memory_stats()
    return Compiled(
        fits=True,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        capacity_bytes=topology.chip.hbm_bytes,
        result_shardings=jax_private.result_shardings(executable),
        hlo=executable.hlo_modules()[0].to_string(),
        seconds=seconds,
    )


def _refusal(said: str) -> str:
    text = f"the TPU compiler refuses the step: {said}"
    if "memory space vmem" in said:
        text += f"; try {VARIABLE}=--xla_tpu_scoped_vmem_limit_kib=16384, libtpu's own limit"
    return text


def _device_ids(devices: list[Any], by_host: bool) -> list[int]:
    """Return the ids in the mesh's order, as ``xla_fsdp.sharding.placement.device_order``."""
    if not by_host:
        return sorted(device.id for device in devices)

    def place(device: Any) -> tuple[int, int, int]:
        return getattr(device, "slice_index", 0), device.process_index, device.id

    return [device.id for device in sorted(devices, key=place)]


def as_stablehlo(graph: Graph) -> Any:
    """Return the program of all devices together as a StableHLO module."""
    prepare_jax()
    return jax_private.stablehlo_of(graph.hlo)


def named_alike(step: Step) -> Step:
    """Return the step with graphs that differ in the names of operations alone made the same."""
    prepare_jax()
    first: dict[str, bytes] = {}
    graphs = [
        replace(graph, hlo=first.setdefault(jax_private.text_without_names(graph.hlo), graph.hlo))
        for graph in step.graphs
    ]
    return replace(step, graphs=graphs)


def hbm_asked_for(message: str, argument_bytes: int) -> int | None:
    """Return the bytes that a refused program needs at least; None if that is not the error.

    The compiler gives up at the first thing that does not fit, often the temporaries or one of
    them, without the arguments: those then come on top.
    """
    alone = re.search(r"Allocation \(size=(\d+)\) would exceed memory", message)
    if alone:
        return int(alone[1]) + argument_bytes
    used = re.search(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm", message)
    if not used:
        return None
    asked = int(float(used[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[used[2]])
    return asked + (argument_bytes if re.search(r"arguments +0B", message) else 0)
