"""run_vit_training.py, with a fault in the middle, as FAULT_AT says.

``FAULT_AT="KIND FIRST LAST"``: in the steps FIRST to LAST, counted from 1. ``loss``: the loss is
not a number. ``hang``: the step waits for ever, in compiled code. ``read``: so does the reading of
an image, and FIRST is how many seconds the watchdog grants before the first step. ``compile``: so
does the first step, and FIRST is how many it grants what compiles. ``evaluation``: SIGTERM comes as
the FIRST-th batch of an evaluation is computed.
"""

import ctypes
import os
import signal
import sys

import torch.nn.functional as F

import run_vit_training
from data import image_folder, images
from data.intensity import MeasuredIntensity
from training import step as step_module
from training.processes import stopping


def main(argv: list[str]) -> int:
    kind, *numbers = os.environ["FAULT_AT"].split()
    first, last = map(int, numbers)
    forward_backward = step_module.forward_backward

    def faulty(model, objective, backend, done, micro_batches):
        if kind == "compile":
            ctypes.CDLL(None).pause()
        loss = forward_backward(model, objective, backend, done, micro_batches)
        if not first <= done + 1 <= last:
            return loss * 1.0  # the same graph on XLA
        if kind == "hang":
            ctypes.CDLL(None).pause()
        return loss * float("nan" if kind == "loss" else 1.0)

    cross_entropy, batches = F.cross_entropy, 0

    def interrupted(*args, **kwargs):
        nonlocal batches
        if kwargs.get("reduction") == "sum":  # as an evaluation calls it
            batches += 1
            if batches == first:
                os.kill(os.getpid(), signal.SIGTERM)
        return cross_entropy(*args, **kwargs)

    if kind == "read":
        stopping._BEFORE_FIRST_STEP_S = first
        images._measure_intensity = lambda *asked: MeasuredIntensity()  # before there is a watchdog
        image_folder.read_bytes = lambda *asked, **how: ctypes.CDLL(None).pause()
    elif kind == "evaluation":
        F.cross_entropy = interrupted
    else:
        step_module.forward_backward = faulty
        if kind == "compile":
            stopping._COMPILATION_S = first
    return run_vit_training.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
