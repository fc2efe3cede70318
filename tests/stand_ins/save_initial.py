"""Shard the tiny model on the GPU backend and save it before any step: --ckpt_dir/initial.

Takes the program's flags; ``--fsdp megatron`` runs without CUDA, as in megatron_on_cpu.
"""

import sys

from tests.cli import TINY_MODEL
from tests.stand_ins.megatron_on_cpu import without_cuda


def save(run, backend) -> None:
    shard_and_optimize(run, backend)
    save_state(backend, run.ckpt_dir / "initial", {})


if __name__ == "__main__":
    if "megatron" in sys.argv:
        without_cuda()
    from tests.resolved import on_gpus
    from tests.support.checkpoints import save_state
    from torch_fsdp.launch_torch import launch
    from training.step import shard_and_optimize

    launch(save, on_gpus([*TINY_MODEL, "--batch_size", "8", *sys.argv[1:]]))
