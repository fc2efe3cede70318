"""run_vit_training.py, one of whose processes is slow, as SLOW says.

``SLOW="KIND RANK SECONDS FIRST LAST"``: in the steps FIRST to LAST, counted from 1, the process of
that rank takes so many seconds more: ``read``: to read each batch, and at least twice the median of
what was left of the steps before, so that also on a busy machine most of a step is reading.
``compute``: for each pass of a block, on the host. ``--fsdp megatron`` runs without CUDA.
"""

import os
import sys
import time
from statistics import median

from timm.models.vision_transformer import Block

import run_vit_training
from tests.fakes.megatron_on_cpu import without_cuda
from training import step as step_module
from training import train
from training.processes import exchange


def main(argv: list[str]) -> int:
    if "megatron" in argv:
        without_cuda()
    kind, *numbers = os.environ["SLOW"].split()
    rank, seconds, first, last = int(numbers[0]), float(numbers[1]), *map(int, numbers[2:])
    at = 0

    def pause(step, at_least=0.0):
        if exchange.rank() == rank and first <= step <= last:
            time.sleep(max(seconds, at_least))

    def reads_slowly(*args):
        loader, batches, rests = open_loader(*args), 0, []
        epoch = loader.epoch

        def slow_epoch(*args):
            nonlocal batches
            for batch in epoch(*args):
                batches += 1
                pause(batches, 2 * median(rests or [0.0]))
                read = time.monotonic()
                yield batch
                rests.append(time.monotonic() - read)

        loader.epoch = slow_epoch
        return loader

    def forward_backward(model, objective, backend, done, micro_batches):
        nonlocal at
        at = done + 1
        return passes(model, objective, backend, done, micro_batches)

    def slow_block(self, *args, **kwargs):
        if self.training:
            pause(at)
        return forward(self, *args, **kwargs)

    open_loader, passes, forward = train.train_loader, step_module.forward_backward, Block.forward
    if kind == "read":
        train.train_loader = reads_slowly
    else:
        step_module.forward_backward, Block.forward = forward_backward, slow_block
    return run_vit_training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
