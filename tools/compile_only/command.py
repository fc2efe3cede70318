"""``--compile_only``: trace the training step, compile it for a TPU slice, print a report."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data.files import no_link
from models import timm_private
from tools.compile_only import compiler
from tools.compile_only.compiler import Compiled, Result, local_bytes
from tools.compile_only.expected import Expected, Links, expect
from tools.compile_only.explain import draw, explain, explained_json, explained_table
from tools.compile_only.hlo import Traffic, count_flops, measure
from tpu_machines import LIBTPU_VARIABLE
from training.config import RunConfig
from training.errors import UsageError, warn_of_others
from training.logs.figures import drawing
from training.mesh import replicas
from xla_fsdp import jax_private, torch_xla_private, tpu
from xla_fsdp.config import XlaConfig
from xla_fsdp.launch_xla import forbid_autograd
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import KNOWN, Topology, parse_topology

DOES_NOT_FIT = 3
"""The exit code, for scripts that look for the smallest slice."""


def start_xla(devices: int, form: str) -> None:
    """Make XLA on the CPU believe that it has this many devices, for this form of FSDP.
    To be called before ``trace`` is imported."""
    os.environ["PJRT_DEVICE"] = "CPU"
    # A few virtual ones stand for all: many crash autograd (128 do), and one is never sharded.
    os.environ["CPU_NUM_DEVICES"] = "1" if form == "nested" else str(min(devices, 4))
    import torch_xla.runtime as xr

    xr.global_runtime_device_count = lambda: devices  # asked by Mesh and by the backend
    if form == "spmd":
        xr.use_spmd()
    else:
        xr.world_size = lambda: devices
        xr.global_ordinal = lambda: 0


def compile_step(config: RunConfig, xla: XlaConfig) -> int:
    """Print the table, or with ``--json`` the figures, and return the exit code: 0 if it fits.
    Raises UsageError."""
    libtpu_args = os.environ.get(LIBTPU_VARIABLE, "")  # before torch_xla adds its own
    name = slice_name(xla, ": use --plan for several")
    compiler.check_installed("--compile_only")
    private_modules = (torch_xla_private, jax_private, timm_private)
    warn_of_others(*(module.WRITTEN_FOR for module in private_modules))
    topology = parse_topology(name, replicas(config.sharding))
    with forbid_autograd():
        run = resolve_for_slice(config, xla, topology)
    is_broken = (
        run.backend_config.mark_step_after_forward or run.backend_config.mark_step_every_n_blocks
    )
    if is_broken and run.config.sharding.grad_ckpt != "full":
        raise UsageError(
            "--compile_only with a broken graph requires --grad_ckpt full: PyTorch does not expose "
            "all saved activations"
        )
    newer = tpu.takes_newer_libtpu(xla.tpu_compiler, topology)
    libtpu = tpu.NEWER_LIBTPU if newer else version("libtpu")
    hlo_dir = make_hlo_dir(xla.hlo_dir)

    # Trace.
    parameters, batch_size = run.model.parameter_count, run.config.data.batch_size
    start_xla(topology.devices, run.backend_config.xla_fsdp)
    start, load = time.perf_counter(), os.getloadavg()[0]
    with reporting(f"tracing {run.model_line}, for {topology.devices} devices"):
        from tools.compile_only.trace import trace_step  # not before: it imports torch_xla

        step = trace_step(run, named=xla.explain)
    trace_s = time.perf_counter() - start

    # Compile each different graph once, in the order in which they first run. What is resident
    # beside a graph may differ from run to run: losses of earlier micro-batches.
    os.environ.update(compiler.JAX_WITHOUT_TPU)
    runs_of: dict[str, list[int]] = {}
    for number, graph in enumerate(step.graphs):
        runs_of.setdefault(jax_private.text_of(graph.hlo, with_names=False), []).append(number)
    links = Links(topology, run.mesh.counts_by_host)
    variables = tpu.libtpu_environment(topology, libtpu_args, newer=newer)
    compiled: dict[str, Compiled] = {}
    chosen: dict[Result, str] = {}  # the compiler's shardings of results
    for text, numbers in runs_of.items():
        count = f" graph {len(compiled) + 1} of {len(runs_of)}" if len(runs_of) > 1 else ""
        graph = step.graphs[numbers[0]]
        arguments = {
            argument: sharding if isinstance(sharding, str) else chosen[sharding]
            for argument, (_, sharding) in graph.arguments.items()
        }
        with reporting(f"compiling{count} for {topology.name} with libtpu {libtpu}"):
            compiled[text] = compiler.compile_graph(
                graph, arguments, step.replicas, topology, links.by_host, variables
            )
        if not compiled[text].fits:
            break  # the shardings of the next one's arguments are not known
        for n, sharding in enumerate(compiled[text].result_shardings):
            chosen |= {Result(number, n): sharding for number in numbers}

    graphs = []
    for text, numbers in runs_of.items():
        result, traffic, expected = compiled.get(text), None, None
        if result and result.fits:
            traffic = measure(result.hlo, topology.devices, topology.slices)
            expected = expect(result.hlo, links)
        flops = step.replicas * count_flops(text, topology.chip.int8_speedup)
        resident = max(local_bytes(step.graphs[number].resident, chosen) for number in numbers)
        graphs.append(CompiledGraph(len(numbers), result, traffic, expected, flops, resident))
    report = make_report(
        topology=topology,
        graphs=graphs,
        model_flops=run.model.train_flops_per_image * batch_size,
        parameters=parameters,
        batch_size=batch_size,
        input_shape=run.model.sizes.input_shape,
        precision=run.config.sharding.precision,
        mesh=asdict(run.mesh),
        sharding=step.description,
        state_bytes=step.state_bytes,
        trace_s=trace_s,
        load_average=load,
        cores=cores(),
        versions={
            "torch_xla": version("torch_xla"),
            "libtpu": libtpu,
            "jaxlib": version("jaxlib"),
        },
    )

    # Save, print.
    if hlo_dir:
        write_modules(hlo_dir, graphs)
    if xla.explain:
        add_explanation(report, graphs, links, hlo_dir)
    return print_report(config, report)


# -- shared with ``torchtpu.py`` ------------------------------------------------------------------


def slice_name(xla: XlaConfig, advice: str = "") -> str:
    """Return the one slice of ``--tpu_topology``. ``advice``: what to do with several.
    Raises UsageError."""
    if not xla.tpu_topology:
        raise UsageError(
            f"--compile_only requires --tpu_topology, such as v5e:4x4; shapes by kind: {KNOWN}"
        )
    if "," in xla.tpu_topology:
        raise UsageError(f"--compile_only accepts one slice, not {xla.tpu_topology}{advice}")
    return xla.tpu_topology


def make_hlo_dir(name: str | None) -> Path | None:
    """Return the folder of ``--hlo_dir``, made before minutes of compilation. Raises UsageError."""
    if name is None:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"--hlo_dir {name} is a file, not a folder") from None
    except OSError as error:
        raise UsageError(f"--hlo_dir {name} cannot be created: {error.strerror}") from None
    return folder


def write_modules(folder: Path, graphs: list[CompiledGraph]) -> None:
    """Write the scheduled modules into a folder, as text."""
    for number, module in enumerate(graphs, 1):
        if module.compiled and module.compiled.hlo:  # one that does not fit has no schedule
            path = folder / f"graph_{number}.hlo"
            with open(path, "w", encoding="utf-8", opener=no_link) as file:
                file.write(module.compiled.hlo)
            log(f"wrote {path}")


def add_explanation(
    report: dict[str, Any], graphs: list[CompiledGraph], links: Links, hlo_dir: Path | None
) -> None:
    """Add to the figures what ``--explain`` prints; plot it into the folder. Do nothing if a graph
    does not fit."""
    if not all(module.compiled and module.compiled.hlo for module in graphs):
        return
    costs = [
        cost
        for module in graphs
        if module.compiled
        for cost in explain(module.compiled.hlo, links, module.runs)
    ]
    report["explained"] = explained_json(costs)
    if hlo_dir:
        picture = hlo_dir / "explain.png"
        with drawing(picture, log):
            draw(costs, report, picture)
            log(f"wrote {picture}")


def print_report(config: RunConfig, report: dict[str, Any]) -> int:
    """Print the table, or with ``--json`` the figures; return the exit code."""
    if config.use.json:
        print(json.dumps(report))
    else:
        print(as_table(report))
        if "explained" in report:
            print(f"\n{explained_table(report['explained'])}")
    return 0 if report["fits"] else DOES_NOT_FIT


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_REPORT_EVERY_S = 60.0


@contextlib.contextmanager
def reporting(what: str) -> Iterator[None]:
    """Log what is done inside, and each minute for how long."""
    log(f"{what} ...{_busy(os.getloadavg()[0], cores())}")
    start, ended = time.perf_counter(), threading.Event()

    def report() -> None:
        while not ended.wait(_REPORT_EVERY_S):
            minutes = (time.perf_counter() - start) / 60
            log(f"{what}: {minutes:.0f} min so far{_busy(os.getloadavg()[0], cores())}")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _busy(load: float, cores: int) -> str:
    """Return what to add to a time that others' programs make longer; "" if they do not."""
    if load <= cores:
        return ""
    return f" (load average {load:.1f} on {cores} cores: this time cannot be compared)"


