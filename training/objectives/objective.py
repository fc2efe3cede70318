"""Training objectives, one per file, and their registry.

An ``Objective`` runs on the devices, as part of the step and of evaluations. It prepares the
model's input from a batch, computes the loss of the output, and decides what an evaluation
measures. A ``Teacher`` is a trained model that it may use.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from training.backend import Backend, dataset_request
from training.evaluation.evaluate import Measure
from training.schedule import StepRates
from training.teachers import weights_of_teacher
from training.weights.adapt import adapt
from training.weights.source import check_files

if TYPE_CHECKING:
    from training.resolve import Run

OBJECTIVES = {
    "classify": "training.objectives.classify:Classification",
    "classify packed": "training.objectives.classify:PackedClassification",
    "mae": "training.objectives.mae:Reconstruction",
    "dino": "training.objectives.dino:SelfDistillation",
}
"""Module and class of each objective, by name, imported on use; "packed": for sequences of several
images."""

Constant = Callable[[torch.Tensor], torch.Tensor]
"""Replicates a small CPU tensor on every device, like ``Backend.constant``."""


class Objective(abc.ABC):
    """Prepares images on the devices, computes the loss, and defines what to measure."""

    numbered: ClassVar[bool] = False
    """Whether images come with their position in the global batch instead of a label."""
    measured: ClassVar[bool] = True
    """Whether evaluations measure anything besides features (``--knn_every``)."""
    teacher: Teacher | None = None
    """The trained model of ``--teacher``, used in each pass."""

    @abc.abstractmethod
    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        """Put on the devices what the loss needs besides the model, and log it with ``say``."""

    def begin_step(self, rates: StepRates) -> None:  # noqa: B027
        """Take the rates of the step; called before its passes."""

    @abc.abstractmethod
    def loss(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro_batch_index: int
    ) -> torch.Tensor:
        """Return the mean loss over the images of a micro-batch on a replica, an fp32 scalar.
        ``labels`` are positions in the global batch if images are ``numbered``;
        ``micro_batch_index`` counts from the start of training."""

    def end_step(self, step: int) -> None:  # noqa: B027
        """Called after the update is dispatched; ``step`` counts from 1."""

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the parts of the step's loss and other measurements by metric name, scalars over
        the global batch; called after the passes of the step."""
        return {}

    def measure(self, images: int = 0) -> Measure:
        """Return the measure of one evaluation, if the objective is ``measured``; with ``images``,
        the number of images, it may also draw some."""
        raise NotImplementedError


# -- Distillation: a trained, frozen teacher sees the same images (DeiT, arXiv 2012.12877) ---------


class Teacher:
    """A frozen model, sharded like the student, that is never trained or saved."""

    def __init__(self, run: Run[Any], backend: Backend, say: Callable[[str], None]) -> None:
        """Load the teacher of ``run`` onto the devices, and log what it is."""
        assert run.teacher is not None
        spec, checkpoints = run.teacher.model, run.teacher.config.checkpoints
        source = weights_of_teacher(checkpoints.resume, "--teacher_weights")
        check_files(source, verify=checkpoints.verify_checkpoint)
        preprocessing = run.teacher.config.data.preprocessing
        say(
            f"teacher: {spec.name}, {spec.parameter_count:,} parameters, weights of "
            f"{source.path}, preprocessing: {preprocessing}"
        )
        model = run.teacher.build_model(backend.constant).requires_grad_(False)
        initialize = adapt(source, spec, unchanged=True).initialize
        self.model = backend.shard_frozen(run.teacher, model, initialize)
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


def open_objective(
    run: Run, backend: Backend, say: Callable[[str], None] = lambda line: None
) -> Objective:
    """Return the objective of ``run``. Must be called before the first step is recorded."""
    chosen = run.config.objective.objective + (" packed" if run.model.packing else "")
    module, _, name = OBJECTIVES[chosen].partition(":")
    objective = cast(Objective, getattr(import_module(module), name)(run, backend, say))
    if run.teacher:
        objective.teacher = Teacher(run, backend, say)
    return objective


def normalizer(run: Run, constant: Constant) -> Callable[[torch.Tensor], Any]:
    """Return the function (x / 255 - mean) / std, per channel, from uint8 images to fp32. Images in
    fp32 were normalized on reading, and are returned unchanged. Sequences of several images, packed
    as bytes, are unpacked to the model's input."""
    channels, *spatial = run.model.sizes.input_shape
    mean, std = map(torch.tensor, run.config.data.preprocessing.of_channels(channels))
    if layout := dataset_request(run).pack_layout:
        from models.native_vit import Packed

        pixels = layout.patch_bytes // channels
        scale, offset = (constant(x.repeat(pixels)) for x in (1 / (255 * std), -mean / std))

        def unpack(rows: torch.Tensor) -> Packed:
            patches, places, segments, _ = layout.unpack(rows)
            return Packed(patches.float() * scale + offset, places, segments)

        return unpack

    by_channel = (-1, *[1] * len(spatial))
    scale, offset = (constant(x.view(by_channel)) for x in (1 / (255 * std), -mean / std))

    def normalize(images: torch.Tensor) -> torch.Tensor:
        return images.float() * scale + offset if images.dtype == torch.uint8 else images

    return normalize
