"""Shard the tiny model on the GPU backend and save it before any step: --ckpt_dir/initial.

Takes the program's flags; ``--fsdp megatron`` runs without CUDA, as in megatron_on_cpu.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cli import TINY_MODEL
from tests.megatron_on_cpu import without_cuda


def save(args, backend) -> None:
    config = model_config(args)
    shard_and_optimize(build_vit(config), args, config, backend)
    backend.save(Path(args.ckpt_dir) / "initial", {})


if __name__ == "__main__":
    if "megatron" in sys.argv:
        without_cuda()
    from gpu_fsdp.launch import launch
    from models.vit import build_vit
    from training.arguments import model_config, parse_arguments
    from training.run import shard_and_optimize

    launch(save, parse_arguments([*TINY_MODEL, *sys.argv[1:]]))
