"""The sizes of a model from which the bytes and seconds of a training step are estimated."""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from models.spec import ModelSpec
from training.config import RunConfig


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a model as plain numbers: estimates need no model."""

    depth: int
    width: int
    hidden: int
    """Width of the MLP."""
    heads: int
    head_dim: int
    tokens: int
    """Tokens of an image, in training."""
    block_parameters: int
    """Parameters of one block."""
    other_parameters: int
    classes: int
    """Values that the model returns for an image."""
    pixels: int
    """Values of one image."""
    train_flops: float
    """FLOPs of one image, forward and backward, as MFU counts them; those of another stack than
    the first count there, too."""

    @property
    def parameters(self) -> int:
        return self.depth * self.block_parameters + self.other_parameters


def state_bytes(config: RunConfig) -> int:
    """Return the bytes of state per parameter: fp32 weight, moments (AdamW two, Lion and Muon one;
    the few parameters that AdamW updates under Muon are counted as Muon's) and EMA."""
    moments = 2 if config.optimizer.optimizer == "adamw" else 1
    each = {"fp32": 4, "bf16": 2}[config.optimizer.optimizer_dtype]
    return 4 + moments * each + (4 if config.averages else 0)


@functools.cache
def step_sizes(model: ModelSpec, stack: str = "blocks") -> StepSizes:
    """Return the sizes of a model, or of another stack of its blocks than the first.

    All that is around the blocks counts to the first stack. Another one is a decoder: what it
    returns of an image has as many values as the image.
    """
    sizes, pixels = model.stacks[stack], math.prod(model.sizes.input_shape)
    parameters = {
        name: sum(p.numel() for block in getattr(model.meta, name) for p in block.parameters())
        for name in model.stacks
    }
    is_first = stack == next(iter(model.stacks))
    return StepSizes(
        depth=sizes.depth,
        width=sizes.embed_dim,
        hidden=sizes.hidden,
        heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        tokens=sizes.train_tokens,
        block_parameters=parameters[stack] // sizes.depth,
        other_parameters=model.parameter_count - sum(parameters.values()) if is_first else 0,
        classes=sizes.num_classes if is_first else pixels,
        pixels=pixels,
        train_flops=model.train_flops_per_image if is_first else 0.0,
    )


def stack_sizes(model: ModelSpec) -> list[StepSizes]:
    """Return the sizes of each stack of blocks: what is estimated of them adds up to the step."""
    return [step_sizes(model, stack) for stack in model.stacks]


Estimated = TypeVar("Estimated")


def summed(estimate: Callable[[StepSizes], Estimated], stacks: Iterable[StepSizes]) -> Estimated:
    """Return the sum of what is estimated of each stack of blocks."""
    return functools.reduce(operator.add, map(estimate, stacks))
