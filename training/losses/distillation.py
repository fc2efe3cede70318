"""Distillation: a trained, frozen teacher is shown the same images (DeiT, arXiv 2012.12877)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from training.backend import Backend
from training.hosts.start import check_weights
from training.options.loss_config import LossConfig
from training.options.teacher_run import FLAG
from training.trained_weights.weights import weights_in
from training.url_path import folder_at

if TYPE_CHECKING:
    from training.options.resolve import Run

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Teacher:
    """Answers what a student is shown. It is sharded as the student, and never trained or saved."""

    def __init__(self, run: Run[Any], backend: Backend, say: Callable[[str], None]) -> None:
        """Put the teacher of ``run`` on the devices, and say of what it is made."""
        assert run.teacher is not None
        spec, found = run.teacher.model, run.teacher.config.checkpoints
        weights = weights_in(folder_at(found.resume), FLAG)
        check_weights(weights, verify=found.verify_checkpoint)
        preprocessing = run.teacher.config.data.preprocessing
        say(
            f"teacher: {spec.name}, {spec.parameter_count:,} parameters, of {weights.path}, "
            f"preprocessing: {preprocessing}"
        )
        model = spec.build().requires_grad_(False)
        self._model = backend.shard_frozen(run.teacher, model, weights.fill).eval()
        self._affine = _affine(run, backend.constant)

    @torch.no_grad()
    def __call__(self, shown: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (images, classes) of images normalised for the student."""
        if self._affine is not None:
            shown = shown * self._affine[0] + self._affine[1]
        return self._model(shown).float()


def _affine(
    run: Run[Any], constant: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the factor and the summand, by channel, that make of images normalised for the student
    those that the teacher was trained with; None if these are the same.

    Shares of mixed images add up to 1, so that it holds for them, too.
    """
    assert run.teacher is not None
    channels, *spatial = run.model.sizes.input_shape
    student, teacher = (
        each.config.data.preprocessing.of_channels(channels) for each in (run, run.teacher)
    )
    if student == teacher:
        return None
    (mean, std), (wanted_mean, wanted_std) = (
        map(torch.tensor, each) for each in (student, teacher)
    )
    values = std / wanted_std, (mean - wanted_mean) / wanted_std
    factor, summand = (constant(each.view(-1, *[1] * len(spatial))) for each in values)
    return factor, summand


def distillation_loss(config: LossConfig) -> Loss:
    """Return the teacher's part of the loss, of (images, classes) logits of student and teacher.

    The mean over the images of equation (2), the Kullback-Leibler divergence times tau squared, or
    of (3), the cross-entropy with the teacher's likeliest class, of arXiv 2012.12877.
    """
    if config.distillation_type == "hard":
        return lambda student, teacher: F.cross_entropy(student, teacher.argmax(dim=-1))
    tau = config.distillation_tau

    def soft(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        ours, theirs = (F.log_softmax(logits / tau, dim=-1) for logits in (student, teacher))
        return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * tau**2

    return soft
