"""Normalises images on the devices: they come as bytes, which are a quarter of fp32's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from training.options.resolve import Run

_WHITE = 255


@dataclass(frozen=True)
class Normalize:
    """Makes of bytes what a model is shown: (x / 255 - mean) / std, by channel, in fp32.

    Images that are fp32 already have been normalised where they were read, and stay as they are.
    """

    scale: torch.Tensor
    """1 / (255 std), on the devices: (channels, 1, 1)."""
    offset: torch.Tensor
    """-mean / std, on the devices: (channels, 1, 1)."""

    @classmethod
    def of(cls, run: Run, constant: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the one for the mean and std of a run; ``constant`` puts them on the devices."""
        channels, *spatial = run.model.sizes.input_shape
        mean, std = map(torch.tensor, run.config.data.preprocessing.of_channels(channels))
        by_channel = (-1, *[1] * len(spatial))
        values = 1 / (_WHITE * std), -mean / std
        return cls(*(constant(each.view(by_channel)) for each in values))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype != torch.uint8:
            return images
        return images.float() * self.scale + self.offset
