"""Sizes of a model, for estimating the bytes and seconds of a training step."""

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from models.spec import ModelSpec
from training.config import RunConfig
from training.optimizer_rules import moments_of


@dataclass(frozen=True)
class StepSizes:
    """Sizes of what a step computes with a stack of blocks (``ModelSpec.runs``), as plain numbers,
    so that estimates need no model."""

    depth: int
    width: int
    hidden: int
    """Width of an MLP of two matrices; for a gated MLP, which has three, the width of two matrices
    with the same number of values."""
    heads: int
    head_dim: int
    tokens: int
    """Tokens per sequence in training."""
    sequences: int
    """Sequences per image: one, or one per crop."""
    block_parameters: int
    """Parameters of one block."""
    block_shapes: tuple[tuple[int, ...], ...]
    """Their shapes."""
    other_parameters: int
    """Parameters outside the blocks that are assigned to this run."""
    has_state: bool
    """Whether the optimizer state and EMA of these parameters are assigned to this run."""
    learns: bool
    """Whether there is a backward pass; otherwise this is the forward pass of a teacher, or of
    parameters that are never trained."""
    runs_ahead: bool
    """Whether a step of several micro-batches computes one more forward pass of each."""
    outputs: int
    """Values that the model returns per image."""
    pixels: int
    """Values of the image or crop of a sequence."""
    train_flops: float
    """FLOPs per image, as counted for MFU; the sum over all runs is the model's."""

    @property
    def parameters(self) -> int:
        return self.depth * self.block_parameters + self.other_parameters

    @property
    def state_parameters(self) -> int:
        return self.parameters if self.has_state else 0


def state_bytes(config: RunConfig, *, trains: bool = True) -> int:
    """Return the bytes of state per parameter: fp32 weight, EMA and, if it is trained, moments. The
    few parameters that AdamW updates under Muon are counted as Muon's."""
    moments = len(moments_of(config.optimizer.optimizer)) if trains else 0
    moment_bytes = {"fp32": 4, "bf16": 2}[config.optimizer.optimizer_dtype]
    return 4 + moments * moment_bytes + (4 if config.averages else 0)


@functools.cache
def step_sizes(model: ModelSpec) -> tuple[StepSizes, ...]:
    """Return the sizes of everything that a step computes; estimates for them add up to the step's.

    The state of a stack is assigned to its first run, including that of a teacher that is an EMA.
    What is outside of the blocks is assigned to the first run that learns; if it is never trained,
    to the first stack that does not learn either, if there is one.
    """
    parameters = {
        stack: sum(p.numel() for block in getattr(model.meta, stack) for p in block.parameters())
        for stack in model.stacks
    }
    around = model.parameter_count - sum(parameters.values())
    first_of = {run.stack: number for number, run in reversed([*enumerate(model.runs)])}
    locked = [number for number in sorted(first_of.values()) if not model.runs[number].learns]
    frozen = 0
    if locked:
        stacks = tuple(f"{stack}." for stack in model.stacks)
        others = {n: p for n, p in model.meta.named_parameters() if not n.startswith(stacks)}
        frozen = sum(p.numel() for name, p in others.items() if name in model.frozen)
    learning = next(number for number, run in enumerate(model.runs) if run.learns)
    all_sizes: list[StepSizes] = []
    for number, run in enumerate(model.runs):
        has_state = first_of[run.stack] == number
        outside = 0
        if number == learning:
            outside = around - frozen
        elif number in locked[:1]:
            outside = frozen
        elif not has_state and not run.learns:  # a teacher's
            outside = around
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
                block_shapes=tuple(tuple(p.shape) for p in block.parameters()),
                other_parameters=outside,
                has_state=has_state,
                learns=run.learns,
                runs_ahead=run.runs_ahead,
                outputs=run.outputs,
                pixels=run.pixels,
                train_flops=run.train_flops,
            )
        )
    return tuple(all_sizes)


Estimated = TypeVar("Estimated")


def summed(estimate: Callable[[StepSizes], Estimated], runs: Iterable[StepSizes]) -> Estimated:
    """Return the sum of an estimate over everything that a step computes."""
    return functools.reduce(operator.add, map(estimate, runs))
