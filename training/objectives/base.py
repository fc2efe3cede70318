"""What a model is trained for: the interface of an objective, and of what an evaluation measures.

An ``Objective`` runs on the devices, as part of the step and of evaluations. It prepares the
model's input from a batch, computes the loss of the output, and decides what an evaluation
measures.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from data.batch import PADDING, Batch
from training.backend import Backend
from training.logs.records import Evaluation
from training.schedule import StepRates

if TYPE_CHECKING:
    from training.resolve import Run


class Objective(abc.ABC):
    """Prepares batches on the devices, computes the loss, and defines what to measure."""

    takes_positions: ClassVar[bool] = False
    """Whether training batches have the field ``position``, each sample's place in the global
    batch."""
    measured: ClassVar[bool] = True
    """Whether evaluations measure anything besides features (``--knn_every``)."""

    @abc.abstractmethod
    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        """Put on the devices what the loss needs besides the model, and log it with ``say``."""

    def frozen_models(self) -> dict[str, nn.Module]:
        """Return trained models that the loss uses, by name, for those who look into a step."""
        return {}

    def begin_step(self, rates: StepRates) -> None:  # noqa: B027
        """Take the rates of the step; called before its micro-batches."""

    def host_inputs(self, batch: Batch, micro_batch_index: int) -> Batch:
        """Return what the loss of this micro-batch needs of the host and changes from step to step,
        such as random draws and scheduled values: small CPU tensors, the same on all replicas.

        A step puts them on the devices as fields of the batch, where ``loss`` finds them by
        ``host_input``. Nothing else made on the host may differ between steps: a backend may
        compute ``loss`` by a graph that it has recorded once.
        """
        return {}

    def host_input(
        self, name: str, backend: Backend, batch: Batch, micro_batch_index: int
    ) -> torch.Tensor:
        """Return one of ``host_inputs`` on the devices. It is made now if the batch does not have
        it: for those who call ``loss`` outside of a step."""
        if name in batch:
            return batch[name]
        return backend.constant(self.host_inputs(batch, micro_batch_index)[name])

    def before_micro_batches(  # noqa: B027
        self, model: nn.Module, micro_batches: Sequence[Batch], first_index: int
    ) -> None:
        """Compute what the loss of one micro-batch needs to know of the others; called in each
        step before ``loss``. ``first_index``: the ``micro_batch_index`` of the first. To run the
        model on one of them, call ``Backend.begin_micro_batch`` before and ``Backend.end_step``
        after it."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch, micro_batch_index: int) -> torch.Tensor:
        """Return the mean loss over the samples of a micro-batch on a replica, an fp32 scalar.
        ``micro_batch_index`` counts from the start of training."""

    def end_step(self, step: int) -> None:  # noqa: B027
        """Called after the update is dispatched; ``step`` counts from 1."""

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the parts of the step's loss and other measurements by metric name, scalars over
        the global batch; called after the micro-batches of the step."""
        return {}

    def measure(self, images: int = 0) -> Measure:
        """Return the measure of one evaluation, if the objective is ``measured``; with ``images``,
        the number of images, it may also draw some."""
        raise NotImplementedError


OF_IMAGES = "of_images"


class Measure(abc.ABC):
    """What is measured in one evaluation. Padding (label and index -1) is ignored."""

    carried: Mapping[str, torch.Tensor] = {}
    """Tensors on the devices for which ``of_batch`` may set others of the same shapes."""

    @abc.abstractmethod
    def of_batch(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Run the model on a batch; return values over all replicas, on the devices.

        Values of the images that this process has put there can be in a dict under ``OF_IMAGES``,
        with their numbers as "index", (images,); dimension 0 of each is the images. Processes with
        the same ``Backend.batch_shard`` have the same images. A backend may record what this does,
        so it must have no effect but on ``carried``.
        """

    @abc.abstractmethod
    def add(self, values: Mapping[str, Any]) -> None:
        """Add the values of a batch, after they were read from the devices: lists of numbers, and
        under ``OF_IMAGES`` arrays, without padding."""

    @abc.abstractmethod
    def result(self) -> Evaluation:
        """Return what was measured over all batches."""


def without_padding(of_images: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return values of images, which are on the host, as ``Measure.add`` takes them."""
    is_image = of_images["index"] != PADDING
    return {name: value[is_image].numpy() for name, value in of_images.items()}


class MeanLoss(Measure):
    """The mean of a loss, and of other figures, over the images of an evaluation."""

    def __init__(
        self,
        losses: Callable[[nn.Module, Batch], torch.Tensor | Mapping[str, torch.Tensor]],
        backend: Backend,
    ) -> None:
        """``losses`` returns the loss of each sample of a batch, (samples,), in fp32, or several
        such figures by name, of which "loss" is one."""
        self._losses, self._backend = losses, backend
        self._sums: dict[str, float] = {}
        """By name, over the images so far; "images": their number."""

    def of_batch(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        is_image = batch["index"] != PADDING
        found = self._losses(model, batch)
        figures = {"loss": found} if isinstance(found, torch.Tensor) else found
        known = {  # padding's may be NaN
            name: torch.where(is_image, each, 0.0).sum() for name, each in figures.items()
        }
        sums = torch.stack([*known.values(), is_image.sum().float()])
        return dict(zip((*known, "images"), self._backend.sum(sums)[:, None], strict=True))

    def add(self, values: Mapping[str, Any]) -> None:
        for name, (value,) in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def result(self) -> Evaluation:
        sums = {"loss": math.nan, "images": 0.0} | self._sums
        images = sums.pop("images")
        means = {name: value / (images or math.nan) for name, value in sums.items()}
        return Evaluation(means.pop("loss"), images=int(images), means=means)
