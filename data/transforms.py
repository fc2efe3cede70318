"""Image transforms, from encoded images to the model's uint8 input: crop, resize, flip, augment.

Normalization happens later, on the devices. Random draws depend only on the seed, the epoch and the
image (``seeded``).
"""

import contextlib
import copy
import functools
import math
import operator
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self, TypeVar

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
from data.decode import OpenImage, open_image
from data.files import DataFolderError
from data.source import GLOBALS, CropLayout, DatasetRequest, Split, max_masked

Size = tuple[int, ...]
"""The height and width of an image in pixels."""
Box = tuple[int, int, int, int]
"""Part of an image: first row, first column, height, width."""
Transform = Callable[[OpenImage], torch.Tensor]
"""Maps an image to (channels, height, width), or to packed crops (bytes,): uint8. Raises
BrokenImageError."""
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


class ImageSplit(Split):
    """One split of images, each read as the bytes of a JPEG, PNG or similar file and then
    decoded."""

    reading_threads = 16
    """Number of threads that may read images concurrently."""

    def __init__(
        self, request: DatasetRequest, name: str, transform: Transform, labels: Any, *others: Any
    ) -> None:
        """``labels`` and ``others``: see ``Split``."""
        super().__init__(request, name, labels, *others)
        self.transform = transform

    def read(self, number: int, most: int | None = None) -> bytes:
        """Return image ``number`` as stored, encoded; ``most``: number of first bytes that suffice.
        Raises BrokenImageError."""
        raise NotImplementedError

    def open(self, number: int, *, lines: bool = False) -> OpenImage:
        """Return image ``number``, possibly not decoded yet. Raises BrokenImageError, see
        ``open_image``."""
        return open_image(self.read(number), lines=lines)

    def known_sizes(self) -> np.ndarray | None:
        """Return height and width of each image in pixels, (n, 2), int32, if known without reading
        images."""
        return None

    def with_request(self, request: DatasetRequest) -> Self:
        part = copy.copy(self)
        Split.__init__(part, request, self.name, self.labels, self.classes, self.left_out)
        part.transform = transforms_of(request)[self.name]
        return part

    def load_sample(self, number: int, epoch: int, index: int) -> torch.Tensor:
        return seeded(self.transform, self.open(number), self.seed, epoch, index)


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


def transforms_of(request: DatasetRequest) -> dict[str, Transform]:
    """Return the transform of each split of the request.

    Raises DataFolderError, see ``val_transform`` and ``TrainTransform``.
    """
    config, size, channels = request.config, request.size, request.channels
    val = val_transform(config.preprocessing, size, channels)
    if not request.with_train:
        return {"val": val}
    train: Transform = val
    if request.layout:
        train = MultiCrop(config, request.layout)
    elif request.augment:
        train = TrainTransform(config, size, channels)
    return {"train": train, "val": val}


def sized_transforms_of(request: DatasetRequest) -> dict[str, SizedTransform]:
    """Return the transform of each split of the request for any output size. Raises
    DataFolderError, see ``TrainTransform``."""
    config, channels = request.config, request.channels
    mode = v2.InterpolationMode(config.preprocessing.interpolation_of_val)
    whole = functools.partial(whole_image, mode, channels)
    if not (request.with_train and request.augment):
        return dict.fromkeys(request.splits, whole)
    return {"train": TrainTransform(config, request.size, channels).in_shape, "val": whole}


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
    crop: Callable = v2.CenterCrop(size)
    if preprocessing.crop_mode == "squash":
        resize: Callable = v2.Resize(scaled, interpolation=mode)
    elif preprocessing.crop_mode == "border":
        resize = functools.partial(_resize_in_proportion, scaled, max, mode)
        crop = CenterCropOrPad(size, fill=[round(_WHITE * colour) for colour in preprocessing.mean])
    elif scaled[0] == scaled[1]:  # the shorter side is the one that fits
        resize = v2.Resize(scaled[0], interpolation=mode)
    else:
        resize = functools.partial(_resize_in_proportion, scaled, min, mode)
    colours = v2.Grayscale() if channels == 1 else v2.Identity()
    whole = operator.methodcaller("pixels"), Image.fromarray
    return v2.Compose([*whole, resize, crop, colours, v2.PILToTensor()])


