"""``traced_graphs.py DEVICES FLAGS``: print the traced step's graphs, a JSON list of HLO texts."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.vit import build_vit
from training.arguments import build_parser, model_config
from xla_fsdp.compile_only.trace import start_xla, trace_step
from xla_fsdp.options import fsdp_form

args = build_parser().parse_args(sys.argv[2:])
config, form = model_config(args), fsdp_form(args)
start_xla(int(sys.argv[1]), form)
step = trace_step(args, build_vit(config), config, form)

from jax._src.lib import xla_client  # noqa: E402 - after torch_xla's start

texts = [xla_client.XlaComputation(graph.hlo).as_hlo_text() for graph in step.graphs]
print(json.dumps(texts))
