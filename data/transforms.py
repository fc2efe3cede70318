"""Image transforms, from encoded images to the model's uint8 input: crop, resize, flip, augment.

Normalization happens later, on the devices. Random draws depend only on the seed, the epoch and the
image (``seeded``).
"""

import contextlib
import functools
import math
import operator
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
import xxhash
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from PIL import Image
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import CenterCropOrPad, str_to_pil_interp
from torchvision.transforms import ColorJitter, v2
from torchvision.transforms.v2.functional import pil_to_tensor

from data.config import DataConfig, Preprocessing
from data.decode import OpenImage
from data.files import DataFolderError
from data.intensity import COLORS

Size = tuple[int, ...]
"""The height and width of an image in pixels."""
Box = tuple[int, int, int, int]
"""Part of an image: first row, first column, height, width."""
Transform = Callable[[OpenImage], torch.Tensor]
"""Maps an image to (channels, height, width), uint8. Raises BrokenImageError."""
SizedTransform = Callable[[OpenImage, Size], torch.Tensor]
"""Maps an image, and a height and width, to (channels, height, width): uint8. Raises
BrokenImageError."""
Given = TypeVar("Given")
Made = TypeVar("Made")

_MIN_RATIO = 1.5
"""Minimum ratio of decoded to output pixels per side when decoding at reduced size: crops then
differ by 0.5 to 1.6 of 255 from crops of full-size images; with 1.0, by up to 2.5."""
_BY_TENSORS = ("bilinear", "bicubic")
"""Interpolations that PyTorch computes like Pillow, three to four times as fast."""
_SEEDS = 2**32
_WHITE = 255


def seeded(
    transform: Callable[[Given], Made], image: Given, seed: int, epoch: int, index: int
) -> Made:
    """Return the transformed image; random draws depend only on the three numbers."""
    number = xxhash.xxh3_64_intdigest(struct.pack("<3q", seed, epoch, index))
    # Set only the CPU generator, because torch.manual_seed would also queue work for CUDA. Do so by
    # hand, because torch.random.fork_rng would take a tenth of the image's time.
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(number >> 1)
    try:
        return transform(image)
    finally:
        generator.set_state(before)


# -- validation ------------------------------------------------------------------------


def val_transform(preprocessing: Preprocessing, size: Size, channels: int) -> Transform:
    """Return timm's evaluation transform to ``size``, computed by Pillow: resize to size / crop_pct
    as ``crop_mode`` says, then center crop. Raises DataFolderError if the model takes volumes."""
    if len(size) != 2:
        raise DataFolderError(
            f"the model takes volumes of size {' x '.join(map(str, size))}, but these images are "
            "2-D: use --data_source volumes, mosaics or fake"
        )
    mode = v2.InterpolationMode(preprocessing.interpolation_of_val)
    scaled = tuple(math.floor(side / preprocessing.crop_pct) for side in size)
    is_color = channels in COLORS
    crop: Callable = v2.CenterCrop(size)
    if preprocessing.crop_mode == "squash":
        resize: Callable = v2.Resize(scaled, interpolation=mode)
    elif preprocessing.crop_mode == "border":
        resize = functools.partial(_resize_in_proportion, scaled, max, mode)
        mean = preprocessing.mean if is_color else preprocessing.of_channels(1)[0]
        crop = CenterCropOrPad(size, fill=[round(_WHITE * colour) for colour in mean])
    elif scaled[0] == scaled[1]:  # the shorter side is the one that fits
        resize = v2.Resize(scaled[0], interpolation=mode)
    else:
        resize = functools.partial(_resize_in_proportion, scaled, min, mode)
    colours = v2.Grayscale() if channels == 1 else v2.Identity()
    on_picture = v2.Compose([Image.fromarray, resize, crop, colours, v2.PILToTensor()])
    if not is_color:
        on_picture = functools.partial(_by_band, on_picture)
    return v2.Compose([operator.methodcaller("pixels"), on_picture])


def _by_band(on_picture: Transform, pixels: np.ndarray) -> torch.Tensor:
    """Return (bands, height, width) of what a transform makes of each band alone, as a gray
    image."""
    bands = np.ascontiguousarray(np.moveaxis(pixels, 2, 0))
    return torch.cat([on_picture(band) for band in bands])


def whole_image(
    mode: v2.InterpolationMode, channels: int, image: OpenImage, size: Size
) -> torch.Tensor:
    """Return the whole image resized by Pillow: (channels, height, width), uint8."""
    picture = v2.functional.resize(Image.fromarray(image.pixels()), list(size), mode)
    return pil_to_tensor(v2.functional.rgb_to_grayscale(picture) if channels == 1 else picture)


