"""Several command lines of run_vit_training.py, one after the other in the same processes.

Saves the tests most of their time, which goes into importing PyTorch. Takes the form of
FSDP and a JSON file with a list of argument lists.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed import device_mesh

from tests.megatron_on_cpu import without_cuda


def main(form: str, path: str) -> int:
    if form == "megatron":
        without_cuda()
    import run_vit_training
    from gpu_fsdp import options

    options.check_megatron_runs_here = lambda: None
    join, store = dist.init_process_group, None
    if "MASTER_PORT" in os.environ:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for number, argv in enumerate(json.loads(Path(path).read_text())):
        # Each run meets in a part of torchrun's store of its own, and makes its own meshes.
        if store:
            dist.init_process_group = functools.partial(
                join, store=dist.PrefixStore(f"run {number}", store),
                rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
            )  # fmt: skip
        device_mesh._mesh_resources.__init__()
        code = run_vit_training.main([*argv, "--fsdp", form])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
