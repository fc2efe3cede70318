"""Mixup and CutMix: images that are mixed with others of the same device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature, SmallSizes
from training.objectives.mixup_config import MixupConfig

if TYPE_CHECKING:
    from training.resolve import Run


class Mixup(Feature):
    """What mixing asks of the images of a device (``Mixing`` in ``training/objectives/``)."""

    flags = MixupConfig
    turned_on_by = ("--mixup", "--cutmix", "--cutmix_minmax")

    def check(self, run: Run) -> None:
        mixup, shape = run.config.of(MixupConfig), run.model.sizes.input_shape
        images = run.config.data.global_micro_batch_size // run.mesh.batch_shards
        if images % 2:
            flag = self.shown(run.config).partition(" ")[0]
            raise UsageError(
                f"{flag} mixes pairs of images on a device, but there are {images} images per "
                "device and pass: choose --batch_size and --grad_accum_steps so that this number "
                "is even"
            )
        if mixup.cuts and len(shape) != 3:
            raise UsageError("CutMix supports 2-D images only: use --mixup for volumes")
        if mixup.cutmix_minmax is not None:
            low, high = mixup.cutmix_minmax
            for height, width in run.config.data.image_sizes or [(shape[1], shape[2])]:
                if any(int(side * low) >= int(side * high) for side in (height, width)):
                    raise UsageError(
                        f"--cutmix_minmax {low:g} {high:g} contains no whole number of pixels for "
                        f"images of {height} x {width}: use a larger maximum"
                    )

    def shrink(self, config: RunConfig, small: SmallSizes) -> RunConfig:
        return config.with_flags(MixupConfig())
