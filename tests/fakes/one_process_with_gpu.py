"""run_vit_training.py as if the last process, and only that one, were on a node with GPUs."""

import os
import sys

import run_vit_training
from torch_fsdp import devices
from torch_fsdp.devices import Cuda

if __name__ == "__main__":
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        Cuda.start = lambda self, tf32: None
        Cuda.count = lambda self: None
        devices.choose = lambda backend: Cuda()
    sys.exit(run_vit_training.main())
