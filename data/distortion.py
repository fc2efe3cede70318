"""Colors and sharpness of DINO's crops: torchvision's operations, of the same numbers, but faster.

Each crop's colors are jittered, it is made gray, blurred and solarized, each with a probability of
its own (DINOv2, https://arxiv.org/abs/2304.07193; the numbers are those of its code,
dinov2/data/augmentations.py). What is drawn is a ``Distortion``; ``distort`` computes it. Values
stay fp32, from 0 to 255, until the end: they differ from torchvision's operations on fp32 images by
the rounding to a byte, at most 0.5 of 255, or 1 at the threshold of solarizing.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

_WHITE = 255
_LUMA = torch.tensor((0.2989, 0.587, 0.114))
"""The weights of red, green and blue in a gray value: torchvision's."""
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = 0.4, 0.4, 0.2, 0.1
"""The largest relative change of each; of the hue, the largest part of the color circle."""
_JITTERED, _GRAY = 0.8, 0.2
"""The probabilities that the colors of a crop are jittered, and that it is gray."""
_RADIUS, _SIGMAS = 4, (0.1, 2.0)
"""Of the blur, in pixels: it has 2 * 4 + 1 weights."""
_LEAST_WEIGHT = 1e-4
"""Smaller weights of the blur are left out: those of a side change a value by less than 0.05."""


@dataclass(frozen=True)
class Kind:
    """How often a kind of crop is blurred and solarized."""

    blurred: float
    solarized: float = 0.0


FIRST, SECOND, LOCAL = Kind(1.0), Kind(0.1, 0.2), Kind(0.5)
"""The kinds of DINO's crops: one global crop of an image is the first kind, one the second."""


@dataclass(frozen=True)
class Distortion:
    """What was drawn for one crop."""

    jitter: tuple[tuple[str, float], ...]
    """The names of the operations on the colors, in order, each with its factor, of the hue with
    its shift (a part of the color circle)."""
    gray: bool
    sigma: float | None
    """Standard deviation of the blur in pixels; None: no blur."""
    solarized: bool


def draw_distortion(kind: Kind) -> Distortion:
    """Draw what to do with a crop of this kind, from the same distributions as torchvision."""
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


def distort(image: torch.Tensor, how: Distortion) -> torch.Tensor:
    """Return the distorted image, (channels, height, width) uint8.

    Of an image with one channel saturation and hue stay as they are.
    """
    colors = len(image) == len(_LUMA)
    if how.jitter or (colors and how.gray) or how.sigma is not None:
        values = image.to(torch.float32, memory_format=torch.contiguous_format)
        for name, factor in how.jitter:
            if name == "brightness":
                values = values.mul_(factor).clamp_(0, _WHITE)
            elif name == "contrast":
                mean = _gray(values.mean((1, 2), keepdim=True)).item()
                values = values.mul_(factor).add_(mean * (1 - factor)).clamp_(0, _WHITE)
            elif name == "saturation" and colors:
                values = torch.lerp(_gray(values), values, factor).clamp_(0, _WHITE)
            elif name == "hue" and colors:
                values = shift_hue(values, factor)
        if colors and how.gray:
            values = _gray(values)
        if how.sigma is not None:
            values = blur(values, how.sigma)
        # NumPy makes bytes of fp32 in a sixth of PyTorch's time.
        made = torch.from_numpy(values.add_(0.5).numpy().astype(np.uint8))
        image = made.expand_as(image)
    # A byte is below 128 if it is less than 255 minus itself.
    return torch.minimum(image, image.bitwise_not()) if how.solarized else image


def _gray(values: torch.Tensor) -> torch.Tensor:
    """Return the gray values (1, height, width) of an image, fp32; of gray ones, themselves."""
    if len(values) == 1:
        return values
    return (_LUMA @ values.flatten(1)).view(1, *values.shape[1:])


def shift_hue(values: torch.Tensor, shift: float) -> torch.Tensor:
    """Return RGB values (3, height, width) with the hue moved by ``shift`` of the color circle, at
    most a sixth. Brightest and darkest value of each pixel stay: saturation and value of HSV.

    Each channel is a trapezoid over the hue h, counted in sixths of the circle from the channel's
    own hue: with the smallest value m and chroma C, red = m + C clamp(2 - abs(h), 0, 1). The other
    two channels say what h is: C abs(h) = C + (green - m) + (blue - m) - (red - m), and its sign is
    that of green - blue. So there is no division, no remainder, and no case by the largest channel.
    """
    darkest, brightest = values.amin(0, keepdim=True), values.amax(0, keepdim=True)
    chroma = brightest - darkest
    total = values.sum(0, keepdim=True).add_(chroma).sub_(darkest)
    around = torch.cat([values, values[:2]])
    hues = torch.sub(total, values, alpha=2).copysign_(around[1:4] - around[2:5])
    away = hues.add_(chroma, alpha=6 * shift).abs_()
    return torch.sub(brightest + chroma, away).clamp_(darkest, brightest)


def blur(values: torch.Tensor, sigma: float) -> torch.Tensor:
    """Return the values (channels, height, width) after a Gaussian blur of 9 x 9 weights.

    The image is reflected beyond its edges. One with a side below 5 pixels has fewer weights.

    A weight at a time, and its mirrored one, along each direction: several times as fast as
    PyTorch's convolution of so few channels.
    """
    radius = min(_RADIUS, *(side - 1 for side in values.shape[1:]))
    weights = [math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(radius + 1)]
    whole = 2 * sum(weights) - weights[0]
    weights = [each / whole for each in weights if each / whole > _LEAST_WEIGHT]
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
