"""Training images of several sizes: in buckets by aspect ratio, or by a schedule of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature
from training.feature_table import arranged_objectives

if TYPE_CHECKING:
    from data.source import DataSource, View
    from models.spec import ModelSpec
    from training.loop import Hook, Training
    from training.resolve import Run

_SIZES = "steps have images of several sizes"
_EXCLUDED_BY_SIZES = {
    **dict.fromkeys(("--mesh_domain", "--block"), ""),
    **dict.fromkeys(("--compile_only", "--plan", "--self_check", "--expect"), _SIZES),
}
_MAX_TOKENS_APART = 0.25
"""Largest relative difference between a bucket's tokens and the model's own."""


class Buckets(Feature):
    """``--buckets``: batches of images whose aspect ratios are alike."""

    turned_on_by = ("--buckets",)
    excludes = {
        **_EXCLUDED_BY_SIZES,
        **dict.fromkeys(("--aug_repeats", "--cutmix", "--cutmix_minmax", "--teacher"), ""),
    }

    def arranged(self, run: Run, view: View, *, augment: bool) -> View:
        from data.images import as_image_view
        from features.image_sizes.buckets import BucketView

        return BucketView(view=as_image_view(view))

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        _check_objective("--buckets", config)
        return config

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        _check_sizes("--buckets", config, model)
        buckets, (height, width) = config.data.bucket_sizes, model.sizes.input_shape[1:]
        if (height, width) not in buckets:
            raise UsageError(f"--buckets must include the model's own size, {height}x{width}")
        own, (rows, columns) = model.sizes.num_patches, model.sizes.grid
        for h, w in buckets:
            if buckets.count((h, w)) > 1:
                raise UsageError(f"--buckets lists {h}x{w} twice")
            patches = (h * rows // height) * (w * columns // width)
            if abs(patches / own - 1) > _MAX_TOKENS_APART:
                raise UsageError(
                    f"--buckets: {h}x{w} has {patches} patches, the model's own size {own}: they "
                    f"may differ by at most {_MAX_TOKENS_APART:.0%}"
                )
        return config


class ImageSizeSchedule(Feature):
    """``--image_size_schedule``: square images, whose side depends on the step."""

    turned_on_by = ("--image_size_schedule",)
    excludes = {**_EXCLUDED_BY_SIZES, "--buckets": ""}

    def arranged(self, run: Run, view: View, *, augment: bool) -> View:
        from data.images import as_image_view
        from features.image_sizes.schedule import SizeScheduleView

        return SizeScheduleView(view=as_image_view(view)) if augment else view

    def hooks(self, training: Training) -> Sequence[Hook]:
        from features.image_sizes.log import SizeLog
        from features.image_sizes.schedule import SizeSchedule

        config, steps = training.run.config, training.schedule.steps
        sizes = SizeSchedule.of(config.data, config.seed, steps)
        assert sizes
        return [SizeLog(training.session, training.batches, sizes)]

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        _check_objective("--image_size_schedule", config)
        data = config.data
        shares = [share for _, share in data.size_schedule if share is not None]
        if 0 < len(shares) < len(data.size_schedule):
            raise UsageError("--image_size_schedule: give a share for every size, or for none")
        if shares and round(sum(shares), 2) != 1:
            raise UsageError(
                f"--image_size_schedule: the shares add up to {sum(shares):.4g}, not 1"
            )
        from features.image_sizes.schedule import MAGNITUDE

        policy = data.aa or ""
        is_rand_augment = policy.startswith("rand") and MAGNITUDE.search(policy)
        if data.aa_min_magnitude is not None and not is_rand_augment:
            raise UsageError(
                "--aa_min_magnitude requires RandAugment with a magnitude, such as --aa "
                "rand-m9-mstd0.5-inc1"
            )
        return config

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        _check_sizes("--image_size_schedule", config, model)
        height, width = model.sizes.input_shape[1:]
        if height != width:
            raise UsageError(
                f"--image_size_schedule requires square images, not the model's {height} x "
                f"{width}: use --buckets, or a square --image_size"
            )
        return config

    def check_data(self, run: Run, data: DataSource) -> None:
        from data.images import ImageSplit

        if not isinstance(data.splits["train"], ImageSplit):
            raise UsageError(
                f"--image_size_schedule requires images that can be resized, which --data_source "
                f"{run.config.data.data_source} does not have"
            )


def _check_objective(flag: str, config: RunConfig) -> None:
    """Raise UsageError for an objective whose images have one size."""
    known = arranged_objectives()
    if (objective := config.objective.objective) not in known:
        raise UsageError(
            f"{flag} requires --objective {', '.join(known[:-1])} or {known[-1]}, not {objective}"
        )


def _check_sizes(flag: str, config: RunConfig, model: ModelSpec) -> None:
    """Raise UsageError if the model cannot be trained with images of the sizes that ``flag``
    lists."""
    if reason := model.why_one_grid():
        raise UsageError(f"{flag} is incompatible with --model {model.name}: {reason}")
    if config.sharding.grad_ckpt == "auto":
        raise UsageError(f"{flag} is incompatible with --grad_ckpt auto: choose another value")
    (height, width), (rows, columns) = model.sizes.input_shape[1:], model.sizes.grid
    high, wide = height // rows, width // columns
    for h, w in config.data.image_sizes:
        if h % high or w % wide:
            raise UsageError(f"{flag}: {h}x{w} is not a multiple of the patch size, {high}x{wide}")
