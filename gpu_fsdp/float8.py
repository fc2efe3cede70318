"""``--fp8`` with timm's blocks: their matrix products in FP8, by torchao.

Weights, gradients and checkpoints stay as they are; what a product multiplies is rounded to FP8
just before, with scales of the values that are there: one a tensor ("current") or one a row
("rowwise"). Only with torch.compile is that rounding part of the kernels around it.
"""

import logging
from typing import Any

from torch import nn

from gpu_fsdp.config import FP8_MULTIPLE
from models.blocks import why_no_linear_products
from models.config import ModelError
from torch_fsdp import devices
from torch_fsdp.parallel_plan import TimmBlocks, TorchRun
from training.errors import UsageError
from training.resolve import MODEL_FLAG

_TORCHAO_NAME = {"current": "tensorwise", "rowwise": "rowwise"}


class Float8Blocks(TimmBlocks):
    """timm's blocks with ``nn.Linear`` in FP8."""

    def check(self, run: TorchRun) -> None:
        if self.fp8 not in _TORCHAO_NAME:
            raise UsageError(
                f"--fp8 {self.fp8} requires --block te: with timm's blocks use "
                f"{' or '.join(_TORCHAO_NAME)}"
            )
        if not run.backend_config.compile:
            raise UsageError(
                f"--fp8 {self.fp8} with timm's blocks requires --compile: alone, rounding to FP8 "
                "would take longer than the products gain"
            )
        if reason := devices.choose("cuda").lacks("fp8"):
            raise UsageError(reason)
        if reason := why_no_linear_products(run.model.block):
            reason = ModelError(reason).told(MODEL_FLAG)
            raise UsageError(
                f"--fp8 {self.fp8} is incompatible with --model {run.model.name}: {reason}"
            )
        check_sizes(run, self.fp8)
        import_float8()

    def replace(self, block: nn.Module, device: str) -> nn.Module:
        float8 = import_float8()
        return float8.convert_to_float8_training(block, config=config_of(self.fp8))


def config_of(fp8: str) -> Any:
    """Return torchao's configuration of the recipe "current" or "rowwise"."""
    return import_float8().Float8LinearConfig.from_recipe_name(_TORCHAO_NAME[fp8])


def check_sizes(run: TorchRun, fp8: str) -> None:
    """Raise UsageError if a dimension of a product in the blocks does not suit FP8 kernels."""
    multiple, sizes = FP8_MULTIPLE[fp8], run.model.sizes
    for name, size in (("--embed_dim", sizes.embed_dim), ("the MLP's width", sizes.hidden)):
        if size % multiple:
            raise UsageError(f"--fp8 {fp8}: {name} {size} is no multiple of {multiple}")
    images = run.config.data.pass_size // run.mesh.batch_parts
    if images * sizes.num_tokens % multiple:
        raise UsageError(
            f"--fp8 {fp8}: {images} images a pass and GPU x {sizes.num_tokens} tokens is no "
            f"multiple of {multiple}: choose --batch_size so that a GPU gets a multiple of "
            f"{multiple} images"
        )


def import_float8() -> Any:
    """Return the package torchao.float8. Raise UsageError where it cannot be imported."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it and PyTorch warn of each other's versions
    try:
        import torchao.float8
    except ImportError:
        raise UsageError(
            "--fp8 with timm's blocks requires the package torchao and its PyTorch: python3 -m pip "
            "install -r requirements-gpu.txt"
        ) from None
    finally:
        logging.disable(disabled)
    return torchao.float8
