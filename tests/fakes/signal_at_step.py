"""run_vit_training.py, with signals at the beginning of a step, as SIGNAL_AT says.

``SIGNAL_AT="RANK STEP NAME..."``: the process of that rank gets the signals in that step, and so
do its loader's processes, as from a terminal or from torchrun. LATER: after a pause.
"""

import os
import subprocess
import sys
import time

import run_vit_training
from training import loop


def main(argv: list[str]) -> int:
    rank, step, *names = os.environ["SIGNAL_AT"].replace("SIG", "").split()
    assert os.getpgrp() == os.getpid()  # nobody else's processes are in the group
    train_step = loop.train_step

    def interrupted(model, objective, backend, done, *inputs, **how):
        if backend.batch_shard == int(rank) and done + 1 == int(step):
            for name in names:  # sent by another process, as loader processes can tell
                if name == "LATER":
                    time.sleep(0.6)
                    continue
                subprocess.run(["kill", "-s", name, "--", f"-{os.getpid()}"], check=False)
        return train_step(model, objective, backend, done, *inputs, **how)

    loop.train_step = interrupted
    return run_vit_training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
