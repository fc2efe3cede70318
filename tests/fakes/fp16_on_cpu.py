"""run_vit_training.py with fp16 on the CPU, which it refuses: to test loss scaling without CUDA.

The first loss scale is so high that gradients overflow, on one process of several first.
"""

import sys

import run_vit_training
from torch_fsdp import devices, optimizers

if __name__ == "__main__":
    devices.Cpu.lacks = lambda self, precision: None
    optimizers._INITIAL = 2.0**22
    sys.exit(run_vit_training.main())
