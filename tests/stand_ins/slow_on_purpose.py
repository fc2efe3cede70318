"""Runs the program with a pause for every batch and every checkpoint; KILLED_AT: and with an end.

That is SIGKILL, in the place of the batch of so many steps later.
"""

import os
import signal
import sys
import time

import run_vit_training
from tests.tools.test_goodput import BATCH_S, SAVE_S
from training import step
from training.checkpoints import saver

prefetch, write = step.prefetch, saver.write_checkpoint


def slow_batches(*args):
    for number, batch in enumerate(prefetch(*args), start=1):
        time.sleep(BATCH_S)
        if number == int(os.environ.get("KILLED_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def slow_write(*args, **kwargs):
    time.sleep(SAVE_S)
    return write(*args, **kwargs)


if __name__ == "__main__":
    step.prefetch, saver.write_checkpoint = slow_batches, slow_write
    sys.exit(run_vit_training.main())
