"""How images of more than 8 bits become bytes: ``--intensity``.

``RawImage`` holds what is in such a file. ``Intensity`` maps its values to 0 to 255. ``measure``
looks at a sample of the images: for "auto" it chooses the range, and it finds images of which
nothing is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from data.files import BrokenImageError

Range = tuple[float, float]
"""The values that become 0 and 255; those outside are clipped."""

AUTO_PERCENTILES = (0.5, 99.5)
"""The percentiles of the sampled values that "auto" chooses as range."""
SAMPLED_PIXELS = 2**16
"""Of each image."""
COLORS = (1, 3)
"""Numbers of bands of a gray or color image, which share one range."""
_WHITE = 255


@dataclass(frozen=True)
class RawImage:
    """An image as a file stores it, before its values become bytes."""

    values: np.ndarray
    """(height, width, bands), integers or floats; uint8 is left as it is, unless there is a
    ``window``."""
    full: Range | None
    """The smallest and largest value that the file could hold; None for floats."""
    window: Range | None = None
    """The range that the file itself says is to be shown."""
    is_inverted: bool = False
    """Whether small values are bright (DICOM's MONOCHROME1)."""

    @property
    def is_color(self) -> bool:
        """Whether its bands are those of a gray or color image."""
        return self.values.shape[2] in COLORS

    @property
    def finite(self) -> np.ndarray:
        """Its pixels without NaN and infinity, (n, bands)."""
        pixels = self.values.reshape(-1, self.values.shape[2])
        return pixels[np.isfinite(pixels).all(axis=1)]

    def sample(self) -> RawImage:
        """Return the same image with at most some SAMPLED_PIXELS, regularly spaced, in one row."""
        pixels = self.finite
        return replace(self, values=pixels[:: max(1, len(pixels) // SAMPLED_PIXELS)][None].copy())


@dataclass(frozen=True)
class Intensity:
    """A value of ``--intensity``."""

    kind: Literal["auto", "full", "range", "percentiles"]
    numbers: tuple[float, ...] = ()
    """For "range", and "auto" once it is decided: low and high, or those of each band; percentiles
    otherwise."""

    @classmethod
    def parse(cls, given: str | Sequence[str]) -> Intensity:
        """Return what the words of the flag mean. Raises ValueError for words that do not belong
        together."""
        words = [given] if isinstance(given, str) else list(given)
        if words == ["full"]:
            return cls("full")
        kind: Literal["auto", "range", "percentiles"] = "range"
        if words[:1] == ["auto"]:
            kind, words = "auto", words[1:]
        elif all(word.endswith("%") for word in words):
            kind = "percentiles"
        try:
            numbers = tuple(float(word.removesuffix("%" * (kind != "range"))) for word in words)
        except ValueError:
            numbers = ()
        is_pair = len(numbers) == 2 or (kind != "percentiles" and len(numbers) % 2 == 0)
        if not (numbers and is_pair) and (kind != "auto" or words):
            raise ValueError("it takes auto, full, LOW HIGH (of each band) or two percentiles")
        for low, high in zip(numbers[::2], numbers[1::2], strict=True):
            if low >= high:
                raise ValueError(f"the first number, {low:g}, must be below the second, {high:g}")
        return cls(kind, numbers)

    def check_bands(self, channels: int) -> None:
        """Raise ValueError if there is neither one range nor one for each channel of the model."""
        pairs = len(self.numbers) // 2
        if pairs > 1 and pairs != channels:
            raise ValueError(f"it has {pairs} ranges, but --in_chans is {channels}")

    def to_bytes(self, raw: RawImage) -> np.ndarray:
        """Return the image as uint8, of the same shape. NaN becomes 0. Raises BrokenImageError if
        the range is unknown."""
        values = raw.values
        is_plain = values.dtype == np.uint8 and not (self.kind == "auto" and raw.window)
        if not is_plain:
            bands = values.shape[2]
            ranges = self._ranges(raw)
            if len(ranges) == 1:
                values = _scaled(values, *ranges[0])
            elif len(ranges) == bands:
                each = [_scaled(values[..., n], *ranges[n]) for n in range(bands)]
                values = np.stack(each, axis=-1)
            else:
                raise BrokenImageError(f"it has {bands} bands, --intensity {len(ranges)} ranges")
        return _WHITE - values if raw.is_inverted else values

    def _ranges(self, raw: RawImage) -> list[Range]:
        """Return the range of all bands, or that of each."""
        if self.kind == "full":
            if raw.full is None:
                raise BrokenImageError(
                    "its values are floats, which have no full range: set --intensity LOW HIGH"
                )
            return [raw.full]
        if self.kind == "percentiles":
            ranges = percentiles(raw.finite, self.numbers, joint=raw.is_color)
            for low, high in ranges:
                if not low < high:
                    raise BrokenImageError(
                        f"these percentiles of its values are both {low:g}: set --intensity to "
                        "LOW HIGH"
                    )
            return ranges
        if self.kind == "auto" and raw.window:
            return [raw.window]
        if not self.numbers:
            raise BrokenImageError(
                "it has more than 8 bits per value, but none of the sampled images has: set "
                "--intensity full or LOW HIGH"
            )
        return list(zip(self.numbers[::2], self.numbers[1::2], strict=True))


FULL = Intensity("full")


def is_intensity(value: object) -> bool:
    """Return whether a value from a file is one of ``--intensity``."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return False
    try:
        Intensity.parse(words)
    except ValueError:
        return False
    return True


def percentiles(values: np.ndarray, two: Sequence[float], *, joint: bool) -> list[Range]:
    """Return two percentiles of (n, bands) values: of each band, or with ``joint`` of all."""
    if not len(values):
        raise BrokenImageError("all its values are NaN or infinite")
    columns = [values.reshape(-1)] if joint else list(values.T)
    return [(float(low), float(high)) for low, high in (np.percentile(x, two) for x in columns)]


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return values from ``low`` to ``high`` as 0 to 255, rounded and clipped."""
    # 16 bits fit fp32 exactly; larger integers and floats may not.
    kind: Any = (
        np.float32 if values.dtype.kind in "bui" and values.dtype.itemsize <= 2 else np.float64
    )
    if values.dtype.kind in "iu" and values.dtype.itemsize == 2 and values.size > 2**16:
        # Several times as fast as arithmetic.
        native = values.astype(values.dtype.newbyteorder("="), copy=False)
        table = _scaled(np.arange(2**16, dtype=np.uint16).view(native.dtype), low, high)
        return table[native.view(np.uint16)]
    if not low < high:  # the window of a step
        return np.where(values > low, np.uint8(_WHITE), np.uint8(0))
    scaled = np.rint((values.astype(kind) - kind(low)) * kind(_WHITE / (high - low)))
    return np.nan_to_num(scaled, posinf=_WHITE, neginf=0).clip(0, _WHITE).astype(np.uint8)


# -- a sample of the images ------------------------------------------------------------

_LOOKED_AT, _MEASURED = 32, 256
"""How many images are read to see whether there are more than 8 bits, and then for their values."""
_LEAST_USED = 1 / 8
"""The least share of 0 to 255 that is used without a warning."""


@dataclass(frozen=True)
class MeasuredIntensity:
    """What a sample of the images says of ``--intensity``."""

    words: tuple[str, ...] | None = None
    """The flag's value with the range that was chosen; None: unchanged."""
    remark: str = ""
    """What a log says of it."""


def measure(
    numbers: int, seed: int, intensity: Intensity, read: Callable[[list[int]], list[RawImage]]
) -> MeasuredIntensity:
    """Choose the range for "auto", and check how much of 0 to 255 is used.

    ``numbers``: how many images there are. ``read`` returns ``RawImage.sample`` of those of the
    given ones that are readable and have more than 8 bits. The sample depends only on the number of
    images and the seed. Raises ValueError if all values are the same.
    """
    order = np.arange(numbers)
    if numbers > _MEASURED:
        order = np.unique(np.random.default_rng(seed).integers(numbers, size=_MEASURED))
    np.random.default_rng((seed, 1)).shuffle(order)
    raws = read(sorted(order[:_LOOKED_AT].tolist()))
    if not raws:
        return MeasuredIntensity()
    raws += read(sorted(order[_LOOKED_AT:].tolist()))
    count = f"{len(raws):,} sampled images of more than 8 bits"
    samples = [raw.finite for raw in raws]
    extremes = [(each.min(), each.max()) for each in samples if len(each)]
    if not extremes or min(low for low, _ in extremes) == max(high for _, high in extremes):
        value = f"the single value {extremes[0][0]:g}" if extremes else "no finite value"
        raise ValueError(f"all {count} have {value}: export them again")

    words, remark = None, ""
    if intensity.kind == "auto" and not intensity.numbers:
        # Images with a window of their own may have other units.
        rest = [
            values.reshape(-1, 1) if raw.is_color else values
            for raw, values in zip(raws, samples, strict=True)
            if not raw.window
        ]
        if len({values.shape[1] for values in rest}) == 1:
            ranges = _chosen(np.concatenate(rest))
            intensity = Intensity("auto", tuple(number for pair in ranges for number in pair))
            words = ("auto", *(f"{number:.10g}" for number in intensity.numbers))
            shown = ", ".join(f"{low:,g} to {high:,g}" for low, high in ranges)
            remark = f"; --intensity auto: {shown} become 0 to 255 (from {len(rest):,} images)"
        if len(rest) < len(raws):
            remark += f"; --intensity auto: {len(raws) - len(rest):,} of {count} have a window"
    used = []
    for raw in raws:
        try:
            used.append(intensity.to_bytes(raw).reshape(-1))
        except BrokenImageError:  # training says so when it reads it
            continue
    if used:
        low, high = np.percentile(np.concatenate(used), (0.5, 99.5))
        if (high - low) / _WHITE < _LEAST_USED:
            remark += (
                f"; warning: in {count}, 99 % of the values become {low:.0f} to {high:.0f} of 255: "
                "set --intensity auto or LOW HIGH (docs/intensity.md)"
            )
    return MeasuredIntensity(words, remark)


def _chosen(values: np.ndarray) -> list[Range]:
    """Return the range of each band of (n, bands) values: ``AUTO_PERCENTILES``, rounded outwards
    for integers; if they are equal, as for rare spots, the smallest and largest value."""
    ranges = []
    of_most = percentiles(values, AUTO_PERCENTILES, joint=False)
    of_all = percentiles(values, (0, 100), joint=False)
    for (low, high), most in zip(of_most, of_all, strict=True):
        low, high = (low, high) if low < high else most
        if not low < high:
            raise ValueError(f"a band of the sampled images has the single value {low:g}")
        if values.dtype.kind in "bui":
            low, high = math.floor(low), math.ceil(high)
        else:  # as the stored words have them
            low, high = float(f"{low:.6g}"), float(f"{high:.6g}")
        ranges.append((low, high))
    return ranges
