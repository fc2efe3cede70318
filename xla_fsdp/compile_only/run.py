"""``--compile_only``: trace the training step, compile it for a TPU slice, tell what came out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version

from models.vit import build_vit, train_flops_per_image
from training.arguments import model_config
from training.errors import UsageError
from training.validation import check_model, check_run
from xla_fsdp import options
from xla_fsdp.attention.choice import check_attention
from xla_fsdp.compile_only.compiler import Compiled, compile_graph
from xla_fsdp.compile_only.flops import count_flops
from xla_fsdp.compile_only.graphs import Graph
from xla_fsdp.compile_only.hlo import measure
from xla_fsdp.compile_only.report import CompiledGraph, Report, as_json, as_table, make_report
from xla_fsdp.compile_only.topologies import KNOWN, Topology, parse_topology
from xla_fsdp.compile_only.trace import start_xla, trace_step
from xla_fsdp.sharding.mesh import check_mesh, counts_by_host, mesh_shape


def compile_only(args: argparse.Namespace) -> None:
    """Print the table, or with ``--json`` the figures. Raises UsageError."""
    if not args.tpu_topology:
        raise UsageError(f"--compile_only needs --tpu_topology. Known, for example: {KNOWN}")
    topology = parse_topology(args.tpu_topology, args.mesh_dcn)
    config = model_config(args)
    check_model(config)
    options.check(args)
    check_mesh(args, config, topology.devices)
    check_attention(args)
    check_run(args, topology.devices)
    _check_cuts(args)
    report = _compile(args, topology, config)
    print(json.dumps(as_json(report)) if args.json else as_table(report))


def _check_cuts(args: argparse.Namespace) -> None:
    cuts = {
        "--mark_step_after_forward": args.mark_step_after_forward,
        "--mark_step_every_n_blocks": args.mark_step_every_n_blocks,
    }
    for flag, used in cuts.items():
        if used:
            raise UsageError(
                f"--compile_only has forward and backward in one graph: it does not go with {flag}"
            )


def _compile(args: argparse.Namespace, topology, config) -> Report:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    form = options.fsdp_form(args)
    start_xla(topology.devices, form)
    model = build_vit(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"tracing {args.model}, {parameters:,} parameters, for {topology.devices} devices ...")
    start = time.perf_counter()
    step = trace_step(args, model, config, form)
    trace_s = time.perf_counter() - start
    libtpu = version("libtpu")
    by_host = counts_by_host(mesh_shape(args, topology.devices))
    distinct = step.distinct()
    graphs = []
    for number, (graph, runs) in enumerate(distinct, 1):
        which = f" graph {number} of {len(distinct)}" if len(distinct) > 1 else ""
        say(f"compiling{which} for {topology.name} with libtpu {libtpu}, a minute or two ...")
        compiled = compile_graph(graph, step.replicas, topology, by_host)
        graphs.append(_measured(compiled, graph, runs, step.replicas, topology))
    return make_report(
        topology=topology,
        graphs=graphs,
        model_flops=train_flops_per_image(config) * args.batch_size,
        parameters=parameters,
        batch_size=args.batch_size,
        sharding=step.description,
        state_bytes=step.state_bytes,
        trace_s=trace_s,
        versions={name: version(name) for name in ("torch_xla", "libtpu", "jaxlib")},
    )


def _measured(
    compiled: Compiled, graph: Graph, runs: int, replicas: int, topology: Topology
) -> CompiledGraph:
    return CompiledGraph(
        runs=runs,
        compiled=compiled,
        traffic=measure(compiled.hlo, topology.devices, topology.slices) if compiled.fits else None,
        flops=count_flops(compiled.stablehlo) * replicas,
        resident_bytes=graph.resident_bytes,
    )
