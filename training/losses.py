"""What a model is trained for: what it is shown of a batch, and the loss of what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import cutmix_bbox_and_lam
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from data.transforms import drawn_from
from training.backend import Backend, pass_seed
from training.config import LossConfig
from training.files import folder_at
from training.processes.start import check_weights
from training.resolve import FLAG
from training.weights import weights_in

if TYPE_CHECKING:
    from training.resolve import Run


# ------------------------------------------------------------------------------------------------
# Normalises images on the devices: they come as bytes, which are a quarter of fp32's.


_WHITE = 255


@dataclass(frozen=True)
class Normalize:
    """Makes of bytes what a model is shown: (x / 255 - mean) / std, by channel, in fp32.

    Images that are fp32 already have been normalised where they were read, and stay as they are.
    """

    scale: torch.Tensor
    """1 / (255 std), on the devices: (channels, 1, 1)."""
    offset: torch.Tensor
    """-mean / std, on the devices: (channels, 1, 1)."""

    @classmethod
    def of(cls, run: Run, constant: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the one for the mean and std of a run; ``constant`` puts them on the devices."""
        channels, *spatial = run.model.sizes.input_shape
        mean, std = map(torch.tensor, run.config.data.preprocessing.of_channels(channels))
        by_channel = (-1, *[1] * len(spatial))
        values = 1 / (_WHITE * std), -mean / std
        return cls(*(constant(each.view(by_channel)) for each in values))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype != torch.uint8:
            return images
        return images.float() * self.scale + self.offset


# ------------------------------------------------------------------------------------------------
# Mixes the images of a batch with each other, and their labels, on the devices: timm's ``Mixup``.
#
# An image is mixed with another one on the same device, as each process of timm's does: the first
# with the last, the second with the last but one. So nothing has to be sent between devices. How
# much of which, all images of a pass have in common. These few numbers come from the host; shapes
# and operations are always the same, whether it is mixup, cutmix or neither.


_STREAM = -1  # no process draws dropout from it


class Mix(NamedTuple):
    """The numbers of one pass: what stays of an image, outside of a box that is another's."""

    share: float
    """Of each image in what it becomes, outside of the box."""
    label: float
    """Of each image's label in what it becomes."""
    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0
    """The box: rows from ``top`` to before ``bottom``, columns likewise; empty for mixup."""


def draw_mix(config: LossConfig, height: int, width: int) -> Mix:
    """Return numbers drawn from NumPy's global generator, as timm's ``Mixup`` draws them.

    These are those of its mode "batch", for images of ``height`` x ``width`` pixels.
    """
    if np.random.rand() >= config.mixup_prob:
        return Mix(1.0, 1.0)
    by_cutmix = config.cuts and (
        config.mixup == 0 or bool(np.random.rand() < config.mixup_switch_prob)
    )
    if not by_cutmix:
        share = float(np.random.beta(config.mixup, config.mixup))
        return Mix(share, share)
    alpha = config.cutmix or 1.0  # 1 is timm's for boxes of --cutmix_minmax
    share = float(np.random.beta(alpha, alpha))
    if share == 1:
        return Mix(1.0, 1.0)
    box, label = cutmix_bbox_and_lam((height, width), share, ratio_minmax=config.cutmix_minmax)
    top, bottom, left, right = map(int, box)
    return Mix(1.0, float(label), top, bottom, left, right)


