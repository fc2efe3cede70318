"""The transforms that make of an image what the model sees, but for normalising: in uint8."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from data.config import DataConfig
from data.decode import OpenImage
from data.errors import DataFolderError
from data.preprocessing import Preprocessing
from data.source import Wanted

Size = tuple[int, ...]
"""The height and width of an image in pixels."""
Given = TypeVar("Given")
Made = TypeVar("Made")
Transform = Callable[[OpenImage], torch.Tensor]
"""Makes of an image (channels, height, width), uint8. Raises BrokenImageError."""

_AT_LEAST = 1.5
"""How many pixels a side of an image decoded at a fraction of its size has, for each that is made:
two photographs then differ by 0.5 to 1.6 of 255 from those that were decoded whole (mean absolute
difference of crops with bicubic interpolation to 96 and 224 pixels); with 1.0 by up to 2.5."""
_BY_TENSORS = ("bilinear", "bicubic")
"""The interpolations that PyTorch computes as Pillow does, and three to four times as fast."""


def transforms_of(wanted: Wanted) -> tuple[Transform, Transform]:
    """Return how images are changed for training, and how for validation.

    Raises DataFolderError, see ``val_transform``.
    """
    config, size, channels = wanted.config, wanted.size, wanted.channels
    val = val_transform(config.preprocessing, size, channels)
    return TrainTransform(config, size, channels), val


class TrainTransform:
    """Makes a random resized crop and flips it at random, as torchvision's transforms draw them.

    No pixels are made that are not needed: where a crop is as large as several times what it is
    resized to, the image is decoded at a fraction of its size, and the crop begins and ends with
    a pixel of that.
    """

    def __init__(self, config: DataConfig, size: Size, channels: int) -> None:
        mode = v2.InterpolationMode(config.preprocessing.interpolation)
        self._crop = v2.RandomResizedCrop(size, config.scale, config.ratio, mode)
        self._size, self._hflip, self._channels = list(size), config.hflip, channels

    def __call__(self, image: OpenImage) -> torch.Tensor:
        box = self._crop.make_params([torch.empty(1, *image.size, device="meta")])
        flips = bool(torch.rand(1) < self._hflip)
        made = self._resized(image, **box)
        if self._channels == 1:
            made = v2.functional.rgb_to_grayscale(made)
        return made.flip(-1) if flips else made

    def _resized(
        self, image: OpenImage, *, top: int, left: int, height: int, width: int
    ) -> torch.Tensor:
        """Return this part of the image, (3, *size)."""
        most = min(height / self._size[0], width / self._size[1]) / _AT_LEAST
        shrink = max((each for each in image.shrinks if each <= most), default=1)
        top, left, height, width = (each // shrink for each in (top, left, height, width))
        crop = image.pixels(shrink)[top : top + height, left : left + width]
        mode = self._crop.interpolation
        if mode.value in _BY_TENSORS:
            # Without a copy: PyTorch computes on (height, width, channels) in memory.
            tensor = torch.from_numpy(crop).permute(2, 0, 1)
            return v2.functional.resize_image(tensor, self._size, mode, antialias=True)
        resized = v2.functional.resize(Image.fromarray(crop), self._size, mode)
        return v2.functional.pil_to_tensor(resized)


def val_transform(how: Preprocessing, size: Size, channels: int) -> Transform:
    """Return the resizing to what covers size / crop_pct, and the centre crop: Pillow's, as timm's.

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
    colours = v2.Grayscale() if channels == 1 else v2.Identity()
    made = v2.Compose([resize, v2.CenterCrop(size), colours, v2.PILToTensor()])
    return functools.partial(_of_whole, made)


def _of_whole(transform: Callable, image: OpenImage) -> torch.Tensor:
    return transform(Image.fromarray(image.pixels()))


def _resize_to_cover(
    height: int, width: int, mode: v2.InterpolationMode, image: Image.Image
) -> Image.Image:
    """Return the image as small as covers height x width, its proportions kept, as timm does."""
    by = min(image.height / height, image.width / width)
    covering = [round(image.height / by), round(image.width / by)]
    return v2.functional.resize(image, covering, interpolation=mode)


def seeded(
    transform: Callable[[Given], Made], image: Given, seed: int, epoch: int, index: int
) -> Made:
    """Return the transformed image; these three numbers alone decide what is drawn at random."""
    state = np.random.SeedSequence((seed, epoch, index)).generate_state(1, np.uint64)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU generator: torch.manual_seed would also queue work for CUDA.
        torch.default_generator.manual_seed(int(state[0] >> 1))
        return transform(image)
