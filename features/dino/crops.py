"""DINO's crops of an image: global and local ones, each distorted, and the mask of patches.

Color jitter, grayscale, blur and solarization are applied with the probabilities of DINOv2's code
(dinov2/data/augmentations.py). The operations are torchvision's, but faster: values stay fp32, from
0 to 255, until the end, so they differ from torchvision's on fp32 images only by rounding to bytes,
at most 0.5 of 255, or 1 at the threshold of solarization.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from data.batch import Batch, Field, Fields
from data.config import GIVE_FLOATS, DataConfig
from data.decode import OpenImage
from data.files import DataFolderError
from data.images import ImageView, SampleTransform
from data.open import draw_samples
from data.source import BatchSizes, DatasetRequest, Pictures
from data.transforms import grayscale, random_box, resized_parts, training_modes

GLOBALS = 2
"""Number of global crops per image."""
_WHITE = 255
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
_MASKED = 0.75
"""How much of a masked patch is gray in pictures."""
_LEAST_BLOCK = 4
"""Minimum area drawn for a masked rectangle, in patches, while at least that many are left."""
_LOG_ASPECT = math.log(0.3)
"""Masked rectangles have log(height / width) uniform between this value and its negative."""


@dataclass(frozen=True)
class CropView(ImageView):
    """Crops of each training image: two global crops of the request's size, smaller local crops,
    and a mask for the patches of the first global crop (DINOv2, https://arxiv.org/abs/2304.07193,
    section 4). Fields: ``global_crops`` (2, channels, height, width), ``local_crops`` (number,
    channels, height, width) if there are any, ``gram_crops`` (2, channels, height, width) if the
    Gram teacher has larger crops, and ``mask`` (patches,), bool."""

    local_size: tuple[int, int]
    """Height and width of a local crop in pixels."""
    local_number: int
    """Number of local crops per image."""
    global_scale: tuple[float, float]
    """Minimum and maximum area of a global crop, as a fraction of the image."""
    local_scale: tuple[float, float]
    """Minimum and maximum area of a local crop, as a fraction of the image."""
    grid: tuple[int, int]
    """Rows and columns of patches in a global crop."""
    mask_ratio: tuple[float, float]
    """Minimum and maximum fraction of masked patches in the masked crop, drawn uniformly per
    image."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Sides of square global and local crops; each batch uses one pair. Empty: only the sizes
    above."""
    gram_factor: float = 1.0
    """Size of the Gram teacher's crops relative to global crops, per side; 1: it uses the global
    crops."""

    @property
    def has_gram_crops(self) -> bool:
        """Whether the Gram teacher has crops of its own."""
        return self.gram_factor > 1

    def of_gram(self, sides: tuple[int, ...]) -> tuple[int, int]:
        """Return the height and width of the Gram teacher's crops, in pixels or patches."""
        height, width = sides
        return round(height * self.gram_factor), round(width * self.gram_factor)

    def check(self, request: DatasetRequest) -> None:
        kind = request.config.data_source
        if len(request.size) != 2 or kind in GIVE_FLOATS:
            raise DataFolderError(
                f"--objective dino requires photographs to crop, and --data_source {kind} provides "
                "arrays"
            )

    def fields(
        self, request: DatasetRequest, image_dtype: torch.dtype, *, is_train: bool
    ) -> dict[str, Field]:
        if not is_train:
            return super().fields(request, image_dtype, is_train=False)
        shapes = {"global_crops": (GLOBALS, *request.shape)}
        if self.has_gram_crops:
            shapes["gram_crops"] = (GLOBALS, request.channels, *self.of_gram(request.size))
        if self.local_number:
            shapes["local_crops"] = (self.local_number, request.channels, *self.local_size)
        crops = {name: Field(shape, torch.uint8) for name, shape in shapes.items()}
        return crops | {"mask": Field((math.prod(self.grid),), torch.bool)}

    def transforms(self, request: DatasetRequest) -> dict[str, SampleTransform]:
        transforms = super().transforms(request)
        if request.with_train and request.augment:
            transforms["train"] = MultiCrop(request.config, request.shape, self)
        return transforms

    def noise(
        self, request: DatasetRequest, fields: Fields, number: int, generator: torch.Generator
    ) -> Batch:
        sample, patches = super().noise(request, fields, number, generator), math.prod(self.grid)
        masked = 1 + number % max_masked(self.grid, self.mask_ratio)
        return sample | {"mask": torch.randperm(patches, generator=generator) < masked}

    def sizes(self, request: DatasetRequest, steps: int) -> BatchSizes | None:
        """Return the requests of all ``pairs``; the pair of a batch depends only on the seed, the
        epoch and the batch."""
        if not self.pairs:
            return None

        def number(epoch: int, batch: int, _batches_per_epoch: int) -> int:
            return random.Random(f"{request.seed} crop sizes {epoch} {batch}").randrange(count)

        count = len(self.pairs)
        return BatchSizes(self.requests(request), number)

    def pictures(self, request: DatasetRequest, numbers: Sequence[int]) -> list[Pictures]:
        """Return the global crops, the first with its masked patches in gray, and the local crops;
        of several ``pairs`` of sizes those of the request's."""
        (batch,) = draw_samples(replace(request, view=replace(self, pairs=())), numbers)
        first, second = (batch["global_crops"] / _WHITE).unbind(1)
        none, mask = [""] * len(numbers), batch["mask"].float()
        shares = [f"{100 * share:.0f} % masked" for share in mask.mean(1).tolist()]
        patch = [side // count for side, count in zip(request.size, self.grid, strict=True)]
        gray = (_MASKED * mask).view(-1, 1, *self.grid)
        gray = gray.repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)
        local_crops = batch["local_crops"].unbind(1) if "local_crops" in batch else ()
        return [
            Pictures("global, masked", torch.lerp(first, torch.tensor(0.5), gray), shares),
            Pictures("global", second, none),
            *(Pictures(f"local {n}", x / _WHITE, none) for n, x in enumerate(local_crops, 1)),
        ]

    def requests(self, request: DatasetRequest) -> list[DatasetRequest]:
        """Return the request of each of ``pairs``."""
        height, width = (side // n for side, n in zip(request.size, self.grid, strict=True))
        requests = []
        for side, local in self.pairs:
            grid, local_size = (side // height, side // width), (local, local)
            view = replace(self, local_size=local_size, grid=grid, pairs=())
            requests.append(replace(request, size=(side, side), view=view))
        return requests


def max_masked(grid: tuple[int, int], ratio: tuple[float, float]) -> int:
    """Return the maximum number of patches that ``block_mask`` masks in one image."""
    return max(1, math.floor(ratio[1] * math.prod(grid)))


class MultiCrop:
    """Creates the crops of an image, each a random resized crop with random flip and distortion,
    and the mask of the first global crop. Separate crops for the Gram teacher are the global crops
    at higher resolution."""

    def __init__(self, config: DataConfig, shape: tuple[int, ...], view: CropView) -> None:
        """``shape``: channels, height and width of a global crop."""
        self._view, self._size, self._gray = view, shape[1:], shape[0] == 1
        self._modes, self._ratio = training_modes(config), config.ratio
        self._hflip = config.hflip
        self._wanted = [(view.global_scale, self._size), (view.global_scale, self._size)]
        self._wanted += [(view.local_scale, view.local_size)] * view.local_number

    def __call__(self, image: OpenImage) -> Batch:
        view = self._view
        kinds = [FIRST, SECOND] if torch.rand(()).item() < 0.5 else [SECOND, FIRST]
        kinds += [LOCAL] * view.local_number
        parts = [(random_box(image.size, scale, self._ratio), size) for scale, size in self._wanted]
        count, gram_count = len(parts), GLOBALS if view.has_gram_crops else 0
        parts += [(box, view.of_gram(self._size)) for box, _ in parts[:gram_count]]
        resized = resized_parts(image, parts, self._modes)
        drawn = [(torch.rand(()).item() < self._hflip, draw_distortion(kind)) for kind in kinds]
        drawn += [
            (flips, replace(distortion, scale=view.gram_factor))
            for flips, distortion in drawn[:gram_count]
        ]
        crops = []
        for crop, (flips, distortion) in zip(resized, drawn, strict=True):
            crop = crop.flip(-1) if flips else crop
            crop = grayscale(crop) if self._gray else crop
            crops.append(distort(crop, distortion))
        fields = {"global_crops": torch.stack(crops[:GLOBALS])}
        if gram_count:
            fields["gram_crops"] = torch.stack(crops[count:])
        if view.local_number:
            fields["local_crops"] = torch.stack(crops[GLOBALS:count])
        return fields | {"mask": block_mask(view.grid, view.mask_ratio)}


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