class Mixing:
    """Draws how the images of each pass are mixed, and mixes them."""

    def __init__(
        self, run: Run, constant: Callable[[torch.Tensor], torch.Tensor], rows: range
    ) -> None:
        """Take what puts small tensors on the devices, and the rows of images that are there, as a
        backend has both."""
        self._config, self._seed = run.config.loss, run.config.seed
        self._constant, self._rows = constant, rows
        self._spatial = run.model.sizes.input_shape[1:]
        self._of_device = run.config.data.pass_size // run.mesh.batch_parts

    def draw(self, pass_index: int) -> torch.Tensor:
        """Return the numbers of a ``Mix``, on the devices; they follow from the seed and the number
        of the pass since the start of training."""
        with drawn_from(pass_seed(self._seed, pass_index, _STREAM) % 2**32):
            mix = draw_mix(self._config, *self._spatial[-2:])
        # One tensor: one transfer, and no number that a graph would be compiled for.
        return self._constant(torch.tensor(mix, dtype=torch.float32))

    def images(self, images: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """Return mixed images, (images, channels, rows, columns), fp32; of volumes (images,
        channels, slices, rows, columns)."""
        share, _, *box = mix.unbind()
        if self._config.cuts:
            share = share * ~self._inside(images, *box)
        return images * share + self._partners(images) * (1 - share)

    def labels(self, labels: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """Return mixed labels, (images, classes)."""
        return labels * mix[1] + self._partners(labels) * (1 - mix[1])

    def _inside(
        self,
        images: torch.Tensor,
        top: torch.Tensor,
        bottom: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
    ) -> torch.Tensor:
        """Return which pixels are in the box, (rows, columns), of the rows that are here."""
        height, width = images.shape[-2:]
        first = self._rows.start if height < self._spatial[0] else 0
        rows = torch.arange(first, first + height, device=images.device)
        columns = torch.arange(width, device=images.device)
        is_row, is_column = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
        return is_row[:, None] & is_column

    def _partners(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each is mixed with. In the one tensor that SPMD has, a device's images are
        next to each other: seen as (devices, images of each), nothing moves between devices."""
        return x.unflatten(0, (-1, self._of_device)).flip(1).flatten(0, 1)


# ------------------------------------------------------------------------------------------------
# Distillation: a trained, frozen teacher is shown the same images (DeiT, arXiv 2012.12877).


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


# ------------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """What a model is to answer."""

    labels: torch.Tensor
    """(images,), or their shares (images, classes)."""
    taught: torch.Tensor | None = None
    """What the teacher answers: logits (images, classes)."""


def _quietly(line: str) -> None: ...


class Objective:
    """Prepares images on the devices, as a part of the step, and says what is to become less."""

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None] = _quietly) -> None:
        """Put on the devices what it takes, and ``say`` what that is; to be made before the first
        step is recorded."""
        config = run.config.loss
        self.normalize = Normalize.of(run, backend.constant)
        self._mixing = None
        if config.mixes:
            self._mixing = Mixing(run, backend.constant, backend.image_rows)
        self._of_classes = config.mixes or config.bce_loss
        self._classes, self._smoothing = run.model.sizes.num_classes, config.smoothing
        self._loss = training_loss(config)
        self._teacher = Teacher(run, backend, say) if run.teacher else None
        self._taught_loss, self._alpha = distillation_loss(config), config.distillation_alpha

    def example(
        self, images: torch.Tensor, labels: torch.Tensor, pass_index: int
    ) -> tuple[torch.Tensor, Targets]:
        """Return what the model is shown of a micro-batch, and what it is to answer.

        ``pass_index``: the number of the pass since the start of training.
        """
        images = self.normalize(images)
        if self._of_classes:
            labels = smoothed(labels, self._classes, self._smoothing)
        if self._mixing is not None:
            mix = self._mixing.draw(pass_index)
            images, labels = self._mixing.images(images, mix), self._mixing.labels(labels, mix)
        return images, Targets(labels, self._teacher(images) if self._teacher else None)

    def loss(self, logits: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the mean loss of (images, classes) logits, a scalar in fp32."""
        logits = logits.float()
        loss = self._loss(logits, targets.labels)
        if targets.taught is None:
            return loss
        taught = self._taught_loss(logits, targets.taught)
        return (1 - self._alpha) * loss + self._alpha * taught


def training_loss(config: LossConfig) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of logits and targets, as timm's training script chooses it.

    Where labels are mixed, or classes each for themselves, the targets are smoothed already.
    """
    if config.bce_loss:
        return BinaryCrossEntropy(
            target_threshold=config.bce_target_thresh, sum_classes=config.bce_sum
        )
    if config.mixes:
        return SoftTargetCrossEntropy()
    if config.smoothing:
        return LabelSmoothingCrossEntropy(config.smoothing)
    return F.cross_entropy


def smoothed(labels: torch.Tensor, classes: int, smoothing: float) -> torch.Tensor:
    """Return each class's share of each label, (images, classes), fp32, as timm's ``mixup_target``
    has it; by comparing, which needs no scatter on the devices."""
    other = smoothing / classes
    is_label = labels[:, None] == torch.arange(classes, device=labels.device)
    return is_label * (1.0 - smoothing) + other
