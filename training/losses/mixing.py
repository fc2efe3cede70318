"""Mixes the images of a batch with each other, and their labels, on the devices: timm's ``Mixup``.

An image is mixed with another one on the same device, as each process of timm's does: the first
with the last, the second with the last but one. So nothing has to be sent between devices. How much
of which, all images of a pass have in common. These few numbers come from the host; shapes and
operations are always the same, whether it is mixup, cutmix or neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from timm.data.mixup import cutmix_bbox_and_lam

from data.image.global_random import drawn_from
from training.backend import pass_seed
from training.options.loss_config import LossConfig

if TYPE_CHECKING:
    from training.options.resolve import Run

_STREAM = -1  # no process draws dropout from it


class Mix(NamedTuple):
    """The numbers of one pass: what stays of an image, outside of a box that is another's."""

    share: float
    """Of each image in what it becomes, outside of the box."""
    label: float
    """Of each image's label in what it becomes."""
    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0
    """The box: rows from ``top`` to before ``bottom``, columns likewise; empty for mixup."""


def draw_mix(config: LossConfig, height: int, width: int) -> Mix:
    """Return numbers drawn from NumPy's global generator, as timm's ``Mixup`` draws them.

    These are those of its mode "batch", for images of ``height`` x ``width`` pixels.
    """
    if np.random.rand() >= config.mixup_prob:
        return Mix(1.0, 1.0)
    by_cutmix = config.cuts and (
        config.mixup == 0 or bool(np.random.rand() < config.mixup_switch_prob)
    )
    if not by_cutmix:
        share = float(np.random.beta(config.mixup, config.mixup))
        return Mix(share, share)
    alpha = config.cutmix or 1.0  # 1 is timm's for boxes of --cutmix_minmax
    share = float(np.random.beta(alpha, alpha))
    if share == 1:
        return Mix(1.0, 1.0)
    box, label = cutmix_bbox_and_lam((height, width), share, ratio_minmax=config.cutmix_minmax)
    top, bottom, left, right = map(int, box)
    return Mix(1.0, float(label), top, bottom, left, right)


class Mixing:
    """Draws how the images of each pass are mixed, and mixes them."""

    def __init__(
        self, run: Run, constant: Callable[[torch.Tensor], torch.Tensor], rows: range
    ) -> None:
        """Take what puts small tensors on the devices, and the rows of images that are there, as a
        backend has both."""
        self._config, self._seed = run.config.loss, run.config.seed
        self._constant, self._rows = constant, rows
        self._spatial = run.model.sizes.input_shape[1:]
        self._of_device = run.images_a_pass // run.mesh.batch_parts

    def draw(self, pass_index: int) -> torch.Tensor:
        """Return the numbers of a ``Mix``, on the devices; they follow from the seed and the number
        of the pass since the start of training."""
        with drawn_from(pass_seed(self._seed, pass_index, _STREAM) % 2**32):
            mix = draw_mix(self._config, *self._spatial[-2:])
        # One tensor: one transfer, and no number that a graph would be compiled for.
        return self._constant(torch.tensor(mix, dtype=torch.float32))

    def images(self, images: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """Return mixed images, (images, channels, rows, columns), fp32; of volumes (images,
        channels, slices, rows, columns)."""
        share, _, *box = mix.unbind()
        if self._config.cuts:
            share = share * ~self._inside(images, *box)
        return images * share + self._partners(images) * (1 - share)

    def labels(self, labels: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """Return mixed labels, (images, classes)."""
        return labels * mix[1] + self._partners(labels) * (1 - mix[1])

    def _inside(
        self,
        images: torch.Tensor,
        top: torch.Tensor,
        bottom: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
    ) -> torch.Tensor:
        """Return which pixels are in the box, (rows, columns), of the rows that are here."""
        height, width = images.shape[-2:]
        first = self._rows.start if height < self._spatial[0] else 0
        rows = torch.arange(first, first + height, device=images.device)
        columns = torch.arange(width, device=images.device)
        is_row, is_column = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
        return is_row[:, None] & is_column

    def _partners(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each is mixed with. In the one tensor that SPMD has, a device's images are
        next to each other: seen as (devices, images of each), nothing moves between devices."""
        return x.unflatten(0, (-1, self._of_device)).flip(1).flatten(0, 1)
