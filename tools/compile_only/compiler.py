"""The TPU compiler, without a TPU: libtpu's compile-only client for a topology.

libtpu aborts its process if an internal check fails, so each compilation runs in a separate
process. That process may use another libtpu version than torch_xla requires, from another folder.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.compile_only.hlo import types_of
from tpu_attention.kernels import COUNTED, Counted
from tpu_machines import LIBTPU_VARIABLE
from training.errors import UsageError
from training.processes.parent import end_with
from xla_fsdp import environment, jax_private
from xla_fsdp.tpu import CHIPS, Topology, raise_if_refused

JAX_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask about a TPU
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is used: nothing to lock
}
"""The environment that JAX is to read when it is first imported: it must leave the TPU alone."""


def check_installed(mode: str) -> None:
    """Raise UsageError if torch_xla, libtpu or jaxlib is missing, which the flag ``mode`` needs, or
    if a variable would change what torch_xla traces."""
    for name in ("torch_xla", "libtpu", "jax", "jaxlib"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"{mode} requires the package {name}: python3 -m pip install -r "
                "requirements-tpu.txt"
            )
    environment.check_variables()


# -- the graphs of a training step, as its trace hands them over; shardings in XLA's notation ------

REPLICATED = "{replicated}"
"""Every device has the whole."""


class Result(NamedTuple):
    """One of a graph's results."""

    graph: int
    number: int


class Value(NamedTuple):
    """Data on the devices: bytes in all, and its sharding."""

    size: int
    sharding: str | Result
    """A ``Result`` where the program has not marked one: the compiler's choice, known later."""


@dataclass(frozen=True)
class Graph:
    """A graph as HLO, and the shardings of its arguments and results."""

    hlo: bytes
    arguments: dict[int, Value]
    """Arguments by their number; those that are not here are small and replicated."""
    results: tuple[str | None, ...]
    """The sharding of each result; None where that is left to the compiler."""
    donated: dict[int, int]
    """Maps an argument to the result that takes its place in memory."""
    resident: tuple[Value, ...]
    """Values that live on the devices meanwhile without being arguments."""


@dataclass(frozen=True)
class Step:
    """A training step as the graphs that it runs, one after the other."""

    graphs: list[Graph]
    replicas: int
    """Programs that run together: nested FSDP has one a device, SPMD one for all."""
    state_bytes: int
    """Parameters and optimizer state on one device."""
    description: str


def local_bytes(values: Iterable[Value], chosen: Mapping[Result, str]) -> int:
    """Return the bytes on one device, without values of which no sharding is marked or chosen."""
    total = 0
    for size, mark in values:
        sharding = chosen.get(mark) if isinstance(mark, Result) else mark
        total += size // tiles(sharding) if sharding else 0
    return total


def tiles(sharding: str) -> int:
    """Return over how many different parts a value is spread: 4 for {devices=[4,1]0,1,2,3}."""
    devices = re.match(r"\{devices=\[([\d,]+)\]", sharding)
    if not devices:
        return 1
    sizes = [int(size) for size in devices[1].split(",")]
    return math.prod(sizes[:-1] if "last_tile_dim_replicate" in sharding else sizes)


# -- the devices of a TPU slice that is not there --------------------------------------------


def devices_of(topology: Topology) -> list[Any]:
    """Return the devices of libtpu's compile-only client. Raises UsageError."""
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.slice_chips < 4:  # else it has hosts of 2 x 2 chips; two chips are half of one
        options["chips_per_host_bounds"] = (1, topology.slice_chips, 1)
    if topology.generation == 4:  # a run's libtpu reads the variable itself when it opens the chips
        options["chip_config_name"] = os.environ["TPU_MEGACORE"]
    try:
        devices = topologies.get_topology_desc(topology.name, "tpu", **options).devices
    except Exception as error:  # noqa: BLE001 - jaxlib's own type, of no public name
        raise UsageError(
            f"--tpu_topology {topology.name}: libtpu rejects this slice ({_first_line(error)})"
        ) from None
    assert len(devices) == topology.devices, (len(devices), topology)
    return devices


