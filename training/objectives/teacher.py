"""Distillation: a trained, frozen teacher sees the same images (DeiT, arXiv 2012.12877)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from training.backend import Backend
from training.initial_weights import weights_of_teacher
from training.weights import check_weights

if TYPE_CHECKING:
    from training.resolve import Run


class Teacher:
    """A frozen model, sharded like the student, that is never trained or saved."""

    def __init__(self, run: Run[Any], backend: Backend, say: Callable[[str], None]) -> None:
        """Load the teacher of ``run`` onto the devices, and log what it is."""
        assert run.teacher is not None
        spec, checkpoints = run.teacher.model, run.teacher.config.checkpoints
        weights = weights_of_teacher(checkpoints.resume, "--teacher_weights")
        check_weights(weights, verify=checkpoints.verify_checkpoint)
        preprocessing = run.teacher.config.data.preprocessing
        say(
            f"teacher: {spec.name}, {spec.parameter_count:,} parameters, weights of "
            f"{weights.path}, preprocessing: {preprocessing}"
        )
        model = run.teacher.build_model(backend.constant).requires_grad_(False)
        self.model = backend.shard_frozen(run.teacher, model, weights.fill)
        # Convert the student's normalization to the teacher's. This also holds for mixed images, as
        # their weights add up to 1.
        channels, *spatial = run.model.sizes.input_shape
        ours = run.config.data.preprocessing.of_channels(channels)
        theirs = preprocessing.of_channels(channels)
        self._affine = None
        if ours != theirs:
            (mean, std), (new_mean, new_std) = (map(torch.tensor, pair) for pair in (ours, theirs))
            self._affine = tuple(
                backend.constant(x.view(-1, *[1] * len(spatial)))
                for x in (std / new_std, (mean - new_mean) / new_std)
            )

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Convert images (..., channels, *spatial) from the student's normalization to the
        teacher's."""
        if self._affine is None:
            return images
        factor, summand = self._affine
        return images * factor + summand


def open_teacher(run: Run, backend: Backend, say: Callable[[str], None]) -> Teacher | None:
    """Return the teacher of ``run`` on the devices; None without ``--teacher``."""
    return Teacher(run, backend, say) if run.teacher else None
