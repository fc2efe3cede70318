"""How many steps the training that is planned takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data.errors import DataFolderError
from data.source import Wanted, open_data
from models.spec import ModelSpec
from training.errors import UsageError
from training.options.config import RunConfig

IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""
_ELSEWHERE = ("folder", "volumes", "webdataset")
"""Sources whose images may lie on the machines that will train, and not here."""


@dataclass(frozen=True)
class Work:
    """What is to be trained, in steps."""

    images: int
    """Training images of an epoch."""
    counted: str
    """Where that number is from."""
    batch_size: int
    epochs: int
    steps: int

    def hours(self, step_s: float) -> float:
        return self.steps * step_s / 3600


def find_work(config: RunConfig, model: ModelSpec) -> Work:
    """Return the steps that ``--num_epochs`` and ``--max_steps`` ask for. Raises UsageError."""
    images, counted = _images(config, model)
    batch_size = config.data.batch_size
    if images < batch_size:
        raise UsageError(
            f"{images:,} training images ({counted}) are fewer than --batch_size {batch_size}"
        )
    steps = config.num_epochs * (images // batch_size)  # what is left of an epoch is dropped
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    return Work(images, counted, batch_size, config.num_epochs, steps)


def _images(config: RunConfig, model: ModelSpec) -> tuple[int, str]:
    if config.planning.train_images is not None:
        return config.planning.train_images, "--train_images"
    data = config.data
    is_here = data.data_source not in _ELSEWHERE or Path(data.data_dir).is_dir()
    if data.data_source == "fake" or not is_here:
        return IMAGENET, "ImageNet's; --train_images is another number"
    channels, *size = model.sizes.input_shape
    wanted = Wanted(data, channels, tuple(size), model.sizes.num_classes, config.seed)
    try:
        found = open_data(wanted)
    except DataFolderError as error:
        raise UsageError(str(error)) from None
    return found.train_length, f"--data_source {data.data_source}"
