"""Preprocessing as transformers saves it next to weights, in ``preprocessor_config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from training.weights.sidecar import Sidecar


class Processing(NamedTuple):
    """What an image processor does."""

    size: tuple[int, int]
    """The height and width of the images that it makes."""
    values: dict[str, Any]
    """The preprocessing by timm's names."""


_ON = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_OF_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_CROP = {"do_center_crop": True, "crop_size": 224, "resample": 3}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {**_ON, **_HALF, "size": {"height": 224, "width": 224}, "resample": 2},
    "DeiT": {**_ON, **_HALF, **_CROP, "size": {"height": 256, "width": 256}},
    "Bit": {**_ON, **_OF_CLIP, **_CROP, "size": {"shortest_edge": 224}},
    "CLIP": {**_ON, **_OF_CLIP, **_CROP, "size": {"shortest_edge": 224}},
    "Siglip": {**_ON, **_HALF, "size": {"height": 224, "width": 224}, "resample": 3},
}
"""The values of transformers' image processors, as of 5.24, where a file leaves them out."""
_SUFFIXES = ("Pil", "Fast", "ImageProcessor", "FeatureExtractor")
"""Ends of the names of its processors' classes, the last first."""
_RESAMPLING = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))
"""Names of Pillow's filters, by the numbers that transformers writes."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_pad": (None, False),
    "do_flip_channel_order": (None, False),
    "do_color_quantize": (None, False),
    "do_grayscale": (None, False),
    "rescale_offset": (None, False),
    "crop_pct": (None,),
}
"""Keys that change the images, with the values that have a meaning here."""
_SWITCHES = ("do_rescale", "do_normalize", "do_center_crop")


def processing_of(about: Sidecar, usual: str) -> Processing | None:
    """Return what the image processor in a file does; None without a file. ``usual``: the processor
    where the file does not name one. Raises UsageError for what no flag can do."""
    if not about.content:
        return None

    def refuse(key: str, value: Any) -> Exception:
        return about.refusal(key, value, f", which is not supported: {_REMEDY}")

    name = "image_processor_type"
    if name not in about.content:
        name = "feature_extractor_type"
    kind = about.content.get(name, usual)
    plain = str(kind)
    for suffix in _SUFFIXES:
        plain = plain.removesuffix(suffix)
    if plain not in _PROCESSORS:
        raise refuse(name, kind)
    content = {**_PROCESSORS[plain], **about.content}
    if name not in about.content and "size" in about.content:  # written by hand
        content["do_center_crop"] = about.content.get("do_center_crop", False)
    for key, allowed in _ONLY.items():
        if not any(content.get(key) is each for each in allowed):
            raise refuse(key, content.get(key))
    for key in _SWITCHES:
        if not isinstance(content.get(key, False), bool):
            raise refuse(key, content[key])
    resample = content["resample"]
    if type(resample) is not int or resample not in _RESAMPLING:
        raise refuse("resample", resample)

    # Pixels from 0 to 255 times the factor, minus the mean, divided by the deviation: --mean and
    # --std are for pixels from 0 to 1.
    factor = content["rescale_factor"] if content["do_rescale"] else 1
    if not _is_number(factor) or factor <= 0:
        raise refuse("rescale_factor", factor)
    scale = 1.0 if math.isclose(255 * factor, 1) else 255 * factor
    normalizes = content["do_normalize"]
    values: dict[str, Any] = {}
    for key, ours, unchanged in (("image_mean", "mean", 0), ("image_std", "std", 1)):
        each = content[key] if normalizes else unchanged
        numbers = list(each) if isinstance(each, list | tuple) else [each] * 3
        if len(numbers) != 3 or not all(map(_is_number, numbers)):
            raise refuse(key, each)
        values[ours] = [number / scale for number in numbers]

    # Sizes: each side separately, or the shorter side.
    size, crop = content["size"], content.get("crop_size")
    default_to_shorter = "shortest_edge" in _PROCESSORS[plain]["size"]
    if isinstance(size, Mapping) and {*size} == {"shortest_edge"}:
        sides, crop_mode = _sides(size["shortest_edge"]), "center"
    else:
        is_one = isinstance(size, int)
        sides, crop_mode = _sides(size), "center" if is_one and default_to_shorter else "squash"
    if sides is None:
        raise refuse("size", size)
    made, crop_pct = sides, 1.0
    if content.get("do_center_crop"):
        cropped = _sides(crop)
        if cropped is None or cropped[0] != cropped[1] or cropped[0] > min(sides):
            raise refuse("crop_size", crop)
        if sides[0] != sides[1]:
            raise refuse("size", size)
        made, crop_pct = cropped, _crop_pct(cropped[0], sides[0])
    elif crop_mode == "center":  # images of any aspect ratio
        raise refuse("size", size)
    values |= {"interpolation": _RESAMPLING[resample], "crop_pct": crop_pct, "crop_mode": crop_mode}
    return Processing(made, values)


_REMEDY = "remove the file and set --mean, --std, --crop_pct, --crop_mode and --interpolation"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _sides(size: Any) -> tuple[int, int] | None:
    """Return height and width of a size as transformers writes it; None if it is no size."""
    if isinstance(size, Mapping):
        if not {"height"} <= {*size} <= {"height", "width"}:
            return None
        sides = size["height"], size.get("width", size["height"])
    else:
        sides = size, size
    return sides if all(type(side) is int and side > 0 for side in sides) else None


def _crop_pct(side: int, resized: int) -> float:
    """Return the fraction with which timm resizes to ``resized``, rounded down, before it crops."""
    fraction = side / resized
    while math.floor(side / fraction) < resized:
        fraction = math.nextafter(fraction, 0)
    return fraction