def whole_image(
    mode: v2.InterpolationMode, channels: int, image: OpenImage, size: Size
) -> torch.Tensor:
    """Return the whole image resized by Pillow: (channels, height, width), uint8."""
    picture = v2.functional.resize(Image.fromarray(image.pixels()), list(size), mode)
    return pil_to_tensor(v2.functional.rgb_to_grayscale(picture) if channels == 1 else picture)


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
        self._modes = _modes(config)
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
            crop = v2.functional.rgb_to_grayscale(crop)
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


def _modes(config: DataConfig) -> list[v2.InterpolationMode]:
    """Return the interpolations of training images; one of them is drawn for each image."""
    chosen = config.train_interpolation or config.preprocessing.interpolation
    names = _BY_TENSORS if chosen == "random" else (chosen,)
    return [v2.InterpolationMode(name) for name in names]


def resized_parts(
    image: OpenImage, parts: Sequence[tuple[Box, Size]], modes: list[v2.InterpolationMode]
) -> list[torch.Tensor]:
    """Return parts of an image, each resized to its own size, (3, height, width) uint8, all with
    the same randomly drawn one of ``modes``.

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
            picture = v2.functional.resize(Image.fromarray(part), list(size), mode)
            resized.append(pil_to_tensor(picture))
    return resized


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


# -- DINO's crops ----------------------------------------------------------------------
#
# Color jitter, grayscale, blur and solarization are applied with the probabilities of DINOv2's code
# (dinov2/data/augmentations.py). The operations are torchvision's, but faster: values stay fp32,
# from 0 to 255, until the end, so they differ from torchvision's on fp32 images only by rounding to
# bytes, at most 0.5 of 255, or 1 at the threshold of solarization.


_LUMA = torch.tensor((0.2989, 0.587, 0.114))
"""Weights of red, green and blue in a gray value, as in torchvision."""
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = 0.4, 0.4, 0.2, 0.1
"""Maximum relative change of each; for hue, as a fraction of the color circle."""
_JITTERED, _GRAY = 0.8, 0.2
"""Probabilities of color jitter and of grayscale."""
_RADIUS, _SIGMAS = 4, (0.1, 2.0)
"""Radius and range of sigma of the blur, in pixels; it has 2 * 4 + 1 weights."""
_LEAST_WEIGHT = 1e-4
"""Smaller weights of the blur are dropped; those of one side change a value by less than 0.05."""
_LEAST_BLOCK = 4
"""Minimum area drawn for a masked rectangle, in patches, while at least that many are left."""
_LOG_ASPECT = math.log(0.3)
"""Masked rectangles have log(height / width) uniform between this value and its negative."""


class MultiCrop:
    """Creates the packed DINO crops of an image, each a random resized crop with random flip and
    distortion, and the mask of the first global crop. Separate crops for the Gram teacher are the
    global crops at higher resolution."""

    def __init__(self, config: DataConfig, layout: CropLayout) -> None:
        self._layout, self._gray = layout, layout.shape[0] == 1
        self._modes, self._ratio, self._hflip = _modes(config), config.ratio, config.hflip
        request, size = layout.request, layout.shape[1:]
        self._wanted = [(request.global_scale, size), (request.global_scale, size)]
        self._wanted += [(request.local_scale, request.local_size)] * request.local_number

    def __call__(self, image: OpenImage) -> torch.Tensor:
        request = self._layout.request
        kinds = [FIRST, SECOND] if torch.rand(()).item() < 0.5 else [SECOND, FIRST]
        kinds += [LOCAL] * request.local_number
        parts = [(random_box(image.size, scale, self._ratio), size) for scale, size in self._wanted]
        count, gram_count = len(parts), self._layout.gram_number
        parts += [(box, request.of_gram(self._layout.shape[1:])) for box, _ in parts[:gram_count]]
        resized = resized_parts(image, parts, self._modes)
        drawn = [(torch.rand(()).item() < self._hflip, draw_distortion(kind)) for kind in kinds]
        drawn += [
            (flips, replace(distortion, scale=request.gram_factor))
            for flips, distortion in drawn[:gram_count]
        ]
        crops = []
        for crop, (flips, distortion) in zip(resized, drawn, strict=True):
            crop = crop.flip(-1) if flips else crop
            crop = v2.functional.rgb_to_grayscale(crop) if self._gray else crop
            crops.append(distort(crop, distortion))
        none = crops[0].new_empty(0)
        grams = torch.stack(crops[count:]) if gram_count else none
        locals_ = torch.stack(crops[GLOBALS:count]) if request.local_number else none
        mask = block_mask(request.grid, request.mask_ratio)
        return self._layout.pack(torch.stack(crops[:GLOBALS]), grams, locals_, mask)


@dataclass(frozen=True)
class Kind:
    """Probabilities of blur and solarization for one kind of crop."""

    blurred: float
    solarized: float = 0.0


FIRST, SECOND, LOCAL = Kind(1.0), Kind(0.1, 0.2), Kind(0.5)
"""The kinds of DINO's crops: of an image's global crops, one is FIRST and one SECOND."""


@dataclass(frozen=True)
class Distortion:
    """The random draws for one crop."""

    jitter: tuple[tuple[str, float], ...]
    """Color operations in order, each with its factor; for hue, its shift as a fraction of the
    color circle."""
    gray: bool
    sigma: float | None
    """Standard deviation of the blur in pixels; None: no blur."""
    solarized: bool
    scale: float = 1.0
    """Side length of the crop relative to the crop that the blur is defined for."""


def draw_distortion(kind: Kind) -> Distortion:
    """Draw the distortion of a crop of this kind, from the same distributions as torchvision."""
    jittered, brightness, contrast, saturation, hue, gray, blurred, sigma, solarized = torch.rand(
        9, dtype=torch.float64
    ).tolist()
    jitter: tuple[tuple[str, float], ...] = ()
    if jittered < _JITTERED:
        factors = (
            ("brightness", 1 + _BRIGHTNESS * (2 * brightness - 1)),
            ("contrast", 1 + _CONTRAST * (2 * contrast - 1)),
            ("saturation", 1 + _SATURATION * (2 * saturation - 1)),
            ("hue", _HUE * (2 * hue - 1)),
        )
        jitter = tuple(factors[i] for i in torch.randperm(len(factors)).tolist())
    return Distortion(
        jitter,
        gray < _GRAY,
        _SIGMAS[0] + sigma * (_SIGMAS[1] - _SIGMAS[0]) if blurred < kind.blurred else None,
        solarized < kind.solarized,
    )


def distort(image: torch.Tensor, distortion: Distortion) -> torch.Tensor:
    """Return the distorted image, (channels, height, width) uint8; single-channel images without
    saturation and hue."""
    colors = len(image) == len(_LUMA)
    if distortion.jitter or (colors and distortion.gray) or distortion.sigma is not None:
        values = image.to(torch.float32, memory_format=torch.contiguous_format)
        for name, factor in distortion.jitter:
            if name == "brightness":
                values = values.mul_(factor).clamp_(0, _WHITE)
            elif name == "contrast":
                mean = _gray(values.mean((1, 2), keepdim=True)).item()
                values = values.mul_(factor).add_(mean * (1 - factor)).clamp_(0, _WHITE)
            elif name == "saturation" and colors:
                values = torch.lerp(_gray(values), values, factor).clamp_(0, _WHITE)
            elif name == "hue" and colors:
                values = shift_hue(values, factor)
        if colors and distortion.gray:
            values = _gray(values)
        if distortion.sigma is not None:
            # At higher resolution the blur covers the same part of the scene.
            values = blur(
                values, distortion.sigma * distortion.scale, round(_RADIUS * distortion.scale)
            )
        # NumPy converts fp32 to bytes in a sixth of PyTorch's time.
        rounded = torch.from_numpy(values.add_(0.5).numpy().astype(np.uint8))
        image = rounded.expand_as(image)
    # A byte is below 128 if it is less than 255 minus itself.
    return torch.minimum(image, image.bitwise_not()) if distortion.solarized else image


def _gray(values: torch.Tensor) -> torch.Tensor:
    """Return the gray values (1, height, width) of an fp32 image; gray images unchanged."""
    if len(values) == 1:
        return values
    return (_LUMA @ values.flatten(1)).view(1, *values.shape[1:])


def shift_hue(values: torch.Tensor, shift: float) -> torch.Tensor:
    """Return RGB values (3, height, width) with the hue shifted by ``shift`` of the color circle,
    at most a sixth. The minimum and maximum of each pixel stay the same: saturation and value in
    HSV.

    Each channel is a trapezoid over the hue h, counted in sixths of the circle from the channel's
    own hue: with the minimum m and chroma C, red = m + C clamp(2 - abs(h), 0, 1). The other two
    channels determine h: C abs(h) = C + (green - m) + (blue - m) - (red - m), with the sign of
    green - blue. This needs no division, no remainder, and no case distinction by the largest
    channel.
    """
    darkest, brightest = values.amin(0, keepdim=True), values.amax(0, keepdim=True)
    chroma = brightest - darkest
    total = values.sum(0, keepdim=True).add_(chroma).sub_(darkest)
    around = torch.cat([values, values[:2]])
    hues = torch.sub(total, values, alpha=2).copysign_(around[1:4] - around[2:5])
    away = hues.add_(chroma, alpha=6 * shift).abs_()
    return torch.sub(brightest + chroma, away).clamp_(darkest, brightest)


def blur(values: torch.Tensor, sigma: float, radius: int) -> torch.Tensor:
    """Return the values (channels, height, width) after a Gaussian blur with weights up to
    ``radius`` pixels along each axis and reflected edges. Applies one weight and its mirror image
    at a time, several times as fast as PyTorch's convolution."""
    radius = min(radius, *(side - 1 for side in values.shape[1:]))
    weights = [math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(radius + 1)]
    total = 2 * sum(weights) - weights[0]
    weights = [weight / total for weight in weights if weight / total > _LEAST_WEIGHT]
    radius = len(weights) - 1
    for dimension in (1, 2):
        length = values.shape[dimension]
        padding = (radius, radius, 0, 0) if dimension == 2 else (0, 0, radius, radius)
        padded = torch.nn.functional.pad(values[None], padding, mode="reflect")[0]
        values = padded.narrow(dimension, radius, length) * weights[0]
        for offset in range(1, radius + 1):
            for start in (radius - offset, radius + offset):
                values.add_(padded.narrow(dimension, start, length), alpha=weights[offset])
    return values


