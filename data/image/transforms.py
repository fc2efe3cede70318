"""The transforms that make of an image what the model sees, but for normalising: in uint8."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import TypeVar

import torch
import xxhash
from PIL import Image
from timm.data.transforms import CenterCropOrPad
from torchvision.transforms import v2

from data.config import DataConfig
from data.errors import DataFolderError
from data.image.augment import Erase, Recolour
from data.image.decode import OpenImage
from data.image.preprocessing import Preprocessing
from data.source import Wanted

Size = tuple[int, ...]
"""The height and width of an image in pixels."""
Box = tuple[int, int, int, int]
"""A part of an image: its first row and column, its height and width."""
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

    Then comes what else is asked for (``data/image/augment.py``), in the order of timm's
    ``transforms_imagenet_train``.

    No pixels are made that are not needed: where a crop is as large as several times what it is
    resized to, the image is decoded at a fraction of its size, and the crop begins and ends with
    a pixel of that.
    """

    def __init__(self, config: DataConfig, size: Size, channels: int) -> None:
        """Raises DataFolderError for augmentations that timm cannot compute."""
        chosen = config.train_interpolation or config.preprocessing.interpolation
        names = _BY_TENSORS if chosen == "random" else (chosen,)
        self._modes = [v2.InterpolationMode(name) for name in names]
        self._scale, self._ratio = config.scale, config.ratio
        self._hflip, self._vflip = config.hflip, config.vflip
        self._size, self._channels = list(size), channels
        self._recolour = Recolour(config, size)
        self._erase = Erase(config, channels) if config.reprob else None

    def __call__(self, image: OpenImage) -> torch.Tensor:
        flips = torch.rand(()).item() < self._hflip
        flips_over = self._vflip > 0 and torch.rand(()).item() < self._vflip
        box = random_box(image.size, self._scale, self._ratio)
        made = self._resized(image, box, self._mode())
        made = made.flip(-1) if flips else made
        made = self._recolour(made.flip(-2) if flips_over else made)
        if self._channels == 1:
            made = v2.functional.rgb_to_grayscale(made)
        return self._erase(made) if self._erase else made

    def _mode(self) -> v2.InterpolationMode:
        """Return how this image is resized; timm draws one of two if it is to be random."""
        if len(self._modes) == 1:
            return self._modes[0]
        return self._modes[int(torch.randint(len(self._modes), ()))]

    def _resized(self, image: OpenImage, box: Box, mode: v2.InterpolationMode) -> torch.Tensor:
        """Return this part of the image, (3, *size)."""
        top, left, height, width = box
        most = min(height / self._size[0], width / self._size[1]) / _AT_LEAST
        shrink = max((each for each in image.shrinks if each <= most), default=1)
        top, left, height, width = (each // shrink for each in (top, left, height, width))
        crop = image.pixels(shrink)[top : top + height, left : left + width]
        if mode.value in _BY_TENSORS:
            # Without a copy: PyTorch computes on (height, width, channels) in memory.
            tensor = torch.from_numpy(crop).permute(2, 0, 1)
            return v2.functional.resize_image(tensor, self._size, mode, antialias=True)
        resized = v2.functional.resize(Image.fromarray(crop), self._size, mode)
        return v2.functional.pil_to_tensor(resized)


def random_box(size: Size, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """Draw a part of an image of (height, width) as torchvision's ``RandomResizedCrop`` does.

    Its area is a share of the image's from ``scale``, its width over its height from ``ratio``,
    evenly by its logarithm. After ten that do not fit it is the largest part in the middle whose
    ratio is allowed. (torchvision's own draws number by number, which takes four times as long.)
    """
    height, width = size
    low, high = map(math.log, ratio)
    for _ in range(10):
        shared, shaped, down, across = torch.rand(4, dtype=torch.float64).tolist()
        area = height * width * (scale[0] + shared * (scale[1] - scale[0]))
        aspect = math.exp(low + shaped * (high - low))
        tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < tall <= height and 0 < wide <= width:
            top, left = int(down * (height - tall + 1)), int(across * (width - wide + 1))
            return top, left, tall, wide
    tall, wide = height, width
    if width / height < ratio[0]:
        tall = round(width / ratio[0])
    elif width / height > ratio[1]:
        wide = round(height * ratio[1])
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def val_transform(how: Preprocessing, size: Size, channels: int) -> Transform:
    """Return how timm makes a whole image ``size`` large for evaluation, by Pillow.

    ``how.crop_mode`` says what of the image is resized to size / crop_pct, of which the centre is
    then cut out: "center" its shorter side, "squash" each side by itself, "border" its longer
    side, with the mean colour around it. Raises DataFolderError where the model takes volumes.
    """
    if len(size) != 2:
        raise DataFolderError(
            f"of flat images no volumes of {' x '.join(map(str, size))}, which the model takes, "
            "can be made: use --data_source volumes, mosaics or fake"
        )
    mode = v2.InterpolationMode(how.interpolation_of_val)
    scaled = tuple(math.floor(side / how.crop_pct) for side in size)
    crop: Callable = v2.CenterCrop(size)
    if how.crop_mode == "squash":
        resize: Callable = v2.Resize(scaled, interpolation=mode)
    elif how.crop_mode == "border":
        resize = functools.partial(_resize_in_proportion, scaled, max, mode)
        crop = CenterCropOrPad(size, fill=[round(255 * colour) for colour in how.mean])
    elif scaled[0] == scaled[1]:  # the shorter side is the one that fits
        resize = v2.Resize(scaled[0], interpolation=mode)
    else:
        resize = functools.partial(_resize_in_proportion, scaled, min, mode)
    colours = v2.Grayscale() if channels == 1 else v2.Identity()
    made = v2.Compose([resize, crop, colours, v2.PILToTensor()])
    return functools.partial(_of_whole, made)


def _of_whole(transform: Callable, image: OpenImage) -> torch.Tensor:
    return transform(Image.fromarray(image.pixels()))


def _resize_in_proportion(
    size: Size, choose: Callable, mode: v2.InterpolationMode, image: Image.Image
) -> Image.Image:
    """Return the image with its proportions: with ``min`` it covers ``size``, with ``max`` it fits
    into it, as timm's ``ResizeKeepRatio`` does."""
    by = choose(image.height / size[0], image.width / size[1])
    # timm fails where a long, thin image would have no pixel across.
    sides = [max(1, round(side / by)) for side in (image.height, image.width)]
    return v2.functional.resize(image, sides, interpolation=mode)


def seeded(
    transform: Callable[[Given], Made], image: Given, seed: int, epoch: int, index: int
) -> Made:
    """Return the transformed image; these three numbers alone decide what is drawn at random."""
    number = xxhash.xxh3_64_intdigest(struct.pack("<3q", seed, epoch, index))
    # Only the CPU generator: torch.manual_seed would also queue work for CUDA. And by hand:
    # torch.random.fork_rng takes as long as a tenth of the image.
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(number >> 1)
    try:
        return transform(image)
    finally:
        generator.set_state(before)
