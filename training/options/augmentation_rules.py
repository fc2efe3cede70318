"""Says which augmentations of images go together, and with which source of images."""

from __future__ import annotations

from data.config import DataConfig
from data.registry import ALWAYS_ALIKE, NOT_AUGMENTED
from training.errors import UsageError
from training.options.flag_rules import by_field

_OF_ONE_IMAGE = ("vflip", "train_interpolation", "aa", "color_jitter", "reprob")
_MOST_HUE = 0.5


def check_augmentations(data: DataConfig) -> None:
    """Raise UsageError for augmentations that cannot be, or that would do nothing."""
    flags, source = by_field(DataConfig), data.data_source
    unused = {"aug_repeats": ALWAYS_ALIKE} | dict.fromkeys(_OF_ONE_IMAGE, NOT_AUGMENTED)
    for name, sources in unused.items():
        value = getattr(data, name)
        if value != flags[name].field.default and source in sources:
            raise UsageError(
                f"{flags[name].typed(value)} does nothing with --data_source {source}: drop it"
            )
    if data.aug_repeats > data.batch_size:
        raise UsageError(
            f"--aug_repeats {data.aug_repeats} is more than --batch_size {data.batch_size}: an "
            "image is to be so many times in one batch"
        )
    jitter = data.jitter_of_each
    if len(jitter) not in (3, 4):
        raise UsageError(
            "--color_jitter takes one number, three (brightness, contrast, saturation) or four "
            f"(and hue), not {len(jitter)}"
        )
    if any(hue > _MOST_HUE for hue in jitter[3:]):
        raise UsageError(f"--color_jitter: the hue, {jitter[3]:g}, must be at most {_MOST_HUE}")
    if data.aa and data.color_jitter and "3a" not in data.aa:
        raise UsageError(
            f"--color_jitter does not go with --aa {data.aa}, which has such changes itself (timm "
            "leaves it out then): drop one of the two"
        )
