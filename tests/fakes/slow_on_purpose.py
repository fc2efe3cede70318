"""Runs the program with a pause for every batch and every checkpoint, and with an end by SIGKILL.

KILLED_AT: in the place of the batch of so many steps later; KILLED_AFTER_S: after so many seconds.
"""

import os
import signal
import sys
import threading
import time

import run_vit_training
from tests.support.run_records import BATCH_S, SAVE_S
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
    if "KILLED_AFTER_S" in os.environ:
        kill = threading.Timer(
            float(os.environ["KILLED_AFTER_S"]), os.kill, (os.getpid(), signal.SIGKILL)
        )
        kill.daemon = True
        kill.start()
    step.prefetch, saver.write_checkpoint = slow_batches, slow_write
    sys.exit(run_vit_training.main())
