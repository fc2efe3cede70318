"""``--buckets``: what a model must be to take images of several sizes, a batch of one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from training.errors import UsageError

if TYPE_CHECKING:  # torch takes seconds: a wrong flag is told before
    from models.buckets import Grid
    from models.spec import ModelSizes, ModelSpec
    from training.options.config import RunConfig

_APART = 0.25
"""By what share of the model's own tokens those of a bucket may differ. Memory is that of the
largest; figures such as MFU are those of the model's own size."""


def check_buckets(config: RunConfig, model: ModelSpec) -> None:
    """Raises UsageError for ``--buckets`` that the model cannot be trained with."""
    sizes = config.data.bucket_sizes
    if not sizes:
        return
    if reason := model.why_one_grid():
        raise UsageError(f"--buckets does not go with --model {model.name}: {reason}")
    if config.sharding.grad_ckpt == "auto":
        raise UsageError("--buckets does not go with --grad_ckpt auto: name what is to be kept")
    own, grid = model.sizes.input_shape[1:], model.sizes.grid
    patch = [side // count for side, count in zip(own, grid, strict=True)]
    if own not in sizes:
        raise UsageError(f"--buckets must have the model's own size, {_shown(own)}, among them")
    for size in sizes:
        if sizes.count(size) > 1:
            raise UsageError(f"--buckets has {_shown(size)} twice")
        if any(side % each for side, each in zip(size, patch, strict=True)):
            raise UsageError(
                f"--buckets: {_shown(size)} is no whole number of patches of {_shown(patch)}"
            )
    for size, (rows, columns) in zip(sizes, grids(config, model), strict=True):
        apart = abs(rows * columns / model.sizes.num_patches - 1)
        if apart > _APART:
            raise UsageError(
                f"--buckets: {_shown(size)} has {rows * columns} patches, the model's own size "
                f"{model.sizes.num_patches}: they may differ by {_APART:.0%}"
            )


def grids(config: RunConfig, model: ModelSpec) -> list[Grid]:
    """Return the grid of patches of each bucket; none without buckets."""
    if not config.data.bucket_sizes:  # of a volume's three sides there are none
        return []
    own, (rows, columns) = model.sizes.input_shape[1:], model.sizes.grid
    return [(h * rows // own[0], w * columns // own[1]) for h, w in config.data.bucket_sizes]


def sizes_of_largest(config: RunConfig, model: ModelSpec) -> ModelSizes:
    """Return the model's sizes with as many tokens as images of the largest bucket have."""
    sizes = model.sizes
    if not config.data.bucket_sizes:
        return sizes
    most = max(rows * columns for rows, columns in grids(config, model))
    return replace(sizes, num_tokens=sizes.num_tokens + most - sizes.num_patches)


def _shown(size: object) -> str:
    return "x".join(map(str, size))  # type: ignore[call-overload]
