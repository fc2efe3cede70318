"""The Gram teacher: a third model, whose patch features the student's shall resemble.

Follows DINOv3 (arXiv 2508.10104), sections 4.2 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from features.dino.config import DinoConfig
from features.dino.crops import CropView
from features.dino.model import Compared, Crops
from models.positions import Grid, Resampling
from training.backend import Backend
from training.errors import UsageError
from training.teachers import weights_of_teacher
from training.weights.adapt import Adapter, adapt
from training.weights.describe import check_described, describe
from training.weights.source import check_files

if TYPE_CHECKING:
    from training.resolve import Run


def gram_weights(run: Run) -> Adapter:
    """Return the weights of ``--gram_weights``, adapted to the run's model.

    Raises UsageError if they do not exist or are of another model.
    """
    path = run.config.of(DinoConfig).gram_weights
    assert path is not None
    found = weights_of_teacher(path, "--gram_weights")
    try:
        check_described(run.config, describe(found), keeps_head=False)
        return adapt(found, run.model, seed=run.config.seed)
    except UsageError as error:
        raise UsageError(f"--gram_weights: {error}") from None


class GramModel:
    """The Gram teacher on the devices, frozen or a copy of the EMA teacher of an earlier step."""

    def __init__(
        self,
        run: Run,
        backend: Backend,
        views: Mapping[Grid, CropView],
        normalize: Callable[[torch.Tensor], torch.Tensor],
        say: Callable[[str], None],
    ) -> None:
        """``views``: the sizes of global crops that a step may have, by their grid of patches;
        ``normalize`` is for images on the devices."""
        self._backend, self._normalize = backend, normalize
        self._to_own_grid = {
            grid: Resampling(each.of_gram(grid), grid, backend.constant, antialias=False)
            for grid, each in views.items()
            if each.has_gram_crops
        }
        """From a larger crop's grid to the student's."""
        initial = gram_weights(run)
        check_files(initial.source, verify=run.config.checkpoints.verify_checkpoint)
        say(f"Gram teacher: {initial.note}")
        frozen = run.build_model(backend.constant).requires_grad_(False)
        self._update_steps = run.config.of(DinoConfig).gram_update_steps
        follows = self._update_steps > 0
        self._model = backend.shard_frozen(run, frozen, initial.initialize, follows_teacher=follows)

    def end_step(self, step: int) -> None:
        """Replace it with the EMA teacher every ``--gram_update_steps``."""
        if self._update_steps and step % self._update_steps == 0:
            self._backend.copy_teacher()

    @torch.no_grad()
    def anchor(self, view: CropView, seen: Crops, larger: torch.Tensor | None) -> torch.Tensor:
        """Return its patch tokens on the student's grid, (images, 2, patches, width), computed from
        what the EMA teacher has ``seen``, or from its own ``larger`` crops, if there are any."""
        if larger is None:
            return Compared(*self._model(seen)).patch_tokens
        patches = math.prod(view.of_gram(view.grid))
        # The mask has another grid, and the heads are not used here.
        crops = seen._replace(
            global_crops=self._normalize(larger),
            mask=seen.mask.new_zeros(len(seen.mask), patches),
            slots=1,
        )
        tokens = Compared(*self._model(crops)).patch_tokens
        return self._to_own_grid[view.grid](tokens)


def gram_loss(tokens: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Return the mean squared difference of the cosine similarities of all pairs of patches of a
    crop: the squared Frobenius norm in equation (2) of arXiv 2508.10104, divided by the number of
    pairs.

    ``tokens`` of the student, ``anchor`` of the Gram teacher: (..., patches, width), fp32.
    """
    student, teacher = (F.normalize(x, dim=-1) for x in (tokens, anchor))
    difference = student @ student.transpose(-1, -2) - teacher @ teacher.transpose(-1, -2)
    return difference.square().mean()
