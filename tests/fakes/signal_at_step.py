"""run_vit_training.py, with signals in the middle of a step, as SIGNAL_AT says.

``SIGNAL_AT="RANK STEP NAME..."``: the process of that rank gets the signals during that step, and
so do its loader's processes, as from a terminal or from torchrun. LATER: after a pause.
"""

import os
import subprocess
import sys
import time

import run_vit_training
from training import step as step_module


def main(argv: list[str]) -> int:
    rank, step, *names = os.environ["SIGNAL_AT"].replace("SIG", "").split()
    assert os.getpgrp() == os.getpid()  # nobody else's processes are in the group
    forward_backward = step_module.forward_backward

    def interrupted(model, objective, backend, done, micro_batches):
        loss = forward_backward(model, objective, backend, done, micro_batches)
        if backend.batch_shard == int(rank) and done + 1 == int(step):
            for name in names:  # sent by another process, as loader processes can tell
                if name == "LATER":
                    time.sleep(0.6)
                    continue
                subprocess.run(["kill", "-s", name, "--", f"-{os.getpid()}"], check=False)
        return loss

    step_module.forward_backward = interrupted
    return run_vit_training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
