"""The transforms that make of an RGB image what the model sees."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from data.preprocessing import Preprocessing
from data.source import Wanted


def transforms_of(wanted: Wanted) -> tuple[Callable, Callable]:
    """Return how images are changed for training, and how for validation."""
    config, how = wanted.config, wanted.config.preprocessing
    size, channels = wanted.image_size, wanted.channels
    train = train_transform(how, size, channels, config.scale, config.ratio, config.hflip)
    return train, val_transform(how, size, channels)


def train_transform(
    how: Preprocessing,
    image_size: int,
    channels: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    hflip: float,
) -> Callable:
    """Return random resized crop, horizontal flip and normalising, to (channels, size, size)."""
    mode = v2.InterpolationMode(how.interpolation)
    crop = v2.RandomResizedCrop(image_size, scale, ratio, interpolation=mode)
    return v2.Compose([crop, v2.RandomHorizontalFlip(hflip), *_to_tensor(how, channels)])


def val_transform(how: Preprocessing, image_size: int, channels: int) -> Callable:
    """Return the resizing of the shorter side to size / crop_pct, centre crop and normalising."""
    mode = v2.InterpolationMode(how.interpolation)
    resize = v2.Resize(math.floor(image_size / how.crop_pct), interpolation=mode)
    return v2.Compose([resize, v2.CenterCrop(image_size), *_to_tensor(how, channels)])


def _to_tensor(how: Preprocessing, channels: int) -> list[Callable]:
    mean, std = list(how.mean), list(how.std)
    if channels == 1:
        mean, std = [sum(mean) / 3], [sum(std) / 3]
    return [
        v2.Grayscale() if channels == 1 else v2.Identity(),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean, std),
    ]


def seeded(
    transform: Callable, image: Image.Image, seed: int, epoch: int, index: int
) -> torch.Tensor:
    """Return the transformed image; these three numbers alone decide what is drawn at random."""
    state = np.random.SeedSequence((seed, epoch, index)).generate_state(1, np.uint64)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU generator: torch.manual_seed would also queue work for CUDA.
        torch.default_generator.manual_seed(int(state[0] >> 1))
        return transform(image)
