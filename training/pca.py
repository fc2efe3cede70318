"""A picture of patch features: their first three principal components as red, green and blue.

As figure 1 of DINOv2 (arXiv 2304.07193), but without removing the background: patches that a model
takes for similar have similar colors, in all images of the picture.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from data.loader import PADDING
from data.source import Split
from training.logs.records import side_by_side

IMAGES = 8


def draw(
    images: Split, numbers: list[int], patches: torch.Tensor, grid: tuple[int, ...]
) -> np.ndarray | None:
    """Return the picture of the images of these numbers: a row for each that can be read, with the
    image and the colors of its patches; (height, width, 3), uint8. None if none can be read.

    ``patches``: their features, (images, patches, width); ``grid``: rows and columns of patches.
    """
    loaded = [images[0, number] for number in numbers]
    there = [place for place, (_, label, _) in enumerate(loaded) if label != PADDING]
    if not there:
        return None
    pixels = torch.stack([loaded[place][0].expand(3, -1, -1) for place in there]) / 255
    colors = components(patches[there]).unflatten(1, grid).permute(0, 3, 1, 2)
    return side_by_side([pixels.numpy(), F.interpolate(colors, pixels.shape[2:]).numpy()])


def components(features: torch.Tensor) -> torch.Tensor:
    """Return the first three principal components of features, (images, patches, width), over all
    patches of all images, each from 0 to 1: (images, patches, 3), fp32.

    The largest weight of each component is positive. One that is the same everywhere is 0.
    """
    rows = features.flatten(0, 1).double()
    rows = rows - rows.mean(dim=0)
    _, directions = torch.linalg.eigh(rows.T @ rows)  # in ascending order
    directions = directions[:, -3:].flip(1)
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    values = rows @ (directions * largest.sign())
    low, high = values.amin(dim=0), values.amax(dim=0)
    extent = high - low
    extent = extent.clamp(min=max(1e-6 * extent.max().item(), 1e-30))  # less is rounding
    values = (values - low) / extent
    return F.pad(values, (0, 3 - values.shape[1])).float().view(*features.shape[:2], 3)
