"""The sizes of a model from which the bytes and seconds of a training step are estimated."""

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from models.spec import ModelSpec
from training.config import RunConfig


@dataclass(frozen=True)
class StepSizes:
    """Sizes of what a step computes with a stack of blocks (``ModelSpec.runs``), as plain numbers:
    estimates need no model."""

    depth: int
    width: int
    hidden: int
    """Width of the MLP if it has two matrices. A gated one has three: then that of two matrices
    with as many values."""
    heads: int
    head_dim: int
    tokens: int
    """Tokens of a sequence, in training."""
    sequences: int
    """Sequences of an image: an image is one, or has crops."""
    block_parameters: int
    """Parameters of one block."""
    other_parameters: int
    """Parameters around the blocks, where they count to this run."""
    has_state: bool
    """The optimizer's state of these parameters, and all averages of them, count to this run."""
    learns: bool
    """A backward pass follows; else this is the forward pass of a teacher."""
    outputs: int
    """Values that the model returns of an image's sequences."""
    pixels: int
    """Values of a sequence's image or crop."""
    train_flops: float
    """FLOPs of one image, as MFU counts them; those of all runs are the model's."""

    @property
    def parameters(self) -> int:
        return self.depth * self.block_parameters + self.other_parameters

    @property
    def state_parameters(self) -> int:
        return self.parameters if self.has_state else 0


def state_bytes(config: RunConfig) -> int:
    """Return the bytes of state per parameter: fp32 weight, moments (AdamW two, Lion and Muon one;
    the few parameters that AdamW updates under Muon are counted as Muon's) and EMA."""
    moments = 2 if config.optimizer.optimizer == "adamw" else 1
    moment_bytes = {"fp32": 4, "bf16": 2}[config.optimizer.optimizer_dtype]
    return 4 + moments * moment_bytes + (4 if config.averages else 0)


@functools.cache
def step_sizes(model: ModelSpec) -> tuple[StepSizes, ...]:
    """Return the sizes of all that a step computes: what is estimated of them adds up to it.

    The state of a stack counts to its first run; that of a teacher, an average, does too.
    """
    parameters = {
        stack: sum(p.numel() for block in getattr(model.meta, stack) for p in block.parameters())
        for stack in model.stacks
    }
    around = model.parameter_count - sum(parameters.values())
    all_sizes: list[StepSizes] = []
    for number, run in enumerate(model.runs):
        sizes, block = model.stacks[run.stack], getattr(model.meta, run.stack)[0]
        matrices = sum(p.numel() for p in block.parameters() if p.dim() == 2)
        in_attention = 2 * sizes.embed_dim * sizes.num_heads * (sizes.head_dim + sizes.value_dim)
        all_sizes.append(
            StepSizes(
                depth=sizes.depth,
                width=sizes.embed_dim,
                hidden=(matrices - in_attention) // (2 * sizes.embed_dim),
                heads=sizes.num_heads,
                head_dim=sizes.head_dim,
                tokens=run.tokens,
                sequences=run.sequences,
                block_parameters=parameters[run.stack] // sizes.depth,
                other_parameters=around if number == 0 or not run.learns else 0,
                has_state=run.stack not in [before.stack for before in model.runs[:number]],
                learns=run.learns,
                outputs=run.outputs,
                pixels=run.pixels,
                train_flops=run.train_flops,
            )
        )
    return tuple(all_sizes)


Estimated = TypeVar("Estimated")


def summed(estimate: Callable[[StepSizes], Estimated], runs: Iterable[StepSizes]) -> Estimated:
    """Return the sum of what is estimated of all that a step computes."""
    return functools.reduce(operator.add, map(estimate, runs))
