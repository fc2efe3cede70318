"""run_vit_training.py with torchao's FP8 products on the CPU, which it refuses: by emulation.

torchao rounds the operands to FP8 all the same, and multiplies them in higher precision. Also
without --compile, which is half a minute of compilation, and with Megatron-FSDP.
"""

import dataclasses
import sys

import run_vit_training
from gpu_fsdp import blocks
from tests.fakes.megatron_on_cpu import without_cuda


def emulate() -> None:
    """Let blocks that are replaced from now on compute on the CPU."""
    config_of = blocks.config_of
    blocks.config_of = lambda fp8: dataclasses.replace(config_of(fp8), emulate=True)


if __name__ == "__main__":
    emulate()
    blocks.Float8Blocks.check = lambda self, run: None
    if "megatron" in sys.argv:
        without_cuda()
    sys.exit(run_vit_training.main())
