"""The sizes of a model that the bytes and seconds of its step follow from."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from models.spec import ModelSpec
from training.config import RunConfig


@dataclass(frozen=True)
class Shape:
    """Plain numbers, so that arithmetic on them needs no model."""

    depth: int
    width: int
    hidden: int
    """Width inside the MLP."""
    heads: int
    head_dim: int
    tokens: int
    """Of an image, in training."""
    block_parameters: int
    """Of one block."""
    other_parameters: int
    classes: int
    pixels: int
    """Values of one image."""
    train_flops: float
    """Of one image, forward and backward, as MFU counts them."""

    @property
    def parameters(self) -> int:
        return self.depth * self.block_parameters + self.other_parameters


def state_bytes(config: RunConfig) -> int:
    """Return the bytes of a parameter's state: the fp32 weight, AdamW's two moments or the one of
    Lion and Muon (of whose parameters the few that are AdamW's are not counted apart), the EMA."""
    moments = 2 if config.optimizer.optimizer == "adamw" else 1
    each = {"fp32": 4, "bf16": 2}[config.optimizer.optimizer_dtype]
    return 4 + moments * each + (4 if config.ema.model_ema else 0)


@functools.cache
def shape_of(model: ModelSpec) -> Shape:
    """Return the sizes of a model."""
    sizes = model.sizes
    parameters = [p for block in model.meta.blocks for p in block.parameters()]  # type: ignore[union-attr]
    blocks = sum(parameter.numel() for parameter in parameters)
    return Shape(
        depth=sizes.depth,
        width=sizes.embed_dim,
        hidden=sizes.hidden,
        heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        tokens=sizes.train_tokens,
        block_parameters=blocks // sizes.depth,
        other_parameters=model.parameter_count - blocks,
        classes=sizes.num_classes,
        pixels=math.prod(sizes.input_shape),
        train_flops=model.train_flops_per_image,
    )
