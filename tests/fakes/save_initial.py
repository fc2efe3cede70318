"""Shard the tiny model on the GPU backend and save it before any step: --ckpt_dir/initial.

Takes the program's flags; ``--fsdp megatron`` runs without CUDA, as in megatron_on_cpu.
"""

import sys

from tests.fakes.megatron_on_cpu import without_cuda
from tests.support.cli import TINY_MODEL


def save(run, backend) -> None:
    shard_and_optimize(run, backend)
    save_state(backend, run.ckpt_dir / "initial", {})


if __name__ == "__main__":
    if "megatron" in sys.argv:
        without_cuda()
    from tests.support.checkpoints import save_state
    from tests.support.resolved import on_gpus
    from torch_fsdp.launch_torch import launch
    from training.step import shard_and_optimize

    launch(save, on_gpus([*TINY_MODEL, "--batch_size", "8", *sys.argv[1:]]))
