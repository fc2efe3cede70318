"""Classification: the loss of logits and labels, and the accuracy.

In each step, ``Classification`` normalizes images, mixes them (mixup, CutMix), runs a teacher
(distillation), and computes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import cutmix_bbox_and_lam
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy
from torch import nn

from data.batch import PADDING, Batch
from data.transforms import drawn_from
from training.backend import Backend, micro_batch_seed
from training.data import input_of
from training.logs.by_class import ByClass
from training.logs.records import Evaluation
from training.objectives.base import OF_IMAGES, Measure, Objective
from training.objectives.class_weights_config import ClassWeightsConfig
from training.objectives.distillation_config import DistillationConfig
from training.objectives.mixup_config import MixupConfig
from training.objectives.teacher import open_teacher

if TYPE_CHECKING:
    from training.resolve import Run


class Classification(Objective):
    """Trains the model to predict the labels of images."""

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        config, mixup = run.config.loss, run.config.of(MixupConfig)
        self._distillation = run.config.of(DistillationConfig)
        self._backend = backend
        self._input = input_of(run, backend.constant)
        self._mixing = Mixing(run, backend.image_rows) if mixup.mixes else None
        self._classes, self._smoothing = run.model.sizes.num_classes, config.smoothing
        self._class_weights: torch.Tensor | None = None
        self._logit_adjustment: torch.Tensor | None = None
        by_class = run.config.of(ClassWeightsConfig)
        if by_class.class_weights is not None:
            self.weigh_classes(torch.ones(self._classes))
        if by_class.logit_adjustment is not None:
            self.adjust_logits(torch.zeros(self._classes))
        self._soft_labels = mixup.mixes or config.bce_loss or by_class.in_loss
        # Chosen as in timm's training script. With mixed labels or binary cross-entropy, labels are
        # already smoothed.
        self._label_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy
        if config.bce_loss:
            self._label_loss = BinaryCrossEntropy(
                target_threshold=config.bce_target_thresh, sum_classes=config.bce_sum
            )
        elif self._soft_labels:
            self._label_loss = self._cross_entropy
        elif config.smoothing:
            self._label_loss = LabelSmoothingCrossEntropy(config.smoothing)
        self._teacher = open_teacher(run, backend, say)

    def weigh_classes(self, weights: torch.Tensor) -> None:
        """Set the weight of each class in the loss, (classes,) fp32; before the first step."""
        self._class_weights = self._backend.constant(weights)

    def adjust_logits(self, terms: torch.Tensor) -> None:
        """Set what is added to the logit of each class in the loss, (classes,) fp32; before the
        first step."""
        self._logit_adjustment = self._backend.constant(terms)

    def _cross_entropy(
        self, logits: torch.Tensor, labels: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """Return PyTorch's loss of adjusted logits and weighted classes. Of soft labels, it is
        divided by the number of images, not by the sum of their weights, which differs from part to
        part of a batch."""
        if self._logit_adjustment is not None:
            logits = logits + self._logit_adjustment
        return F.cross_entropy(logits, labels, weight=self._class_weights, **how)

    @staticmethod
    def probabilities(logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of the classes, (images, classes)."""
        return logits.float().softmax(dim=-1)

    def frozen_models(self) -> dict[str, nn.Module]:
        return {"teacher": self._teacher.model} if self._teacher else {}

    def host_inputs(self, batch: Batch, micro_batch_index: int) -> Batch:
        if self._mixing is None:
            return {}
        return {"mix": self._mixing.draw(micro_batch_index, batch["image"].shape)}

    def loss(self, model: nn.Module, batch: Batch, micro_batch_index: int) -> torch.Tensor:
        images, targets, teacher_logits = self.example(batch, micro_batch_index)
        return self.loss_of(model(images), targets, teacher_logits)

    def example(
        self, batch: Batch, micro_batch_index: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the model's input for a micro-batch; its targets, class indices (images,) or
        probabilities (images, classes); and the teacher's logits, if there is a teacher."""
        images, labels = self._input(batch), batch["target"]
        if self._soft_labels:
            labels = smoothed(labels, self._classes, self._smoothing)
        if self._mixing is not None:
            mix = self.host_input("mix", self._backend, batch, micro_batch_index)
            images, labels = self._mixing.images(images, mix), self._mixing.labels(labels, mix)
        teacher_logits = None
        if self._teacher is not None:
            with torch.no_grad():
                teacher_logits = self._teacher.model(self._teacher.normalized(images)).float()
        return images, labels, teacher_logits

    def loss_of(
        self, logits: torch.Tensor, targets: torch.Tensor, teacher_logits: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the mean loss of (images, classes) logits, an fp32 scalar. The distillation loss
        is equation (2) or (3) of arXiv 2012.12877."""
        logits = logits.float()
        loss = self._label_loss(logits, targets)
        if teacher_logits is None:
            return loss
        distillation = self._distillation
        alpha, tau = distillation.distillation_alpha, distillation.distillation_tau
        if distillation.distillation_type == "hard":
            distilled = F.cross_entropy(logits, teacher_logits.argmax(dim=-1))
        else:
            ours, theirs = (F.log_softmax(x / tau, dim=-1) for x in (logits, teacher_logits))
            distilled = F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * tau**2
        return (1 - alpha) * loss + alpha * distilled

    def measure(self, images: int = 0) -> Measure:
        """Return the measure of loss and accuracy, an ``Accuracy``."""
        return Accuracy(self._input, self._backend)


def smoothed(labels: torch.Tensor, classes: int, smoothing: float) -> torch.Tensor:
    """Return smoothed one-hot labels, (images, classes), fp32, like timm's ``mixup_target``, but by
    comparison, without a scatter on the devices. ``labels``: (images,), or for several labels an
    image 0 and 1, (images, classes), which are smoothed towards 1/2, as in timm's
    ``BinaryCrossEntropy``."""
    if labels.ndim > 1:
        return labels * (1.0 - smoothing) + smoothing / 2
    other = smoothing / classes
    is_label = labels[:, None] == torch.arange(classes, device=labels.device)
    return is_label * (1.0 - smoothing) + other


# -- Mixup and cutmix ----------------------------------------------------------------------------
#
# Like timm's ``Mixup`` in mode "batch". An image is mixed with another one on the same device, as
# in each process of timm: the first with the last, the second with the last but one, so nothing
# moves between devices. All images of a pass are mixed in the same way; the few parameters come
# from the host. Shapes and operations are the same for mixup, CutMix and neither.

_SEED_STREAM = -1  # dropout uses the ranks of processes, from 0, as streams


class Mix(NamedTuple):
    """How the images of one pass are mixed."""

    image_share: float
    """The weight of an image in the mixture, outside the box."""
    label_share: float
    """The weight of its label in the mixture."""
    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0
    """The box that is cut from the other image: rows from ``top`` to before ``bottom``, columns
    likewise; empty for mixup."""


def _draw_mix(config: MixupConfig, height: int, width: int) -> Mix:
    """Return a mix drawn from NumPy's global generator, in the order in which timm draws."""
    if np.random.rand() >= config.mixup_prob:
        return Mix(1.0, 1.0)
    use_cutmix = config.cuts and (
        config.mixup == 0 or bool(np.random.rand() < config.mixup_switch_prob)
    )
    if not use_cutmix:
        share = float(np.random.beta(config.mixup, config.mixup))
        return Mix(share, share)
    alpha = config.cutmix or 1.0  # timm's for boxes of --cutmix_minmax
    share = float(np.random.beta(alpha, alpha))
    if share == 1:
        return Mix(1.0, 1.0)
    box, label_share = cutmix_bbox_and_lam(
        (height, width), share, ratio_minmax=config.cutmix_minmax
    )
    top, bottom, left, right = map(int, box)
    return Mix(1.0, float(label_share), top, bottom, left, right)


class Mixing:
    """Draws the mixing parameters of each pass, and mixes its images."""

    def __init__(self, run: Run, rows: range) -> None:
        """``rows``: the rows of each image that are on the devices (``Backend.image_rows``)."""
        self._config, self._seed = run.config.of(MixupConfig), run.config.seed
        self._rows, self._spatial = rows, run.model.sizes.input_shape[1:]
        self._has_part = len(rows) < self._spatial[0]
        self._images_a_device = run.config.data.global_micro_batch_size // run.mesh.batch_shards

    def draw(self, micro_batch_index: int, shape: torch.Size) -> torch.Tensor:
        """Return the values of a ``Mix``, (6,), on the host, for images of this ``shape``. They
        depend only on the seed and the number of the pass since the start of training."""
        # If devices share images, these have the model's own size.
        height, width = (self._spatial if self._has_part else shape)[-2:]
        with drawn_from(micro_batch_seed(self._seed, micro_batch_index, _SEED_STREAM) % 2**32):
            mix = _draw_mix(self._config, height, width)
        if shape[-2] < self._spatial[0]:  # from the first row that this process has of an image
            first = self._rows.start
            mix = mix._replace(top=mix.top - first, bottom=mix.bottom - first)
        # A single tensor: one transfer, and no Python scalar that would trigger a recompilation.
        return torch.tensor(mix, dtype=torch.float32)

    def images(self, images: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """Return mixed images, (images, channels, [slices,] rows, columns), fp32."""
        share, _, top, bottom, left, right = mix.unbind()
        if self._config.cuts:
            height, width = images.shape[-2:]
            rows = torch.arange(height, device=images.device)
            columns = torch.arange(width, device=images.device)
            in_rows, in_columns = (
                (rows >= top) & (rows < bottom),
                (columns >= left) & (columns < right),
            )
            share = share * ~(in_rows[:, None] & in_columns)
        return images * share + self._partners(images) * (1 - share)

    def labels(self, labels: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """Return mixed labels, (images, classes)."""
        return labels * mix[1] + self._partners(labels) * (1 - mix[1])

    def _partners(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each entry is mixed with. In SPMD's global tensor, viewed as (devices, images
        per device), nothing moves between devices."""
        return x.unflatten(0, (-1, self._images_a_device)).flip(1).flatten(0, 1)


# -- Evaluation: the cross-entropy and the accuracy ------------------------------------------------


TOP = 5
"""The k of top-k accuracy, in addition to 1."""


def classes_before(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return, for each image, how many classes the logits (images, classes) rank above its label.

    The first of equal logits ranks highest. NaN ranks above all, so a model that has diverged is
    never right. Needs no sorting or gathering: each device compares the logits of its own images.
    """
    classes = torch.arange(logits.shape[-1], device=logits.device)
    label = labels.clamp(min=0)[:, None]  # padding gets an arbitrary rank, which is ignored
    label_logit = torch.where(classes == label, logits, 0.0).sum(dim=-1, keepdim=True)
    first_of_equals = (logits == label_logit) & (classes < label)
    return (~(logits <= label_logit) | first_of_equals).sum(dim=-1)


PREDICTION = np.dtype(
    [
        ("index", np.int32),  # the image's number in its split
        ("label", np.int32),
        ("predicted", np.int32),
        ("before", np.int32),  # ``classes_before``
        ("probability", np.float32),  # of the predicted class
        ("label_probability", np.float32),
    ]
)
"""What one image was classified as. If a logit is not finite, the probabilities are NaN."""


class Accuracy(Measure):
    """Sums the cross-entropy, the images with the label in the top 1 and the top 5, and, for each
    class, its images, those predicted as it, and all that are predicted as it.

    With ``keeps_predictions``, each process also collects what the images on its devices were
    classified as: six numbers per image, whatever the number of classes.
    """

    keeps_predictions = False

    def __init__(self, model_input: Callable[[Batch], Any], backend: Backend) -> None:
        self._input, self._backend = model_input, backend
        # Summed on the host: exact, and no graph depends on the number of batches.
        self._totals = np.zeros(4)  # loss, in top 1, in top 5, images
        self._by_class: np.ndarray | int = 0  # as in ByClass, (3, classes)
        self._predictions = [np.empty(0, PREDICTION)]

    def of_batch(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        logits, labels = model(self._input(batch)).float(), batch["target"].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=PADDING, reduction="sum")
        present, before = labels != PADDING, classes_before(logits, labels)
        counts = [(present & (before < k)).sum().float() for k in (1, TOP)]
        sums = self._backend.sum(torch.stack([loss, *counts, present.sum().float()]))
        classes = torch.arange(logits.shape[-1], device=logits.device)
        predicted = logits.argmax(dim=-1)
        # Comparisons, as in ``classes_before``; padding has no class.
        is_label, is_predicted = (
            (each[:, None] == classes) & present[:, None] for each in (labels, predicted)
        )
        by_class = [is_label, is_label & (before < 1)[:, None], is_predicted]
        counts_by_class = torch.stack([each.sum(dim=0).float() for each in by_class])
        values: dict[str, Any] = {"totals": sums, "by_class": self._backend.sum(counts_by_class)}
        if self.keeps_predictions:
            probabilities = Classification.probabilities(logits)
            of_label = (probabilities * is_label).sum(dim=-1)
            values[OF_IMAGES] = {
                "index": batch["index"].flatten(),
                "classes": torch.stack([each.int() for each in (labels, predicted, before)], dim=1),
                "probabilities": torch.stack([probabilities.amax(dim=-1), of_label], dim=1),
            }
        return values

    def add(self, values: Mapping[str, Any]) -> None:
        self._totals += values["totals"]
        self._by_class += np.array(values["by_class"], dtype=np.int64).reshape(3, -1)
        if self.keeps_predictions:
            here = values[OF_IMAGES]
            columns = [here["index"], *here["classes"].T, *here["probabilities"].T]
            self._predictions.append(np.rec.fromarrays(columns, PREDICTION))

    def predictions(self) -> np.ndarray:
        """Return what this process's images were classified as, (images,), of dtype
        ``PREDICTION``."""
        return np.concatenate(self._predictions)

    def result(self) -> Evaluation:
        loss_sum, in_top1, in_top5, images = self._totals.tolist()
        count = images or float("nan")  # NaN if no image could be read
        return Evaluation(
            loss_sum / count,
            100 * in_top1 / count,
            100 * in_top5 / count,
            int(images),
            by_class=ByClass(*self._by_class) if isinstance(self._by_class, np.ndarray) else None,
        )
