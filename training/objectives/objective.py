"""The objectives: what a model is trained for, a file each, and the registry of them.

An ``Objective`` runs on the devices, as a part of the step and of evaluations. It decides what a
model is shown of a batch, the loss of its answer, and what an evaluation measures. A ``Teacher`` is
a trained model that it may ask.
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
from training.initial_weights import weights_of_teacher
from training.schedule import StepRates
from training.weights import check_weights

if TYPE_CHECKING:
    from training.resolve import Run

OBJECTIVES = {
    "classify": "training.objectives.classify:Classification",
    "classify packed": "training.objectives.classify:PackedClassification",
    "mae": "training.objectives.mae:Reconstruction",
    "dino": "training.objectives.dino:SelfDistillation",
}
"""Module and class of each objective, by its name; "packed": of sequences of several images. It is
imported when it is chosen."""

Constant = Callable[[torch.Tensor], torch.Tensor]
"""Puts a small tensor of the CPU whole on every device, as ``Backend.constant`` does."""


class Objective(abc.ABC):
    """Prepares images on the devices, and computes what to minimize and what to measure."""

    numbered: ClassVar[bool] = False
    """Whether images come with their places in the global batch instead of labels."""
    measured: ClassVar[bool] = True
    """Whether there is anything to evaluate besides features (``--knn_every``)."""
    teacher: Teacher | None = None
    """The trained model of ``--teacher``, which it asks in each pass."""

    @abc.abstractmethod
    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        """Put on the devices what the loss needs besides the model; ``say`` logs what that is."""

    def begin_step(self, rates: StepRates) -> None:  # noqa: B027
        """Take the numbers of the step that starts; called before its passes."""

    @abc.abstractmethod
    def loss(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, pass_index: int
    ) -> torch.Tensor:
        """Return the mean loss of the images of a micro-batch on a replica, a scalar in fp32.
        ``labels`` are places in the global batch where images are ``numbered``; ``pass_index``
        counts from the start of training."""

    def end_step(self, step: int) -> None:  # noqa: B027
        """Called when the update is handed to the device; ``step`` counts from 1."""

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the parts of the step's loss, and what else is measured of the step, by the names
        of their metrics; called after its passes. Scalars, each over the global batch."""
        return {}

    def measure(self, images: int = 0) -> Measure:
        """Return what measures the model in one evaluation, if it is ``measured``; with ``images``,
        how many are evaluated, it may also draw some."""
        raise NotImplementedError


# -- Distillation: a trained, frozen teacher sees the same images (DeiT, arXiv 2012.12877) ---------


class Teacher:
    """A frozen model, sharded as the student, that is never trained or saved."""

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
        # From the student's normalization to the teacher's. The weights of mixed images add up to
        # 1, so that it holds for them, too.
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
        """Return images (..., channels, *spatial), normalized for the student, as the teacher's."""
        if self._affine is None:
            return images
        factor, summand = self._affine
        return images * factor + summand


def open_objective(
    run: Run, backend: Backend, say: Callable[[str], None] = lambda line: None
) -> Objective:
    """Return the objective of ``run``. It must be made before the first step is recorded."""
    chosen = run.config.objective.objective + (" packed" if run.model.packing else "")
    module, _, name = OBJECTIVES[chosen].partition(":")
    objective = cast(Objective, getattr(import_module(module), name)(run, backend, say))
    if run.teacher:
        objective.teacher = Teacher(run, backend, say)
    return objective


def normalizer(run: Run, constant: Constant) -> Callable[[torch.Tensor], Any]:
    """Return the function (x / 255 - mean) / std, by channel, of uint8 images, in fp32. Images in
    fp32 were normalized as they were read, and are returned as they are. Of sequences of several
    images, packed as bytes, it makes what the model is given."""
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