def device_ids(devices: list[Any], by_host: bool) -> list[int]:
    """Return the ids in the mesh's order, as ``xla_fsdp.layout.MeshLayout``."""
    if not by_host:
        return sorted(device.id for device in devices)
    places = [(getattr(d, "slice_index", 0), d.process_index, d.id) for d in devices]
    return [number for *_, number in sorted(places)]


def _first_line(error: Exception) -> str:
    """Return the message of an error of jaxlib's, without the stack of C++ below it."""
    return str(error).strip().splitlines()[0][:300]


# -- compiling a graph ----------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """The compiler's figures of a graph; bytes are those of one device."""

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
    """The sharding of each result, as marked or as the compiler chose, in XLA's notation."""
    hlo: str
    """The scheduled module of a device, empty where it does not fit, with its kernels' cycles."""
    seconds: float


def libtpu_process(variables: Mapping[str, str], stderr: str) -> ProcessPoolExecutor:
    """Return one process whose environment has ``variables``; its stderr goes to the file named.

    There libtpu complains that there is no TPU. The process ends with this one, however that ends:
    it would compile on for minutes, in gigabytes.
    """
    arguments = (stderr, dict(variables), os.getpid())
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=arguments)


def _start(stderr: str, variables: dict[str, str], parent: int) -> None:
    end_with(parent)
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    os.environ.update(variables)


def compile_graph(
    graph: Graph,
    arguments: dict[int, str],
    replicas: int,
    topology: Topology,
    by_host: bool,
    variables: dict[str, str],
) -> Compiled:
    """Compile for the slice: ``replicas`` copies of a program that each run on their part of it.

    ``arguments``: the sharding of each argument by its number. ``by_host``: as of ``Links``.
    ``variables`` are those of the environment that libtpu starts with, in a process of its own.
    Raises UsageError if libtpu refuses the program, or crashes on it.
    """
    with (
        tempfile.NamedTemporaryFile(mode="r", encoding="utf-8", errors="replace") as stderr,
        libtpu_process(variables, stderr.name) as process,
    ):
        try:
            job = process.submit(_compile, graph, arguments, replicas, topology, by_host)
            compiled = job.result()
        except BrokenProcessPool:
            text = stderr.read()
            raise_if_refused(text)
            check = re.search(r"Check failed: .*", text)
            why = check[0] if check else text[-300:]
            advice = "try another slice, batch size or mesh"
            for part_of_message, known in _CRASHES.items():
                advice = known if part_of_message in why else advice
            raise UsageError(f"libtpu crashed on this step ({why}): {advice}") from None
    return replace(compiled, hlo=write_kernel_cycles(compiled.hlo, topology, variables))


_CRASHES = {
    "preferred_offset": "libtpu 0.0.21 does so if a step needs slightly more HBM than a chip has: "
    "use a smaller batch, --residual_dtype bf16, --mesh_tensor or more chips",
    "s_count.has_value()": "libtpu 0.0.21 does so for v4 on some steps of several graphs: drop "
    "--mark_step_after_forward",
}
"""Advice by what libtpu's failed check says (docs/evidence/findings.md)."""


