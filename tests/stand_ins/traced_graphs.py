"""``traced_graphs.py DEVICES FLAGS``: print the traced step's graphs, a JSON list of HLO texts."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from run_vit_training import read_flags
from tools.compile_only.command import start_xla
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import parse_topology

asked, devices = read_flags(sys.argv[2:]), int(sys.argv[1])
run = resolve_for_slice(asked.run, asked.xla, parse_topology("v5e:1x1", devices))
start_xla(devices, run.backend_config.xla_fsdp)

from tools.compile_only.trace import trace_step  # noqa: E402 - after ``start_xla``

step = trace_step(run)

from jax._src.lib import xla_client  # noqa: E402 - after torch_xla's start

texts = [xla_client.XlaComputation(graph.hlo).as_hlo_text() for graph in step.graphs]
print(json.dumps(texts))
