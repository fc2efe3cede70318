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
from xla_fsdp.attention import check_attention
from xla_fsdp.compile_only.compiler import compile_step
from xla_fsdp.compile_only.flops import count_flops
from xla_fsdp.compile_only.hlo import measure
from xla_fsdp.compile_only.report import Report, as_json, as_table, make_report
from xla_fsdp.compile_only.topologies import KNOWN, parse_topology
from xla_fsdp.compile_only.trace import start_xla, trace_step


def compile_only(args: argparse.Namespace) -> None:
    """Print the table, or with ``--json`` the figures. Raises UsageError."""
    if not args.tpu_topology:
        raise UsageError(f"--compile_only needs --tpu_topology. Known, for example: {KNOWN}")
    topology = parse_topology(args.tpu_topology)
    config = model_config(args)
    check_model(config)
    options.check(args)
    check_attention(args)
    check_run(args, topology.devices)
    _check_one_graph(args)
    report = _compile(args, topology, config)
    print(json.dumps(as_json(report)) if args.json else as_table(report))


def _check_one_graph(args: argparse.Namespace) -> None:
    cuts = {
        "--xla_fsdp nested": options.fsdp_form(args) == "nested",
        f"--grad_accum_steps {args.grad_accum_steps}": args.grad_accum_steps > 1,
        "--mark_step_after_forward": args.mark_step_after_forward,
        "--mark_step_every_n_blocks": args.mark_step_every_n_blocks,
    }
    for flag, used in cuts.items():
        if used:
            raise UsageError(
                f"--compile_only compiles the SPMD step as one graph: it does not go with {flag}"
            )


def _compile(args: argparse.Namespace, topology, config) -> Report:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    start_xla(topology.devices)
    model = build_vit(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"tracing {args.model}, {parameters:,} parameters, for {topology.devices} devices ...")
    start = time.perf_counter()
    graph = trace_step(args, model, config)
    trace_s = time.perf_counter() - start
    say(f"compiling for {topology.name} with libtpu {version('libtpu')}, a minute or two ...")
    compiled = compile_step(graph, topology)
    return make_report(
        topology=topology,
        compiled=compiled,
        traffic=measure(compiled.hlo, topology.devices) if compiled.fits else None,
        flops=count_flops(compiled.stablehlo),
        model_flops=train_flops_per_image(config) * args.batch_size,
        parameters=parameters,
        batch_size=args.batch_size,
        sharding=graph.description,
        state_bytes=graph.state_bytes,
        trace_s=trace_s,
        versions={name: version(name) for name in ("torch_xla", "libtpu", "jaxlib")},
    )
