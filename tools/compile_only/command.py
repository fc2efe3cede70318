"""``--compile_only``: trace the training step, compile it for a TPU slice, print the figures."""

import json
import os
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from data.files import no_link
from models import timm_private
from tools.compile_only import compiler
from tools.compile_only.compiler import Result, local_bytes
from tools.compile_only.expected import Links, expect
from tools.compile_only.explain import draw, explain, explained_json, explained_table
from tools.compile_only.hlo import count_flops, measure
from tools.compile_only.report import CompiledGraph, as_table, make_report
from training.config import RunConfig
from training.errors import UsageError, warn_of_others
from training.logs.figures import drawing
from training.mesh import replicas
from xla_fsdp import jax_private, torch_xla_private, tpu
from xla_fsdp.config import XlaConfig
from xla_fsdp.launch_xla import forbid_autograd
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import KNOWN, parse_topology

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
    libtpu_args = os.environ.get(tpu.VARIABLE, "")  # before torch_xla adds its own
    if not xla.tpu_topology:
        raise UsageError(f"--compile_only requires --tpu_topology. Known, for example: {KNOWN}")
    if "," in xla.tpu_topology:
        raise UsageError(
            f"--compile_only takes one slice, not {xla.tpu_topology}: --plan takes several"
        )
    compiler.check_installed("--compile_only")
    private_modules = (torch_xla_private, jax_private, timm_private)
    warn_of_others(*(module.WRITTEN_FOR for module in private_modules))
    topology = parse_topology(xla.tpu_topology, replicas(config.sharding))
    with forbid_autograd():
        run = resolve_for_slice(config, xla, topology)
    is_broken = (
        run.backend_config.mark_step_after_forward or run.backend_config.mark_step_every_n_blocks
    )
    if is_broken and run.config.sharding.grad_ckpt != "full":
        raise UsageError(
            "--compile_only with a broken graph requires --grad_ckpt full: of activations that are "
            "saved, PyTorch does not show all"
        )
    newer = tpu.takes_newer_libtpu(xla.tpu_compiler, topology)
    libtpu = tpu.NEWER_LIBTPU if newer else version("libtpu")
    hlo_dir = Path(xla.hlo_dir) if xla.hlo_dir is not None else None
    if hlo_dir:  # made now, before minutes of compilation
        try:
            hlo_dir.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UsageError(f"--hlo_dir {xla.hlo_dir} is a file, not a folder") from None
        except OSError as error:
            raise UsageError(f"--hlo_dir {xla.hlo_dir} cannot be made: {error.strerror}") from None

    # Trace.
    parameters, batch_size = run.model.parameter_count, run.config.data.batch_size
    start_xla(topology.devices, run.backend_config.xla_fsdp)
    _log(f"tracing {run.model.name}, {parameters:,} parameters, for {topology.devices} devices ...")
    start = time.perf_counter()
    from tools.compile_only.trace import trace_step  # not before: it imports torch_xla

    step = trace_step(run, named=xla.explain)
    trace_s = time.perf_counter() - start

    # Compile each different graph once, in the order in which they first run. What is resident
    # beside a graph may differ from run to run: losses of earlier micro-batches.
    os.environ.update(compiler.JAX_WITHOUT_TPU)
    runs_of: dict[str, list[int]] = {}
    for number, graph in enumerate(step.graphs):
        runs_of.setdefault(jax_private.text_without_names(graph.hlo), []).append(number)
    links = Links(topology, run.mesh.counts_by_host)
    variables = tpu.libtpu_environment(topology, libtpu_args, newer=newer)
    compiled: dict[str, compiler.Compiled] = {}
    chosen: dict[Result, str] = {}  # the compiler's shardings of results
    for text, numbers in runs_of.items():
        count = f" graph {len(compiled) + 1} of {len(runs_of)}" if len(runs_of) > 1 else ""
        _log(f"compiling{count} for {topology.name} with libtpu {libtpu}, a minute or two ...")
        graph = step.graphs[numbers[0]]
        arguments = {
            argument: sharding if isinstance(sharding, str) else chosen[sharding]
            for argument, (_, sharding) in graph.arguments.items()
        }
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
        versions={
            "torch_xla": version("torch_xla"),
            "libtpu": libtpu,
            "jaxlib": version("jaxlib"),
        },
    )

    # Save, print.
    if hlo_dir:
        for number, module in enumerate(graphs, 1):
            if module.compiled and module.compiled.hlo:  # one that does not fit has no schedule
                path = hlo_dir / f"graph_{number}.hlo"
                with open(path, "w", opener=no_link) as file:
                    file.write(module.compiled.hlo)
                _log(f"wrote {path}")
    if xla.explain and all(module.compiled and module.compiled.hlo for module in graphs):
        costs = [
            cost
            for module in graphs
            if module.compiled
            for cost in explain(module.compiled.hlo, links, module.runs)
        ]
        report["explained"] = explained_json(costs)
        if hlo_dir:
            picture = hlo_dir / "explain.png"
            with drawing(picture, _log):
                draw(costs, report, picture)
                _log(f"wrote {picture}")
    if config.use.json:
        print(json.dumps(report))
    else:
        print(as_table(report))
        if "explained" in report:
            print(f"\n{explained_table(report['explained'])}")
    return 0 if report["fits"] else DOES_NOT_FIT


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
