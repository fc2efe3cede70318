"""Masked autoencoding (MAE, arXiv 2111.06377): the loss of reconstructed pixels, and the masks.

The mask of an image is computed on the devices from the seed, the step and the image's position in
the global batch, so it is the same for any number and kind of devices, and in a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from data.batch import PADDING, Batch
from features.mae.config import MaeConfig
from features.mae.model import MaeSpec, images_of, patches_of
from training.backend import Backend
from training.data import normalizer
from training.logs.figures import side_by_side, spread
from training.logs.records import Evaluation
from training.objectives.base import Measure, Objective
from training.optimizers import hashed, key_of

if TYPE_CHECKING:
    from training.resolve import Run

_EPS = 1e-6
"""Added to the variance of a patch, as in the authors' code."""
_PICTURES = 8
_MOST_PIXELS = 2_000_000
"""The maximum number of values of all images in a picture, which are read from the devices."""


class Reconstruction(Objective):
    """Trains the model to predict the pixels of patches that the encoder does not see."""

    takes_positions = True

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        spec = run.model
        assert isinstance(spec, MaeSpec)
        self._run, self._backend, self._spec = run, backend, spec
        self._normalize = normalizer(run, backend.constant)
        names = spec.meta.state_dict().keys()  # without those of the encoder's head
        parameters = spec.encoder.meta.named_parameters()
        encoder = sum(parameter.numel() for name, parameter in parameters if name in names)
        say(
            f"objective: mae, {spec.shown} of {spec.sizes.num_patches} patches visible, encoder "
            f"with {encoder:,} parameters"
        )

    def mask_key(self, *draw: object) -> torch.Tensor:
        """Return the key of the masks of this ``draw``, (1,) int32, on the host."""
        # A vector, not a scalar: equal scalars would become one input of a compiled step.
        key = key_of(self._run.config.seed, "mask", *draw)
        return torch.tensor([key], dtype=torch.int32)

    def host_inputs(self, batch: Batch, micro_batch_index: int) -> Batch:
        # The passes of a step use the masks of a single pass over all its images.
        step = micro_batch_index // self._run.config.data.grad_accum_steps
        return {"mask_key": self.mask_key("step", step)}

    def loss(self, model: nn.Module, batch: Batch, micro_batch_index: int) -> torch.Tensor:
        mask_key = self.host_input("mask_key", self._backend, batch, micro_batch_index)
        return self.errors(*self.predict(model, batch["image"], batch["position"], mask_key)).mean()

    def predict(
        self, model: nn.Module, images: torch.Tensor, numbers: torch.Tensor, mask_key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the predicted and the true patches, (images, patches, values of a patch), fp32,
        and the mask of those hidden from the encoder, (images, patches), boolean, which depends on
        ``numbers`` and ``mask_key``. With ``--norm_pix_loss``, predictions are normalized per
        patch."""
        ranks = ranks_of(numbers, mask_key, self._spec.sizes.num_patches)
        images = self._normalize(images)
        patches = patches_of(images, self._spec.patch_size)
        return model(images, ranks).float(), patches, ranks >= self._spec.shown

    def scale(self, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean and standard deviation that normalize patches, (images, patches, 1)."""
        if not self._run.config.of(MaeConfig).norm_pix_loss:
            return torch.zeros_like(patches[..., :1]), torch.ones_like(patches[..., :1])
        return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + _EPS).sqrt()

    def errors(
        self, predicted: torch.Tensor, patches: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return each image's mean squared error over its hidden patches, (images,), fp32."""
        mean, deviation = self.scale(patches)
        errors = (predicted - (patches - mean) / deviation).square().mean(-1)
        return (errors * hidden).sum(1) / hidden.sum(1)

    def measure(self, images: int = 0) -> Measure:
        return ReconstructionError(self, self._run, self._backend, images)


# -- Masks -----------------------------------------------------------------------------------------


def ranks_of(numbers: torch.Tensor, key: torch.Tensor, patches: int) -> torch.Tensor:
    """Return the rank of each patch in a random order of its image's patches, (images, patches).

    ``numbers``: indices of the images, (images,); ``key``: (1,), int32. The order is by a hash of
    the patch index that is one-to-one, so no two patches have the same rank. The rank is the number
    of patches with smaller hashes, which needs no sorting and stays on the image's device.
    """
    image_hashes = hashed(numbers.to(torch.int32) + hashed(key))
    places = torch.arange(patches, dtype=torch.int32, device=numbers.device)
    hashes = hashed(image_hashes[:, None] + places)
    return (hashes[:, :, None] > hashes[:, None, :]).sum(-1, dtype=torch.int32)


# -- Evaluation ------------------------------------------------------------------------------------


class ReconstructionError(Measure):
    """Sums the loss of validation images, with the same masks in every evaluation; draws some."""

    def __init__(self, objective: Reconstruction, run: Run, backend: Backend, images: int) -> None:
        """``images``: the number of images evaluated, some of which are drawn; 0: draw none."""
        self._objective, self._run, self._backend = objective, run, backend
        self._totals = np.zeros(2)  # loss, images
        sizes = run.model.sizes
        pixels = math.prod(sizes.input_shape)
        shown = spread(min(_PICTURES, max(1, _MOST_PIXELS // pixels)), images)
        self._key = backend.constant(objective.mask_key("validation"))
        self._shown = backend.constant(torch.tensor(shown))
        """The indices of the images to draw."""
        drawn = torch.zeros(len(shown), 2 * pixels + sizes.num_patches)
        self.carried = {"drawn": backend.constant(drawn)}
        """For each of them: the patches, the patches with predictions filled in, and the mask."""

    def of_batch(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        images, numbers = batch["image"], batch["index"]
        predicted, patches, hidden = self._objective.predict(model, images, numbers, self._key)
        errors = self._objective.errors(predicted, patches, hidden)
        present = numbers != PADDING
        sums = torch.stack([(errors * present).sum(), present.sum().float()])
        if len(self._shown):
            mean, deviation = self._objective.scale(patches)
            painted = torch.where(hidden[..., None], predicted * deviation + mean, patches)
            # The images may be on any device: a product with ones and zeros, and a sum over all
            # devices, copy them to each.
            chosen = (self._shown[:, None] == numbers).float()
            parts = [chosen @ x.flatten(1) for x in (patches, painted, hidden.float())]
            drawn = self.carried["drawn"] + self._backend.sum(torch.cat(parts, dim=1))
            self.carried = {"drawn": drawn}
        return {"totals": self._backend.sum(sums)}

    def add(self, values: Mapping[str, list[float]]) -> None:
        self._totals += values["totals"]

    def result(self) -> Evaluation:
        loss, images = self._totals.tolist()
        pictures = self._picture() if len(self._shown) else None
        return Evaluation(loss / (images or float("nan")), images=int(images), pictures=pictures)

    def _picture(self) -> np.ndarray | None:
        """Return a picture (height, width, 3), uint8: a row per image, with the image, its visible
        patches, and the reconstruction. None if images have neither one nor three channels, or if
        none can be read."""
        spec = self._run.model
        assert isinstance(spec, MaeSpec)
        sizes, (height, width) = spec.sizes, spec.patch_size
        values = self._backend.read(self.carried).result()["drawn"]
        drawn = torch.tensor(values).view(len(self._shown), -1)
        drawn = drawn[drawn[:, -sizes.num_patches :].any(dim=1)]  # the others cannot be read
        channels, pixels = sizes.input_shape[0], math.prod(sizes.input_shape)
        if channels not in (1, 3) or not len(drawn):
            return None
        patches, painted, hidden = drawn.split([pixels, pixels, sizes.num_patches], dim=1)
        hidden = hidden.repeat_interleave(height * width, dim=1)
        whole, reconstructed, mask = (
            images_of(x.unflatten(1, (sizes.num_patches, -1)), spec.patch_size, sizes.grid)
            for x in (patches, painted, hidden)
        )
        colors = self._run.config.data.preprocessing.of_channels(channels)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in colors)
        whole, reconstructed = (
            (x * std + mean).clamp(0, 1).expand(-1, 3, -1, -1) for x in (whole, reconstructed)
        )
        seen = torch.where(mask > 0, 0.5, whole)
        return side_by_side([x.numpy() for x in (whole, seen, reconstructed)])