def grayscale(image: torch.Tensor) -> torch.Tensor:
    """Return a color image, (3, height, width), uint8, as a gray one, (1, height, width), as Pillow
    does: rounded. torchvision truncates, which makes gray images darker by 1 of 255."""
    red, green, blue = image.int()
    return ((19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16).to(torch.uint8)[None]


def _resize_in_proportion(
    size: Size, choose: Callable, mode: v2.InterpolationMode, image: Image.Image
) -> Image.Image:
    """Return the image resized with its aspect ratio: covering ``size`` with ``min``, fitting into
    it with ``max``, like timm's ``ResizeKeepRatio``."""
    by = choose(image.height / size[0], image.width / size[1])
    # timm fails if a long, thin image would become less than one pixel wide.
    sides = [max(1, round(side / by)) for side in (image.height, image.width)]
    return v2.functional.resize(image, sides, interpolation=mode)


# -- training --------------------------------------------------------------------------


class TrainTransform:
    """Random resized crop and flips, drawn like torchvision's transforms, then the other
    augmentations in the order of timm's ``transforms_imagenet_train``."""

    def __init__(self, config: DataConfig, size: Size, channels: int) -> None:
        """Raises DataFolderError for augmentations that timm cannot compute."""
        preprocessing = config.preprocessing
        self._modes = training_modes(config)
        self._scale, self._ratio = config.scale, config.ratio
        self._hflip, self._vflip = config.hflip, config.vflip
        self._size, self._channels = size, channels
        self._on_pictures: list[Callable] = []
        if config.aa:
            self._on_pictures.append(_policy(config.aa, config, size))
        if config.color_jitter:
            self._on_pictures.append(ColorJitter(*config.jitter_of_each))
        self._erase = None
        if config.reprob:
            self._erase = RandomErasing(
                config.reprob, mode=config.remode, max_count=config.recount, device="cpu"
            )
        self._mean, self._std = (
            torch.tensor(values).view(-1, 1, 1) * _WHITE
            for values in preprocessing.of_channels(channels)
        )

    def __call__(self, image: OpenImage) -> torch.Tensor:
        return self._augmented(image, self._size, self._ratio)

    def in_shape(self, image: OpenImage, size: Size) -> torch.Tensor:
        """Return the image in another size; the crop's aspect ratio is relative to that of the
        image."""
        height, width = image.size
        low, high = (ratio * width / height for ratio in self._ratio)
        return self._augmented(image, size, (low, high))

    def _augmented(self, image: OpenImage, size: Size, ratio: tuple[float, float]) -> torch.Tensor:
        # The order of random draws is part of what a seed means: do not change it.
        flips = torch.rand(()).item() < self._hflip
        flips_over = self._vflip > 0 and torch.rand(()).item() < self._vflip
        box = random_box(image.size, self._scale, ratio)
        (crop,) = resized_parts(image, [(box, size)], self._modes)
        crop = crop.flip(-1) if flips else crop
        crop = crop.flip(-2) if flips_over else crop
        if self._on_pictures:
            # Pillow computes these, as in timm, and mostly faster than on tensors.
            picture = Image.fromarray(crop.permute(1, 2, 0).numpy())
            with drawn_from(int(torch.randint(_SEEDS, ()))):
                for augment in self._on_pictures:
                    picture = augment(picture)
            crop = pil_to_tensor(picture)
        if self._channels == 1:
            crop = grayscale(crop)
        if self._erase is None:
            return crop
        canvas = _Canvas(crop, self._mean, self._std)
        with drawn_from(int(torch.randint(_SEEDS, ()))):
            self._erase(canvas)
        return canvas.image


@dataclass
class _Canvas:
    """A uint8 image with the interface of a normalized one for timm's random erasing; written
    values are rounded to bytes."""

    image: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    dtype: torch.dtype = torch.float32
    is_copy: bool = False

    def size(self) -> torch.Size:
        return self.image.shape

    def __setitem__(self, where: tuple[slice, ...], values: torch.Tensor) -> None:
        if not self.is_copy:  # the pixels may be the data set's own
            self.image, self.is_copy = self.image.clone(), True
        written = (values * self.std + self.mean).round_().clamp_(0, _WHITE)
        self.image[where] = written.to(torch.uint8)


def training_modes(config: DataConfig) -> list[v2.InterpolationMode]:
    """Return the interpolations of training images; one of them is drawn for each image."""
    chosen = config.train_interpolation or config.preprocessing.interpolation
    names = _BY_TENSORS if chosen == "random" else (chosen,)
    return [v2.InterpolationMode(name) for name in names]


def resized_parts(
    image: OpenImage, parts: Sequence[tuple[Box, Size]], modes: list[v2.InterpolationMode]
) -> list[torch.Tensor]:
    """Return parts of an image, each resized to its own size, (bands, height, width) uint8, all
    with the same randomly drawn one of ``modes``.

    Decodes only the required pixels: if all parts are several times larger than their output sizes,
    the image is decoded at reduced size, and the parts are aligned to its pixels. Raises
    BrokenImageError.
    """
    mode = modes[int(torch.randint(len(modes), ()))] if len(modes) > 1 else modes[0]
    most = min(min(box[2] / size[0], box[3] / size[1]) for box, size in parts) / _MIN_RATIO
    shrink = max((factor for factor in image.shrinks if factor <= most), default=1)
    shrunk = [([side // shrink for side in box], size) for box, size in parts]
    pixels = image.pixels(shrink, max(top + height for (top, _, height, _), _ in shrunk))
    resized = []
    for (top, left, height, width), size in shrunk:
        part = pixels[top : top + height, left : left + width]
        if mode.value in _BY_TENSORS:
            # PyTorch computes on (height, width, channels) in memory, but copies a part of the
            # pixels more slowly than NumPy.
            tensor = torch.from_numpy(np.ascontiguousarray(part)).permute(2, 0, 1)
            resized.append(v2.functional.resize_image(tensor, list(size), mode, antialias=True))
        else:
            resize = functools.partial(_resized, size=list(size), mode=mode)
            in_color = part.shape[2] in COLORS
            resized.append(resize(part) if in_color else _by_band(resize, part))
    return resized


def _resized(pixels: np.ndarray, size: list[int], mode: v2.InterpolationMode) -> torch.Tensor:
    return pil_to_tensor(v2.functional.resize(Image.fromarray(pixels), size, mode))


def random_box(size: Size, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """Draw a crop of an image of (height, width) like torchvision's ``RandomResizedCrop``, four
    times as fast: its area is a fraction from ``scale``, its width / height log-uniform in
    ``ratio``. After ten draws that do not fit, use the largest centered crop."""
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
        tall = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        wide = max(1, round(height * ratio[1]))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


# -- timm's augmentations --------------------------------------------------------------


_BIT_GENERATOR = np.random.MT19937()
"""Swapped with NumPy's own generator, which takes a tenth of the time of copying its state."""


@contextlib.contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed the global generators of Python's ``random`` and NumPy, which timm uses, within the
    block, and restore them afterwards. ``seed`` must be below 2**32. Cannot be nested."""
    python, numpys = random.getstate(), get_bit_generator()
    random.seed(seed)
    set_bit_generator(_BIT_GENERATOR)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        set_bit_generator(numpys)


def _policy(name: str, config: DataConfig, size: tuple[int, ...]) -> Callable:
    """Return timm's policy of this name, as in its ``transforms_imagenet_train``. Raises
    DataFolderError if it is invalid."""
    preprocessing = config.preprocessing
    params: dict = {
        "translate_const": int(min(size) * 0.45),
        "img_mean": tuple(min(_WHITE, round(_WHITE * color)) for color in preprocessing.mean),
    }
    if config.train_interpolation != "random":
        params["interpolation"] = str_to_pil_interp(
            config.train_interpolation or preprocessing.interpolation
        )
    if name.startswith("rand"):
        policy = auto_augment.rand_augment_transform(name, params)
    elif name.startswith("augmix"):
        policy = auto_augment.augment_and_mix_transform(name, params | {"translate_pct": 0.3})
    else:
        policy = auto_augment.auto_augment_transform(name, params)
    has_policies = isinstance(policy, auto_augment.AutoAugment)
    for op in chain(*policy.policy) if has_policies else policy.ops:
        if op.aug_fn is auto_augment.posterize:
            op.aug_fn = _posterize
    try:  # timm checks most numbers only when it draws: try the policy on a small image
        with drawn_from(0):
            policy(Image.new("RGB", (32, 32)))
    except ValueError as error:
        raise DataFolderError(f"--aa {name} is invalid: {error}") from None
    return policy


def _posterize(image: Image.Image, bits_to_keep: int, **others: object) -> Image.Image:
    """Like timm's posterize, but also for 0 or fewer bits, which its policies draw: black, which
    Pillow 13 refuses."""
    if bits_to_keep < 1:
        return Image.new(image.mode, image.size)
    return auto_augment.posterize(image, bits_to_keep, **others)
