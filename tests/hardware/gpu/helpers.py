"""What single tests need beyond a GPU, and a training that learns something.

``need_...`` skip a test, with the program's own reason, where that is missing.
"""

import pytest

from gpu_fsdp import blocks, resolve_gpu
from torch_fsdp.devices import Cuda
from training.errors import UsageError

LEARNED_STEPS = 240
LEARN = (
    "--embed_dim 64 --batch_size 64 --num_epochs 20 --warmup_steps 20 --lr 4e-3 "
    "--scale 0.8 1 --ratio 0.9 1.1"
).split()
"""With these, for so many steps, the tiny model learns to read most of the digits."""


def need_form(form):
    """The package of this form of FSDP."""
    if form == "megatron":
        try:
            resolve_gpu.check_megatron_runs_here()
        except UsageError as error:
            pytest.skip(str(error))


def need_te():
    """TransformerEngine; returns its PyTorch package."""
    try:
        return blocks.import_te()
    except UsageError as error:
        pytest.skip(str(error))


def need_fp8():
    ok, reason = need_te().is_fp8_available(return_reason=True)
    if not ok:
        pytest.skip(f"no FP8: {reason}")


def need_torchao():
    """torchao, and a GPU with FP8."""
    try:
        blocks.import_float8()
    except UsageError as error:
        pytest.skip(str(error))
    if reason := Cuda().lacks("fp8"):
        pytest.skip(reason)
