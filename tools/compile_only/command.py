"""``--compile_only``: trace the training step, compile it for a TPU slice, tell what came out."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from data.files import no_link
from models import timm_private
from tools.compile_only.compiler import (
    Compiled,
    as_stablehlo,
    check_installed,
    compile_graph,
    named_alike,
)
from tools.compile_only.expected import Links, expect
from tools.compile_only.explain import Cost, draw, explain, explained_json, explained_table
from tools.compile_only.hlo import count_flops, measure
from tools.compile_only.report import CompiledGraph, Report, as_json, as_table, make_report
from tools.compile_only.trace import Graph, Result, Step, local_bytes, start_xla, trace_step
from training.config import RunConfig
from training.errors import UsageError, warn_of_others
from xla_fsdp import jax_private, torch_xla_private, tpu
from xla_fsdp.config import XlaConfig
from xla_fsdp.launch_xla import NoBackwardYet
from xla_fsdp.resolve_xla import XlaRun, resolve_for_slice
from xla_fsdp.tpu import KNOWN, parse_topology

DOES_NOT_FIT = 3
"""The exit code, for scripts that look for the smallest slice."""


def compile_only(config: RunConfig, own: XlaConfig) -> int:
    """Print the table, or with ``--json`` the figures, and return the exit code: 0 if it fits.

    Raises UsageError.
    """
    libtpu_args = os.environ.get(tpu.VARIABLE, "")  # before torch_xla adds to them
    if not own.tpu_topology:
        raise UsageError(f"--compile_only requires --tpu_topology. Known, for example: {KNOWN}")
    if "," in own.tpu_topology:
        raise UsageError(
            f"--compile_only takes one slice, not {own.tpu_topology}: --plan takes several"
        )
    check_installed()
    used = (torch_xla_private, jax_private, timm_private)
    warn_of_others(*(each.WRITTEN_FOR for each in used))
    topology = parse_topology(own.tpu_topology, config.sharding.mesh_dcn)
    with NoBackwardYet():
        run = resolve_for_slice(config, own, topology)
    _check_breaks(run)
    hlo_dir = _make_folder(own.hlo_dir)
    links = Links(topology, run.mesh.counts_by_host)
    report, graphs = _compile(run, links, libtpu_args)
    if hlo_dir:
        _keep_modules(graphs, hlo_dir)
    costs = _explain(graphs, links) if own.explain else []
    if config.use.json:
        explained = {"explained": explained_json(costs)} if costs else {}
        print(json.dumps(as_json(report) | explained))
    else:
        print("\n\n".join([as_table(report), *([explained_table(costs)] if costs else [])]))
    if costs and hlo_dir:
        draw(costs, report, hlo_dir / "explain.png")
        _say(f"drew {hlo_dir / 'explain.png'}")
    return 0 if report.fits else DOES_NOT_FIT


def _check_breaks(run: XlaRun) -> None:
    breaks = run.own.mark_step_after_forward or run.own.mark_step_every_n_blocks
    if breaks and run.config.sharding.grad_ckpt != "full":
        raise UsageError(
            "--compile_only with a broken graph requires --grad_ckpt full: of activations that are "
            "kept, PyTorch does not show all"
        )


def _make_folder(name: str | None) -> Path | None:
    """Make the folder of ``--hlo_dir`` now, before minutes of compilation. Raises UsageError."""
    if name is None:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"--hlo_dir {name} is a file, not a folder") from None
    except OSError as error:
        raise UsageError(f"--hlo_dir {name} cannot be made: {error.strerror}") from None
    return folder


def _compile(run: XlaRun, links: Links, libtpu_args: str) -> tuple[Report, list[CompiledGraph]]:
    topology = links.topology
    start_xla(topology.devices, run.own.xla_fsdp)
    parameters, batch_size = run.model.parameter_count, run.config.data.batch_size
    _say(f"tracing {run.model.name}, {parameters:,} parameters, for {topology.devices} devices ...")
    start = time.perf_counter()
    step = trace_step(run, named=run.own.explain)
    if run.own.explain:
        step = named_alike(step)
    trace_s = time.perf_counter() - start
    compile_for = functools.partial(
        compile_graph,
        replicas=step.replicas,
        topology=topology,
        by_host=links.by_host,
        variables=tpu.as_on_a_tpu(topology.generation, libtpu_args),
    )
    graphs = _compile_graphs(step, links, compile_for)
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
        versions={name: version(name) for name in ("torch_xla", "libtpu", "jaxlib")},
    )
    return report, graphs


def _compile_graphs(
    step: Step, links: Links, compile_for: Callable[[Graph], Compiled]
) -> list[CompiledGraph]:
    """Compile each different graph once, in the order in which they first run."""
    done: dict[bytes, Compiled] = {}

    def shardings(result: Result) -> str | None:
        compiled = done.get(step.graphs[result.graph].hlo)
        return compiled.result_shardings[result.number] if compiled and compiled.fits else None

    topology, distinct = links.topology, step.distinct()
    libtpu = version("libtpu")
    flops = {}
    for number, (graph, *_) in enumerate(distinct, 1):
        of_one = count_flops(as_stablehlo(graph), topology.chip.int8_pace)
        flops[graph.hlo] = of_one * step.replicas
        if not all(each.fits for each in done.values()):
            continue  # it is not known how what this one is given lies
        which = f" graph {number} of {len(distinct)}" if len(distinct) > 1 else ""
        _say(f"compiling{which} for {topology.name} with libtpu {libtpu}, a minute or two ...")
        done[graph.hlo] = compile_for(graph.given(shardings))
    graphs = []
    for same in distinct:
        compiled = done.get(same[0].hlo)
        traffic = expected = None
        if compiled and compiled.fits:
            traffic = measure(compiled.hlo, topology.devices, topology.slices)
            expected = expect(compiled.hlo, links)
        resident = max(local_bytes(graph.resident, shardings) for graph in same)
        of_all = flops[same[0].hlo]
        graphs.append(CompiledGraph(len(same), compiled, traffic, expected, of_all, resident))
    return graphs


def _explain(graphs: list[CompiledGraph], links: Links) -> list[Cost]:
    """Return what each instruction of a step costs; nothing if a graph does not fit."""
    modules = [(graph.compiled.hlo if graph.compiled else "", graph.runs) for graph in graphs]
    if not all(hlo for hlo, _ in modules):
        return []
    return [cost for hlo, runs in modules for cost in explain(hlo, links, runs)]


def _keep_modules(graphs: list[CompiledGraph], folder: Path) -> None:
    """Write each scheduled module as text; one that does not fit has none."""
    for number, graph in enumerate(graphs, 1):
        if graph.compiled and graph.compiled.hlo:
            path = folder / f"graph_{number}.hlo"
            with open(path, "w", opener=no_link) as file:
                file.write(graph.compiled.hlo)
            _say(f"kept {path}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