def _compile(
    graph: Graph, arguments: dict[int, str], replicas: int, topology: Topology, by_host: bool
) -> Compiled:
    """Compile in this process, which is libtpu's own."""
    os.environ.update(JAX_WITHOUT_TPU)
    module = jax_private.stablehlo_of(graph.hlo)
    jax_private.mark_main(
        module, lambda number: arguments.get(number, REPLICATED), graph.results, graph.donated
    )
    devices = devices_of(topology)
    numbers = np.array(device_ids(devices, by_host)).reshape(replicas, -1)
    unmarked = [mark is None for mark in graph.results]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            executable = jax_private.compile_for(devices, numbers, module, unmarked, folder)
        except Exception as error:  # noqa: BLE001
            sizes = (value.size // tiles(arguments[n]) for n, value in graph.arguments.items())
            needed = hbm_needed(str(error), sum(sizes))
            if needed is None:
                text = f"the TPU compiler rejects the step: {_first_line(error)}"
                if "memory space vmem" in text:
                    limit = 32768 if topology.chip is CHIPS["tpu7x"] else 16384
                    flag = f"{LIBTPU_VARIABLE}=--xla_tpu_scoped_vmem_limit_kib={limit}"
                    text += f"; try libtpu's default limit, {flag}"
                raise UsageError(text) from None
            seconds = time.perf_counter() - start
            capacity = topology.chip.hbm_bytes
            return Compiled(False, None, None, None, needed, capacity, [], "", seconds)
        # Not ``hlo_modules``: jaxlib 0.7.1 cannot read all that libtpu 0.0.52 makes for tpu7x.
        (written,) = Path(folder).glob("*.after_codegen.txt")
        hlo = written.read_text(encoding="utf-8")
    seconds = time.perf_counter() - start
    memory = executable.get_compiled_memory_stats()
    return Compiled(
        fits=True,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        capacity_bytes=topology.chip.hbm_bytes,
        # A program of one device, as nested FSDP's, has none: each device has its own whole.
        result_shardings=jax_private.result_shardings(executable)
        or [REPLICATED] * len(graph.results),
        hlo=hlo,
        seconds=seconds,
    )


def hbm_needed(message: str, argument_bytes: int) -> int | None:
    """Return the bytes that a refused program needs at least; None if that is not the error.

    The compiler gives up at the first thing that does not fit, often the temporaries or one of
    them, without the arguments: those then come on top.
    """
    alone = re.search(r"Allocation \(size=(\d+)\) would exceed memory", message)
    if alone:
        return int(alone[1]) + argument_bytes
    used = re.search(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm", message)
    temporaries = re.search(r"required for HLO temporaries \(([\d.]+)([KMG])\)", message)
    size = used or temporaries
    if not size:
        return None
    needed = int(float(size[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[size[2]])
    without = temporaries or re.search(r"arguments +0B", message)
    return needed + (argument_bytes if without else 0)


# -- cycles of Pallas kernels ----------------------------------------------------------------
#
# The compiler writes an estimate of cycles into the configuration of each fusion, and none into
# that of a kernel. But its dumps name how many bundles of instructions a kernel's loop has; a core
# starts one a cycle. So each kernel is compiled once more by itself, and the cycles of all its
# programs are written into its call, where those of a fusion are. Where each program runs only one
# of many branches, the kernel is counted by stand-ins of one branch each (``Counted``).
#
# Not in it: what the matrix units still have to do when products come faster than they compute
# them, and waiting for operands. So a kernel takes at least what its FLOPs and bytes do.

_CALL = re.compile(r"^.*custom_call_target=\"tpu_custom_call\".*$", re.M)
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}, ")
_BUNDLES = re.compile(r"total scheduled bundles: +(\d+)\n(?:.*\n)*?.*custom-call")
_ROUNDS = re.compile(r", (\d+) /\* loop exit test")
_FILL = 2
"""Rounds of a kernel's loop in which operands only arrive, or results only leave."""
_TYPES = {"s32": "i32", "u32": "ui32", "pred": "i1"}


CompileKernel = Callable[[str, dict[str, Any], Topology], None]
"""Compiles, in libtpu's process, the kernel of a call with this configuration alone."""


def write_kernel_cycles(
    hlo: str,
    topology: Topology,
    variables: dict[str, str],
    compile_kernel: CompileKernel | None = None,
) -> str:
    """Return the module with the cycles of its kernels written into their calls.

    Of a kernel that does not compile alone nothing is written. ``compile_kernel``: by default
    through jaxlib.
    """
    compile_kernel = compile_kernel or _compile_kernel
    calls: list[tuple[str, dict[str, Any]]] = []
    for call in _CALL.findall(hlo):
        config = json.JSONDecoder().raw_decode(call.partition("backend_config=")[2])[0]
        calls.append((call, config["custom_call_config"]))
    if not calls:
        return hlo
    cycles: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        variables = {**variables, LIBTPU_VARIABLE: f"{variables.get(LIBTPU_VARIABLE, '')} {dump}"}
        with (
            libtpu_process(variables, os.devnull) as process,
            contextlib.suppress(BrokenProcessPool),
        ):
            for call, config in calls:
                if config["body"] in cycles:
                    continue
                counted = COUNTED.get(config["body"], Counted())
                bodies = counted.stand_ins() if counted.stand_ins else [config["body"]]
                for body in {*bodies} - {*cycles}:
                    process.submit(
                        compile_kernel, call, {**config, "body": body}, topology
                    ).result()
                    cycles[body] = _cycles_dumped(folder) / counted.branches
                cycles[config["body"]] = sum(map(cycles.__getitem__, bodies)) / len(bodies)
    timed = {}
    for call, config in calls:
        if cycles.get(config["body"]):
            estimate = f'"estimated_cycles":"{cycles[config["body"]]:.0f}","custom_call_config":'
            timed[call] = call.replace('"custom_call_config":', estimate, 1)
    return _CALL.sub(lambda call: timed.get(call[0], call[0]), hlo)


def _cycles_dumped(folder: str) -> int:
    """Return the cycles of all programs of the kernel that was compiled last, which has dumped into
    this folder; empty it."""
    bundles: list[int] = []
    rounds: list[int] = []
    for file in sorted(Path(folder).iterdir()):
        if file.name.endswith("final_bundles.txt"):
            text = file.read_text(encoding="utf-8", errors="replace")
            count = _BUNDLES.search(text)
            bundles += [int(count[1])] if count else []
            rounds += map(int, _ROUNDS.findall(text))
        file.unlink()
    return max(bundles, default=0) * max(1, max(rounds, default=1 + _FILL) - _FILL)


def _compile_kernel(call: str, config: dict[str, Any], topology: Topology) -> None:
    """Compile a module of nothing but the call of a kernel, in this process, libtpu's own."""
    os.environ.update(JAX_WITHOUT_TPU)
    text, results = module_of_kernel(call, config)
    device = devices_of(topology)[0]
    with contextlib.suppress(Exception):  # jaxlib's own type, of no public name: no cycles then
        module = jax_private.module_of(text)
        jax_private.compile_for([device], np.array([[device.id]]), module, [True] * results)


def module_of_kernel(call: str, config: dict[str, Any]) -> tuple[str, int]:
    """Return a StableHLO module with a call of a Mosaic kernel and nothing else, as text, and the
    number of its results. ``call``: as a compiled module has it; ``config``: of the kernel."""
    result, _, rest = call.partition(" custom-call(")
    operands = _OPERANDS.search(rest)
    assert operands, call[:300]
    arguments, results = (
        [(_TYPES.get(dtype, dtype), sizes) for dtype, sizes in types_of(text)]
        for text in (operands[1], result.partition(" = ")[2])
    )
    inputs, outputs = (
        [f"tensor<{''.join(f'{size}x' for size in sizes)}{kind}>" for kind, sizes in types]
        for types in (arguments, results)
    )
    input_layouts, output_layouts = (
        ", ".join(f"dense<{[*range(len(s))][::-1]}> : tensor<{len(s)}xindex>" for _, s in types)
        for types in (arguments, results)
    )
    names = [f"%a{number}" for number in range(len(inputs))]
    heads = ", ".join(f"{name}: {type_}" for name, type_ in zip(names, inputs, strict=True))
    returned = ", ".join(f"%r#{number}" for number in range(len(outputs)))
    written = json.dumps({"custom_call_config": config}).replace("\\", "\\\\").replace('"', '\\"')
    text = f"""module {{ func.func public @main({heads}) -> ({", ".join(outputs)}) {{
        %r:{len(outputs)} = "stablehlo.custom_call"({", ".join(names)}) {{
            call_target_name = "tpu_custom_call", api_version = 1 : i32,
            backend_config = "{written}",
            operand_layouts = [{input_layouts}], result_layouts = [{output_layouts}]
        }} : ({", ".join(inputs)}) -> ({", ".join(outputs)})
        func.return {returned} : {", ".join(outputs)} }} }}"""
    return text, len(results)
