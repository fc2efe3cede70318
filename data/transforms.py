"""From an RGB image to what the model sees."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torchvision.transforms import v2

from data.preprocessing import Preprocessing


def train_transform(
    how: Preprocessing,
    image_size: int,
    channels: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    hflip: float,
) -> Callable:
    """Random resized crop and horizontal flip, normalised, (channels, size, size)."""
    mode = v2.InterpolationMode(how.interpolation)
    crop = v2.RandomResizedCrop(image_size, scale, ratio, interpolation=mode)
    return v2.Compose([crop, v2.RandomHorizontalFlip(hflip), *_to_tensor(how, channels)])


def val_transform(how: Preprocessing, image_size: int, channels: int) -> Callable:
    """Resize the shorter side to size / crop_pct, centre crop, normalise."""
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
