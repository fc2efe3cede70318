"""Masked autoencoding (MAE, arXiv 2111.06377): the loss of reconstructed pixels, and the masks.

Which patches of an image are masked follows from the seed, the step and the image's place in the
global batch, computed on the devices: so all numbers and kinds of devices mask alike, and so does a
resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from data.loader import PADDING
from models.mae import MaeSpec, images_of, patches_of
from training.backend import Backend
from training.evaluation.evaluate import Measure
from training.logs.records import Evaluation, side_by_side, spread
from training.objectives.objective import Objective, normalizer
from training.optimizers import hashed, key_of

if TYPE_CHECKING:
    from training.resolve import Run

_EPS = 1e-6
"""Added to a patch's variance, as in the authors' code."""
_PICTURES = 8
_MOST_PIXELS = 2_000_000
"""Values of all images that are shown, at most: they are read from the devices."""


class Prediction(NamedTuple):
    """What a model predicts of images: (images, patches, values of a patch), fp32."""

    predicted: torch.Tensor
    """Normalized by the patch, with ``--norm_pix_loss``."""
    patches: torch.Tensor
    """The images themselves, normalized for the model."""
    mean: torch.Tensor
    deviation: torch.Tensor
    """By which a patch is normalized: (images, patches, 1)."""
    hidden: torch.Tensor
    """Which patches the encoder does not see: (images, patches), boolean."""

    def errors(self) -> torch.Tensor:
        """Return each image's mean squared error over its hidden patches, (images,)."""
        targets = (self.patches - self.mean) / self.deviation
        of_patches = (self.predicted - targets).square().mean(-1)
        return (of_patches * self.hidden).sum(1) / self.hidden.sum(1)


class Reconstruction(Objective):
    """Learns to predict the pixels of patches that the encoder does not see."""

    numbered = True

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        spec = run.model
        assert isinstance(spec, MaeSpec)
        self._run, self._backend, self._spec = run, backend, spec
        self._normalize = normalizer(run, backend.constant)
        names = spec.meta.state_dict().keys()  # without those of the encoder's head
        of_encoder = spec.encoder.meta.named_parameters()
        encoder = sum(each.numel() for name, each in of_encoder if name in names)
        say(
            f"objective: mae, {spec.shown} of {spec.sizes.num_patches} patches seen, encoder of "
            f"{encoder:,} parameters"
        )

    def loss(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, pass_index: int
    ) -> torch.Tensor:
        # The passes of a step mask as one pass over all of its images would.
        step = pass_index // self._run.config.data.grad_accum_steps
        return self.predict(model, images, labels, "step", step).errors().mean()

    def predict(
        self, model: nn.Module, images: torch.Tensor, numbers: torch.Tensor, *draw: object
    ) -> Prediction:
        """Show the model a part of images; ``numbers`` and ``draw`` decide which."""
        key = key_of(self._run.config.seed, "mask", *draw)
        # One number, and yet no scalar: equal scalars would be one input of a compiled step.
        keys = self._backend.constant(torch.tensor([key], dtype=torch.int32))
        ranks = ranks_of(numbers, keys, self._spec.sizes.num_patches)
        images = self._normalize(images)
        patches = patches_of(images, self._spec.patch_size)
        mean, deviation = torch.zeros_like(patches[..., :1]), torch.ones_like(patches[..., :1])
        if self._run.config.objective.norm_pix_loss:
            mean = patches.mean(-1, keepdim=True)
            deviation = (patches.var(-1, keepdim=True) + _EPS).sqrt()
        predicted = model(images, ranks).float()
        return Prediction(predicted, patches, mean, deviation, ranks >= self._spec.shown)

    def measure(self, images: int) -> Measure:
        return ReconstructionError(self, self._run, self._backend, images)


# -- Masks -----------------------------------------------------------------------------------------


