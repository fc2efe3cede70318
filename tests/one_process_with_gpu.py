"""run_vit_training.py as if the last process, and only that one, were on a node with GPUs."""

import os
import sys

import torch

import run_vit_training
from gpu_fsdp import launch, resolve_gpu

if __name__ == "__main__":
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        resolve_gpu.device_type = launch.device_type = lambda: "cuda"
        resolve_gpu._check_devices = lambda: None
        torch.cuda.set_device = lambda device: None
    sys.exit(run_vit_training.main())
