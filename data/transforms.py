"""The transforms that make of an RGB image what the model sees."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from data.errors import DataFolderError
from data.preprocessing import Preprocessing
from data.source import Wanted

Size = tuple[int, ...]
"""The height and width of an image in pixels."""
Given = TypeVar("Given")
Made = TypeVar("Made")


def transforms_of(wanted: Wanted) -> tuple[Callable, Callable]:
    """Return how images are changed for training, and how for validation.

    Raises DataFolderError, see ``val_transform``.
    """
    config, how = wanted.config, wanted.config.preprocessing
    size, channels = wanted.size, wanted.channels
    val = val_transform(how, size, channels)
    return train_transform(how, size, channels, config.scale, config.ratio, config.hflip), val


def train_transform(
    how: Preprocessing,
    size: Size,
    channels: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    hflip: float,
) -> Callable:
    """Return random resized crop, horizontal flip and normalising, to (channels, *size)."""
    mode = v2.InterpolationMode(how.interpolation)
    crop = v2.RandomResizedCrop(size, scale, ratio, interpolation=mode)
    return v2.Compose([crop, v2.RandomHorizontalFlip(hflip), *_to_tensor(how, channels)])


def val_transform(how: Preprocessing, size: Size, channels: int) -> Callable:
    """Return the resizing to what covers size / crop_pct, centre crop and normalising.

    Raises DataFolderError where the model takes no images, but volumes.
    """
    if len(size) != 2:
        raise DataFolderError(
            f"of flat images no volumes of {' x '.join(map(str, size))}, which the model takes, "
            "can be made: use --data_source volumes, mosaics or fake"
        )
    mode = v2.InterpolationMode(how.interpolation)
    height, width = (math.floor(side / how.crop_pct) for side in size)
    if height == width:  # the shorter side is the one that fits
        resize: Callable = v2.Resize(height, interpolation=mode)
    else:
        resize = functools.partial(_resize_to_cover, height, width, mode)
    return v2.Compose([resize, v2.CenterCrop(size), *_to_tensor(how, channels)])


def _resize_to_cover(
    height: int, width: int, mode: v2.InterpolationMode, image: Image.Image
) -> Image.Image:
    """Return the image as small as covers height x width, its proportions kept, as timm does."""
    by = min(image.height / height, image.width / width)
    covering = [round(image.height / by), round(image.width / by)]
    return v2.functional.resize(image, covering, interpolation=mode)


def _to_tensor(how: Preprocessing, channels: int) -> list[Callable]:
    mean, std = how.of_channels(channels)
    return [
        v2.Grayscale() if channels == 1 else v2.Identity(),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean, std),
    ]


def seeded(
    transform: Callable[[Given], Made], image: Given, seed: int, epoch: int, index: int
) -> Made:
    """Return the transformed image; these three numbers alone decide what is drawn at random."""
    state = np.random.SeedSequence((seed, epoch, index)).generate_state(1, np.uint64)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU generator: torch.manual_seed would also queue work for CUDA.
        torch.default_generator.manual_seed(int(state[0] >> 1))
        return transform(image)