# -- the figures of a step, as JSON and as a table to read -------------------------------

_GIB = 2**30


@dataclass(frozen=True)
class CompiledGraph:
    """One of the graphs of a step, and what is known of it."""

    runs: int
    """How often it runs in a step."""
    compiled: Compiled | None
    """None if an earlier graph does not fit."""
    traffic: Traffic | None
    """None if this graph does not fit."""
    expected: Expected | None
    """None if this graph does not fit."""
    flops: float
    """Operations of the whole slice in one run, at the throughput of bf16 products."""
    resident_bytes: int
    """Bytes on a device of what is there meanwhile without being an argument."""


def make_report(
    *,
    topology: Topology,
    graphs: list[CompiledGraph],
    model_flops: float,
    batch_size: int,
    **facts: Any,
) -> dict[str, Any]:
    """Combine the graphs of a step; ``model_flops`` are those of the whole slice.

    Bytes and seconds are a device's. The memory is that of the graph that needs most (resident: on
    the device meanwhile, in the peak, but not among the arguments), all else the sum over the
    graphs. What follows from a schedule is None if a graph does not fit: that has none.
    """
    chip = topology.chip
    peak, largest, compiled = max(
        (
            (graph.resident_bytes + graph.compiled.peak_bytes, graph, graph.compiled)
            for graph in graphs
            if graph.compiled
        ),
        key=lambda candidate: candidate[0],
    )
    flops = sum(graph.runs * graph.flops for graph in graphs)
    traffic, expected, is_scheduled = Traffic(), Expected(), True
    for graph in graphs:
        if graph.traffic is None or graph.expected is None:
            is_scheduled = False
            continue
        traffic.add(graph.traffic, graph.runs)
        expected = expected.plus(graph.expected, graph.runs)

    compute_s = flops / topology.devices / chip.peak_flops
    hbm_s = traffic.hbm_bytes / chip.hbm_bandwidth
    collective_s = sum(traffic.collective_bytes.values()) / chip.ici_bandwidth
    dcn_s = traffic.dcn_bytes / chip.dcn_bandwidth
    # All four at once, each at its best: no step can be shorter.
    roofline_s = max(compute_s, hbm_s, collective_s, dcn_s)
    expected_s = expected.seconds or math.inf  # 0 if no graph has a schedule
    products_s = model_flops / topology.devices / chip.peak_flops  # of the model alone, at peak
    scheduled = {
        "hbm_bytes": traffic.hbm_bytes,
        "collective_bytes": dict(traffic.collective_bytes),
        "dcn_bytes": traffic.dcn_bytes,
        "collectives": dict(traffic.collectives),
        "asynchronous_collectives": dict(traffic.asynchronous),
        "hbm_s": hbm_s,
        "collective_s": collective_s,
        "dcn_s": dcn_s,
        "roofline_step_s": roofline_s,
        "roofline_mfu": products_s / roofline_s,
        "expected_step_s": expected_s,
        "expected_mfu": products_s / expected_s,
        "expected_images_per_s": batch_size / expected_s,
        "expected_kernels_s": expected.kernels_s,
        "expected_waiting_s": expected.waiting_s,
        "expected_dma_s": expected.dma_s,
        "expected_host_s": expected.host_s,
        "expected_dcn_s": expected.dcn_s,
        "expected_unknown": expected.unknown,
    }
    return {
        "topology": topology.name,
        "slices": topology.slices,
        "chips": topology.chips,
        "devices": topology.devices,
        "batch_size": batch_size,
        **facts,
        "graphs": sum(graph.runs for graph in graphs),
        "distinct_graphs": len(graphs),
        "fits": is_scheduled and peak <= compiled.capacity_bytes,
        "peak_hbm_bytes": peak,
        "hbm_capacity_bytes": compiled.capacity_bytes,
        "resident_bytes": largest.resident_bytes,
        "argument_bytes": compiled.argument_bytes,
        "output_bytes": compiled.output_bytes,
        "temporary_bytes": compiled.temporary_bytes,
        "flops_per_chip": flops / topology.chips,
        "model_flops": model_flops,
        "compute_s": compute_s,
        "compile_s": sum(graph.compiled.seconds for graph in graphs if graph.compiled),
        **(scheduled if is_scheduled else dict.fromkeys(scheduled)),
    }


