"""timm's augmentations of one image, of bytes, after its crop: timm's own code, in timm's order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from PIL import Image
from timm.data.auto_augment import (
    AutoAugment,
    augment_and_mix_transform,
    auto_augment_transform,
    posterize,
    rand_augment_transform,
)
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import str_to_pil_interp
from torchvision.transforms import ColorJitter
from torchvision.transforms.v2.functional import pil_to_tensor

from data.config import DataConfig
from data.errors import DataFolderError
from data.image.global_random import drawn_from

_SEEDS = 2**32
_WHITE = 255
_TRIED_ON = 32
"""Pixels of a side of the image on which a policy is tried."""


class Recolour:
    """``--aa`` and then ``--color_jitter``, of those that are asked for."""

    def __init__(self, config: DataConfig, size: tuple[int, ...]) -> None:
        """Raises DataFolderError for a policy that timm cannot compute."""
        self._steps: list[Callable] = [_policy(config.aa, config, size)] if config.aa else []
        if config.color_jitter:
            self._steps.append(ColorJitter(*config.jitter_of_each))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return the changed image; both are (3, height, width), uint8, RGB."""
        if not self._steps:
            return image
        # Pillow computes both: as timm has it, and most of it faster than on tensors.
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        with drawn_from(int(torch.randint(_SEEDS, ()))):
            for step in self._steps:
                picture = step(picture)
        return pil_to_tensor(picture)


def _policy(name: str, config: DataConfig, size: tuple[int, ...]) -> Callable:
    """Return timm's policy of this name, as its ``transforms_imagenet_train`` makes it.

    Raises DataFolderError if it cannot be computed.
    """
    how = config.preprocessing
    params: dict = {
        "translate_const": int(min(size) * 0.45),
        "img_mean": tuple(min(_WHITE, round(_WHITE * each)) for each in how.mean),
    }
    if config.train_interpolation != "random":
        params["interpolation"] = str_to_pil_interp(config.train_interpolation or how.interpolation)
    if name.startswith("rand"):
        made = rand_augment_transform(name, params)
    elif name.startswith("augmix"):
        made = augment_and_mix_transform(name, params | {"translate_pct": 0.3})
    else:
        made = auto_augment_transform(name, params)
    for op in chain(*made.policy) if isinstance(made, AutoAugment) else made.ops:
        if op.aug_fn is posterize:
            op.aug_fn = _posterize
    try:  # timm looks at most numbers only when it draws
        with drawn_from(0):
            made(Image.new("RGB", (_TRIED_ON, _TRIED_ON)))
    except ValueError as error:
        raise DataFolderError(f"--aa {name} cannot be drawn: {error}") from None
    return made


def _posterize(image: Image.Image, bits_to_keep: int, **others: object) -> Image.Image:
    """Do as timm, whose policies ask for 0 bits and fewer, too: black, which Pillow 13 refuses."""
    if bits_to_keep < 1:
        return Image.new(image.mode, image.size)
    return posterize(image, bits_to_keep, **others)


class Erase:
    """timm's random erasing, of bytes: what it writes is rounded to what a byte can be."""

    def __init__(self, config: DataConfig, channels: int) -> None:
        self._erasing = RandomErasing(
            config.reprob, mode=config.remode, max_count=config.recount, device="cpu"
        )
        mean, std = config.preprocessing.of_channels(channels)
        self._mean, self._std = (torch.tensor(each).view(-1, 1, 1) * _WHITE for each in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return (channels, height, width), uint8, with rectangles erased or none."""
        canvas = _Canvas(image, self._mean, self._std)
        with drawn_from(int(torch.randint(_SEEDS, ()))):
            self._erasing(canvas)
        return canvas.image


class _Canvas:
    """An image of bytes that timm's erasing takes for a normalised one, as far as it looks."""

    dtype = torch.float32

    def __init__(self, image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.image, self._mean, self._std = image, mean, std
        self._is_copy = False

    def size(self) -> torch.Size:
        return self.image.shape

    def __setitem__(self, where: tuple[slice, ...], values: torch.Tensor) -> None:
        if not self._is_copy:  # the pixels may be the data set's own
            self.image, self._is_copy = self.image.clone(), True
        written = (values * self._std + self._mean).round_().clamp_(0, _WHITE)
        self.image[where] = written.to(torch.uint8)
