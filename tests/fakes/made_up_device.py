"""run_vit_training.py on an accelerator that is made up: the CPU in every call, but not in name.

What a new accelerator needs is this class and the line that makes it known. It copies what it is
given, computes fp32 and bf16, has no fused AdamW, and writes the calls that it got as JSON to
--ckpt_dir/calls_<rank>.json.
"""

import collections
import json
import os
import sys
from pathlib import Path

import torch

import run_vit_training
from torch_fsdp import devices

CALLS: collections.Counter[str] = collections.Counter()


class Abacus(devices.Device):
    is_host = False
    noun = "abacus"
    status_command = "lsabacus"
    collectives = "gloo"
    collectives_name = "beads"
    fused_adamw = False
    name = "Abacus 13"

    def __init__(self):
        self.where = torch.device("cpu")

    def start(self, *, tf32, products):
        CALLS[f"start {os.environ['LOCAL_RANK']}"] += 1
        CALLS[f"TF32 {tf32}"] += 1

    def count(self):
        return 2

    def lacks(self, precision):
        return "an abacus has no fp16" if precision == "fp16" else None

    def put(self, tensors):
        CALLS["put"] += 1
        return [tensor.clone() for tensor in tensors]

    def read(self, tensors):
        CALLS["read"] += 1
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies

    def seed(self, seed):
        CALLS["seed"] += 1

    def synchronize(self):
        CALLS["synchronize"] += 1

    def memory(self):
        return {"used": 13, "peak": 26, "limit": 39}

    def peak_flops(self, kind):
        return {"fp32": 1e9, "bf16": 2e9}[kind]


if __name__ == "__main__":
    devices.KINDS["cuda"].insert(0, Abacus)
    code = run_vit_training.main()
    folder = Path(sys.argv[sys.argv.index("--ckpt_dir") + 1])
    (folder / f"calls_{os.environ['RANK']}.json").write_text(json.dumps(CALLS))
    sys.exit(code)
