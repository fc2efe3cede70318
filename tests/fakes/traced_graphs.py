"""``traced_graphs.py DEVICES FLAGS``: trace a step, with names if --explain is among the flags.

Prints JSON: ``hlo``, the graphs' texts, and ``texts`` without names; the names of their
``products``, and how many graphs are ``distinct``.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from run_vit_training import read_flags
from tools.compile_only.command import start_xla
from xla_fsdp import jax_private
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import parse_topology

asked, devices = read_flags(sys.argv[2:]), int(sys.argv[1])
run = resolve_for_slice(asked.run, asked.xla, parse_topology("v5e:1x1", devices))
start_xla(devices, run.backend_config.xla_fsdp)

from tools.compile_only.trace import trace_step  # noqa: E402 - after ``start_xla``

step = trace_step(run, named=asked.xla.explain)

from jax._src.lib import xla_client  # noqa: E402 - after torch_xla's start

modules = [xla_client.XlaComputation(graph.hlo).get_hlo_module() for graph in step.graphs]
products = [
    line for module in modules for line in module.to_string().splitlines() if " dot(" in line
]
texts = [jax_private.text_of(graph.hlo, with_names=False) for graph in step.graphs]
found = {
    "hlo": [xla_client.XlaComputation(graph.hlo).as_hlo_text() for graph in step.graphs],
    "texts": texts,
    "products": [re.findall(r'op_name="([^"]*)"', line) for line in products],
    "distinct": len(set(texts)),
}
print(json.dumps(found))