def ranks_of(numbers: torch.Tensor, key: torch.Tensor, patches: int) -> torch.Tensor:
    """Return the place of each patch in a random order of its image's patches, (images, patches).

    ``numbers``: of the images, (images,); ``key``: (1,), int32. The order is by a hash of the
    patch's number, which differs for different numbers, so that no two patches share a place. A
    patch's place is how many have smaller hashes: without sorting, each image on its own device.
    """
    of_images = hashed(numbers.to(torch.int32) + hashed(key))
    places = torch.arange(patches, dtype=torch.int32, device=numbers.device)
    hashes = hashed(of_images[:, None] + places)
    return (hashes[:, :, None] > hashes[:, None, :]).sum(-1, dtype=torch.int32)


# -- Evaluation ------------------------------------------------------------------------------------


class ReconstructionError(Measure):
    """Adds up the loss of validation images, masked alike in every evaluation; and pictures."""

    numbered = True

    def __init__(self, objective: Reconstruction, run: Run, backend: Backend, images: int) -> None:
        """``images``: how many are evaluated."""
        self._objective, self._run, self._backend = objective, run, backend
        self._totals = np.zeros(2)  # loss, images
        self._size, self._batches = run.config.data.pass_size, 0
        self._last = (images - 1) // self._size
        sizes = run.model.sizes
        pixels = math.prod(sizes.input_shape)
        shown = spread(min(_PICTURES, max(1, _MOST_PIXELS // pixels)), images)
        self._batches_shown = {number // self._size for number in shown}
        self._shown = backend.constant(torch.tensor(shown))
        """The numbers of the images of which there are pictures."""
        self._pictures = backend.constant(torch.zeros(len(shown), 2 * pixels + sizes.num_patches))
        self._read: list[float] = []

    def of_batch(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        found = self._objective.predict(model, images, labels, "validation")
        present = labels != PADDING
        loss = (found.errors() * present).sum()
        values = {"totals": self._backend.sum(torch.stack([loss, present.sum().float()]))}

        # The images may be on any device: a product with ones and zeros, and a sum over all, bring
        # them to each. Where it is compiled of all batches, so that these are one program.
        if self._backend.compiles or self._batches in self._batches_shown:
            chosen = (self._shown[:, None] == labels).float()
            hidden = found.hidden[..., None]
            predicted = found.predicted * found.deviation + found.mean
            parts = [found.patches, torch.where(hidden, predicted, found.patches), hidden]
            of_batch = self._backend.sum(chosen @ torch.cat(parts, dim=-1).flatten(1))
            self._pictures = self._pictures + of_batch
        if self._batches == self._last:
            values["pictures"] = self._pictures
        self._batches += 1
        return values

    def add(self, values: Mapping[str, list[float]]) -> None:
        self._totals += values["totals"]
        self._read = values.get("pictures", self._read)

    def result(self) -> Evaluation:
        loss, images = self._totals.tolist()
        pictures = None
        if self._read:
            pictures = _drawn(self._run, torch.tensor(self._read), len(self._shown))
        return Evaluation(loss / (images or float("nan")), images=int(images), pictures=pictures)


def _drawn(run: Run, values: torch.Tensor, images: int) -> np.ndarray | None:
    """Return one picture (height, width, 3), uint8: a row for each image, with the image, what is
    seen of it, and the reconstruction. None for images that have neither one channel nor three, and
    if none can be read."""
    spec = run.model
    assert isinstance(spec, MaeSpec)
    channels = spec.sizes.input_shape[0]
    if channels not in (1, 3):
        return None
    values = values.view(images, spec.sizes.num_patches, -1)
    values = values[values[..., -1].any(dim=1)]  # nothing is hidden of an image that is not there
    if not len(values):
        return None
    hidden = values[..., -1:] > 0
    originals, painted = values[..., :-1].chunk(2, dim=-1)
    colours = run.config.data.preprocessing.of_channels(channels)
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in colours)
    rows, columns = spec.sizes.grid

    def pixels(patches: torch.Tensor) -> torch.Tensor:
        found = images_of(patches, spec.patch_size, (rows, columns)) * std + mean
        return found.clamp(0, 1).expand(-1, 3, -1, -1)

    of_pixels = hidden.float().expand_as(originals)
    mask = images_of(of_pixels, spec.patch_size, (rows, columns))[:, :1] > 0
    whole, reconstructed = pixels(originals), pixels(painted)
    shown = (whole, torch.where(mask, 0.5, whole), reconstructed)
    return side_by_side([each.numpy() for each in shown])