def block_mask(grid: tuple[int, int], ratio: tuple[float, float]) -> torch.Tensor:
    """Draw the masked patches, (patches,) bool; their fraction is uniform within ``ratio``. The
    mask consists of rectangles, as in iBOT and DINOv2, each around a random unmasked patch; the
    last one is truncated so that the number is exact."""
    rows, columns = grid
    share = ratio[0] + torch.rand(()).item() * (ratio[1] - ratio[0])
    wanted = min(max(1, round(share * rows * columns)), max_masked(grid, ratio))
    masked = np.zeros(grid, bool)
    while left := wanted - int(masked.sum()):
        sized, shaped, chosen, down, across = torch.rand(5, dtype=torch.float64).tolist()
        least = min(_LEAST_BLOCK, left)
        area, aspect = least + sized * (left - least), math.exp(_LOG_ASPECT * (2 * shaped - 1))
        tall = min(rows, max(1, round(math.sqrt(area * aspect))))
        wide = min(columns, max(1, round(math.sqrt(area / aspect))))
        free = np.flatnonzero(~masked)
        row, column = divmod(int(free[int(chosen * len(free))]), columns)
        top = min(max(0, row - int(down * tall)), rows - tall)
        start = min(max(0, column - int(across * wide)), columns - wide)
        block = masked[top : top + tall, start : start + wide]
        new_rows, new_columns = np.nonzero(~block)
        block[new_rows[:left], new_columns[:left]] = True
    return torch.from_numpy(masked.reshape(-1))
