"""Masked autoencoding (MAE, arXiv 2111.06377): the loss of reconstructed pixels, and the masks.

Which patches of an image are masked follows from the seed, the step and the image's place in the
global batch, computed on the devices: so all numbers and kinds of devices mask alike, and so does a
resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from data.loader import PADDING
from models.mae import MaeSpec, patches_of
from training.backend import Backend
from training.evaluation.evaluate import Measure
from training.logs.records import Evaluation
from training.objectives.objective import Objective, normalizer
from training.optimizers import hashed, key_of

if TYPE_CHECKING:
    from training.resolve import Run

_EPS = 1e-6
"""Added to a patch's variance, as in the authors' code."""


class Reconstruction(Objective):
    """Learns to predict the pixels of patches that the encoder does not see."""

    numbered = True

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        spec = run.model
        assert isinstance(spec, MaeSpec)
        self._run, self._backend, self._spec = run, backend, spec
        self._normalize = normalizer(run, backend.constant)
        names = spec.meta.state_dict().keys()  # without those of the encoder's head
        parameters = spec.encoder.meta.named_parameters()
        encoder = sum(parameter.numel() for name, parameter in parameters if name in names)
        say(
            f"objective: mae, {spec.shown} of {spec.sizes.num_patches} patches seen, encoder of "
            f"{encoder:,} parameters"
        )

    def loss(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, pass_index: int
    ) -> torch.Tensor:
        # The passes of a step mask as one pass over all of its images would.
        step = pass_index // self._run.config.data.grad_accum_steps
        return self.errors(model, images, labels, "step", step).mean()

    def errors(
        self, model: nn.Module, images: torch.Tensor, numbers: torch.Tensor, *draw: object
    ) -> torch.Tensor:
        """Return each image's mean squared error over the patches that the encoder does not see,
        (images,), fp32; ``numbers`` and ``draw`` decide which."""
        key = key_of(self._run.config.seed, "mask", *draw)
        # One number, and yet no scalar: equal scalars would be one input of a compiled step.
        keys = self._backend.constant(torch.tensor([key], dtype=torch.int32))
        ranks = ranks_of(numbers, keys, self._spec.sizes.num_patches)
        images = self._normalize(images)
        patches = patches_of(images, self._spec.patch_size)
        predicted = model(images, ranks).float()
        normalize = self._run.config.objective.norm_pix_loss
        return masked_errors(predicted, patches, ranks >= self._spec.shown, normalize=normalize)

    def measure(self) -> Measure:
        return ReconstructionError(self, self._backend)


def masked_errors(
    predicted: torch.Tensor, patches: torch.Tensor, hidden: torch.Tensor, *, normalize: bool
) -> torch.Tensor:
    """Return each image's mean squared error over its hidden patches, (images,).

    ``predicted``, ``patches``: (images, patches, values of a patch), fp32; ``hidden``: (images,
    patches), boolean. With ``normalize`` the targets are normalized by their patch.
    """
    mean, deviation = torch.zeros_like(patches[..., :1]), torch.ones_like(patches[..., :1])
    if normalize:
        mean = patches.mean(-1, keepdim=True)
        deviation = (patches.var(-1, keepdim=True) + _EPS).sqrt()
    errors = (predicted - (patches - mean) / deviation).square().mean(-1)
    return (errors * hidden).sum(1) / hidden.sum(1)


# -- Masks -----------------------------------------------------------------------------------------


def ranks_of(numbers: torch.Tensor, key: torch.Tensor, patches: int) -> torch.Tensor:
    """Return the place of each patch in a random order of its image's patches, (images, patches).

    ``numbers``: of the images, (images,); ``key``: (1,), int32. The order is by a hash of the
    patch's number, which differs for different numbers, so that no two patches share a place. A
    patch's place is how many have smaller hashes: without sorting, each image on its own device.
    """
    image_hashes = hashed(numbers.to(torch.int32) + hashed(key))
    places = torch.arange(patches, dtype=torch.int32, device=numbers.device)
    hashes = hashed(image_hashes[:, None] + places)
    return (hashes[:, :, None] > hashes[:, None, :]).sum(-1, dtype=torch.int32)


# -- Evaluation ------------------------------------------------------------------------------------


class ReconstructionError(Measure):
    """Adds up the loss of validation images, masked alike in every evaluation."""

    numbered = True

    def __init__(self, objective: Reconstruction, backend: Backend) -> None:
        self._objective, self._backend = objective, backend
        self._totals = np.zeros(2)  # loss, images

    def of_batch(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        errors = self._objective.errors(model, images, labels, "validation")
        present = labels != PADDING
        sums = torch.stack([(errors * present).sum(), present.sum().float()])
        return {"totals": self._backend.sum(sums)}

    def add(self, values: Mapping[str, list[float]]) -> None:
        self._totals += values["totals"]

    def result(self) -> Evaluation:
        loss, images = self._totals.tolist()
        return Evaluation(loss / (images or float("nan")), images=int(images))
