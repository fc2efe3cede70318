"""Shard the tiny model on the GPU backend and save it before any step: --ckpt_dir/initial.

Takes the program's flags; ``--fsdp megatron`` runs without CUDA, as in megatron_on_cpu.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from tests.cli import TINY_MODEL
from tests.megatron_on_cpu import without_cuda


def save(args, backend) -> None:
    config = model_config(args)
    model = build_vit(config)
    initialize = functools.partial(initialize_module, seed=0, num_classes=config.num_classes)
    backend.shard(model, list(fsdp_units(model)), initialize)
    backend.build_optimizer(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    backend.save(Path(args.ckpt_dir) / "initial", {})


if __name__ == "__main__":
    if "megatron" in sys.argv:
        without_cuda()
    from gpu_fsdp.launch import launch
    from models.vit import build_vit, fsdp_units, initialize_module
    from training.arguments import model_config, parse_arguments

    launch(save, parse_arguments([*TINY_MODEL, *sys.argv[1:]]))
