"""Pairs of sizes of crops, and the forms of runs that train with them."""

from tests.support.cli import train_tiny, train_tiny_gpu
from tests.support.marks import long

PAIRS = "--crop_sizes 16x8 24x8 24x12 16x8".split()
FORMS = [
    (train_tiny_gpu, "", {"processes": 2}),
    long(train_tiny, "", {"devices": 4}),
    long(train_tiny, "--no-scan_blocks --grad_ckpt none", {"devices": 2}),
    long(train_tiny, "--xla_fsdp nested", {}),
    long(train_tiny_gpu, "--compile", {}),
]
"""How a training runs: its function, flags, and what that function is given."""