def as_table(report: dict[str, Any]) -> str:
    def gib(name: str) -> str:
        return "" if report[name] is None else f"{report[name] / _GIB:.2f} GiB"

    def ms(name: str) -> str:
        return f"{report[name] * 1e3:.1f} ms"

    to_spare = (report["hbm_capacity_bytes"] - report["peak_hbm_bytes"]) / 1e9
    if report["fits"]:
        verdict = f"fits, {to_spare:.1f} GB to spare"
    elif to_spare > 0:  # the user has set a limit
        verdict = "does not fit within the limit that LIBTPU_INIT_ARGS sets"
    else:
        verdict = f"does not fit, needs at least {-to_spare:.1f} GB more"
    slices, chips, several = report["slices"], report["chips"], report["graphs"] > 1
    devices = report["devices"]
    unit = "chip" if devices == chips else "device"
    rows = {
        "slice" if slices == 1 else f"{slices} slices": (
            f"{report['topology']}, {chips} chip"
            + ("s" if chips > 1 else "")
            + (f", {devices} devices" if devices > chips else "")
        ),
        "model": f"{report['parameters']:,} parameters, global batch {report['batch_size']}",
        "sharding": report["sharding"],
    }
    if several:
        rows["graphs per step"] = (
            f"{report['graphs']}, {report['distinct_graphs']} distinct; memory below: largest "
            "graph, all else: whole step"
        )
    rows |= {
        "verdict": verdict,
        f"peak HBM per {unit}": f"{gib('peak_hbm_bytes')} of {gib('hbm_capacity_bytes')}",
        "  arguments": gib("argument_bytes"),
        "    of which state": gib("state_bytes"),
        "  outputs": gib("output_bytes"),
        "  temporaries": gib("temporary_bytes"),
    }
    if several:
        rows["  other resident data"] = gib("resident_bytes")
    rows["FLOPs per chip"] = f"{report['flops_per_chip']:.3e}, {ms('compute_s')} at peak"

    if report["expected_step_s"] is not None:
        if report["hbm_bytes"] is not None:
            rows[f"HBM traffic per {unit}"] = f"{gib('hbm_bytes')}, {ms('hbm_s')} at peak"
        rows[f"collectives per {unit}"] = f"{ms('collective_s')} at peak"
        for kind, size in sorted(report["collective_bytes"].items()):
            count, asynchronous = (
                report[name][kind] for name in ("collectives", "asynchronous_collectives")
            )
            rows[f"  {kind}"] = f"{size / _GIB:.2f} GiB in {count}, {asynchronous} asynchronous"
        if slices > 1:
            rows["between slices (DCN)"] = f"{gib('dcn_bytes')}, {ms('dcn_s')} at peak"
        parts = {
            "kernels": "expected_kernels_s",
            "waiting for collectives": "expected_waiting_s",
            "waiting for DMA": "expected_dma_s",
            "waiting for host memory": "expected_host_s",
            "waiting for other slices": "expected_dcn_s",
        }
        within = ", ".join(f"{text} {ms(name)}" for text, name in parts.items() if report[name])
        how = "from the compiler's cycle counts" + (f": {within}" if within else "")
        if report["expected_unknown"]:
            how += f"; {report['expected_unknown']} instructions estimated from their bytes"
        if "programs" in report:
            how += (
                f"; without the host's time to launch {report['graphs']} program"
                f"{'s' if several else ''}, {ms('host_s')} on this machine"
            )
            error = "not compared with any run"
        elif report["topology"].startswith("tpu7x:"):
            error = "2.6 points too low for the only published run on TPU7x"
        elif report["topology"].startswith("v6e:"):
            error = "5 to 7 points too low for both published runs on v6e"
        else:
            error = "within 3.4 points for half of 16 published runs"
        if report["roofline_step_s"] is not None:
            rows |= {
                "shortest step": f"{ms('roofline_step_s')} (roofline)",
                "highest MFU": f"{100 * report['roofline_mfu']:.1f} %",
            }
        rows |= {
            "expected step": f"{ms('expected_step_s')} ({how})",
            "expected MFU": f"{100 * report['expected_mfu']:.1f} % ({error}: docs/compile_only.md)",
            "expected images/s": f"{report['expected_images_per_s']:.4g}",
        }
    busy = _busy(report["load_average"], report["cores"])
    rows["trace, compile"] = f"{report['trace_s']:.1f} s, {report['compile_s']:.1f} s{busy}"
    rows["versions"] = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
