"""run_vit_training.py, whose checkpoints are written slowly, or not at all, as SAVES says.

``SAVES="KIND STEP RANK SECONDS"``: from the checkpoint of that step on, in the process of that rank
(-1: in all). ``slow``: it takes so many seconds more. ``full``: the disk is full. PROGRAM names
another module to run so, such as tests.fakes.signal_at_step; ``--fsdp megatron`` runs without
CUDA.
"""

import errno
import importlib
import os
import sys
import time

from tests.fakes.megatron_on_cpu import without_cuda
from training.checkpoints import state
from training.checkpoints.inventory import step_of
from training.processes import exchange


def main(argv: list[str]) -> int:
    if "megatron" in argv:
        without_cuda()
    kind, *numbers = os.environ["SAVES"].split()
    step, rank, seconds = int(numbers[0]), int(numbers[1]), float(numbers[2])
    writer = state.FolderWriter

    def disturbed(folder, **how):
        made = writer(folder, **how)
        write_data = made.write_data

        def write(*args):
            time.sleep(seconds)
            if kind == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write_data(*args)

        if step_of(folder) >= step and rank in (-1, exchange.rank()):
            made.write_data = write
        return made

    state.FolderWriter = disturbed
    return importlib.import_module(os.environ.get("PROGRAM", "run_vit_training")).main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
