"""Self-distillation: DINO's loss for class tokens, iBOT's for masked patches, KoLeo, and DINOv3's
Gram loss (``gram.py``).

Formulas follow DINOv2 (arXiv 2304.07193), section 4, and its code where the paper leaves details
open. All are in fp32. The teacher is the EMA of the student (``Backend.teacher``); with
``--teacher``, it is a trained, larger model, and the EMA is only evaluated (DINOv3, section 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from data.batch import Batch
from features.dino.config import DinoConfig
from features.dino.crops import CropView, max_masked
from features.dino.gram import GramModel, gram_loss
from features.dino.model import Compared, Crops, DinoSpec
from training.backend import Backend
from training.data import dataset_request, normalizer
from training.objectives.base import Objective
from training.objectives.teacher import open_teacher
from training.schedule import StepRates

if TYPE_CHECKING:
    from training.resolve import Run

_ROUNDS = 3
"""Iterations of Sinkhorn and Knopp's algorithm."""
_EXPONENT = 60.0
"""The largest exponent of a sample's weight in it, so that sums fit in fp32."""
_EPS = 1e-8
"""The smallest distance between two class tokens, as in KoLeo's code."""


class SelfDistillation(Objective):
    """Trains the student to predict the teacher's output for other crops and for unmasked ones."""

    measured = False

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        spec, request = run.model, dataset_request(run)
        view = request.view
        assert isinstance(spec, DinoSpec)
        assert isinstance(view, CropView)
        self._config, self._backend = run.config.of(DinoConfig), backend
        self._average = backend.teacher
        sizes = [each.view for each in view.requests(request)] or [view]
        self._views = {each.grid: each for each in sizes if isinstance(each, CropView)}
        """The sizes of global crops that a step may have, by their grid of patches."""
        rows, columns = view.grid
        self._patch = request.size[0] // rows, request.size[1] // columns
        slots = max_masked(view.grid, view.mask_ratio)
        self._normalize = normalizer(run, backend.constant)
        self._temperature = 1.0
        """The teacher's, in this step."""
        self._parts: list[dict[str, torch.Tensor]] = []
        """For each pass of the step, the unweighted parts of its loss, and the teacher's
        entropy."""
        self._moments: list[torch.Tensor] = []
        """For each pass, ``token_moments`` of the student."""
        self._weights = {
            "loss_dino": 1.0,
            "loss_ibot": self._config.ibot_weight,
            "loss_koleo": self._config.koleo_weight,
            "loss_gram": self._config.gram_weight,
        }
        group, usual = self._config.koleo_group, DinoConfig.koleo_group
        adapted = ""
        if group != usual and "koleo_group" not in run.config.explicitly_set:
            adapted = (
                f", --koleo_group {group} because {usual} does not divide the images per device"
            )
        say(
            f"objective: dino, 2 global and {spec.local_crops} local crops, up to {slots} of "
            f"{spec.sizes.num_patches} patches masked"
            + (f", {len({*view.pairs})} pairs of sizes" if view.pairs else "")
            + adapted
        )
        self._gram: GramModel | None = None
        if self._config.gram_weights:
            self._gram = GramModel(run, backend, self._views, self._normalize, say)
        self._teacher = open_teacher(run, backend, say)

    def frozen_models(self) -> dict[str, nn.Module]:
        return {"teacher": self._teacher.model} if self._teacher else {}

    def begin_step(self, rates: StepRates) -> None:
        self._temperature = rates.teacher_temp
        self._parts.clear()
        self._moments.clear()

    def host_inputs(self, batch: Batch, micro_batch_index: int) -> Batch:
        # A vector, not a scalar: equal scalars would become one input of a compiled step.
        return {"teacher_temp": torch.tensor([self._temperature])}

    def end_step(self, step: int) -> None:
        if self._gram:
            self._gram.end_step(step)

    def loss(self, model: nn.Module, batch: Batch, micro_batch_index: int) -> torch.Tensor:
        config, mask = self._config, batch["mask"]
        temperature = self.host_input("teacher_temp", self._backend, batch, micro_batch_index)
        height, width = batch["global_crops"].shape[-2:]
        view = self._views[height // self._patch[0], width // self._patch[1]]
        crops = Crops(
            self._normalize(batch["global_crops"]),
            self._normalize(batch["local_crops"]) if config.local_crops else None,
            mask,
            max_masked(view.grid, view.mask_ratio),
            hides=True,
        )
        seen, teacher = crops._replace(local_crops=None, hides=False), self._teacher
        if teacher is not None:
            shown = seen._replace(global_crops=teacher.normalized(seen.global_crops))
            classes, patches = self._targets(teacher.model, shown, temperature)
        else:
            assert self._average is not None
            classes, patches = self._targets(self._average, seen, temperature)
        anchor = self._gram.anchor(view, seen, batch.get("gram_crops")) if self._gram else None
        student = Compared(*model(crops))  # nested FSDP returns a plain tuple

        parts = {"loss_dino": class_loss(student.classes.float() / config.student_temp, classes)}
        if config.ibot_weight:
            logits = student.patches.float() / config.student_temp
            parts["loss_ibot"] = patch_loss(logits, patches, mask)
        if config.koleo_weight:
            first, second = (
                koleo_loss(tokens.float(), config.koleo_group)
                for tokens in student.tokens.unbind(1)
            )
            parts["loss_koleo"] = first + second
        if anchor is not None:
            parts["loss_gram"] = gram_loss(student.patch_tokens.float(), anchor.float())
        measured = {name: part.detach() for name, part in parts.items()}
        self._parts.append(measured | {"teacher_entropy": entropy(classes)})
        self._moments.append(token_moments(student.tokens))
        weighted = [self._weights[name] * part for name, part in parts.items()]
        return sum(weighted[1:], start=weighted[0])

    @torch.no_grad()
    def _targets(
        self, teacher: nn.Module, seen: Crops, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's probabilities for class tokens, (images, 2, prototypes), and for
        masked patches, (images, slots, prototypes); zeros in empty slots."""
        taught, total = Compared(*teacher(seen)), self._backend.sum
        classes = sinkhorn(taught.classes.float().flatten(0, 1), temperature, total)
        present = taken(seen.mask, taught.patches.shape[1]).flatten()
        patches = sinkhorn(taught.patches.float().flatten(0, 1), temperature, total, present)
        return classes.view(taught.classes.shape), patches.view(taught.patches.shape)

    def parts(self) -> dict[str, torch.Tensor]:
        names, count = list(self._parts[0]), len(self._parts)
        # A single vector needs a single reduction over the replicas.
        passes = [
            torch.cat([torch.stack([parts[name] for name in names]), moments.flatten()])
            for parts, moments in zip(self._parts, self._moments, strict=True)
        ]
        means = self._backend.mean(sum(passes[1:], start=passes[0]) / count)
        spread = token_std(means[len(names) :].view(self._moments[0].shape))
        return dict(zip(names, means[: len(names)].unbind(), strict=True)) | {"token_std": spread}


def taken(mask: torch.Tensor, slots: int) -> torch.Tensor:
    """Return which slots contain a masked patch, (images, slots), boolean."""
    places = torch.arange(slots, dtype=torch.int32, device=mask.device)
    return places < mask.sum(1, keepdim=True, dtype=torch.int32)


def sinkhorn(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor],
    present: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return probabilities of prototypes, (samples, prototypes), such that over all samples of all
    replicas all prototypes are about equally probable.

    Sinkhorn and Knopp's algorithm, as in SwAV (arXiv 2006.09882): columns and rows of exp(logits /
    temperature) are alternately divided by their sums. ``logits``: fp32. ``total`` sums over the
    replicas. ``present``: a mask of the samples, (samples,); others become zeros.
    """
    logits = logits / temperature
    largest = logits.amax(1)
    here = torch.ones_like(largest) if present is None else present.to(largest.dtype)
    # At low temperatures, exponentials overflow fp32. So each row is computed relative to its
    # maximum, which becomes the row's weight in the first column sums. A factor common to all rows
    # cancels out.
    sum_of_largest, count = total(torch.stack([(largest * here).sum(), here.sum()]))
    exponents = (largest - sum_of_largest / _or_one(count)).clamp(-_EXPONENT, _EXPONENT)
    weights = exponents.exp()
    shares = (logits - largest[:, None]).exp() * here[:, None]
    for _ in range(_ROUNDS):
        shares = shares / _or_one(total((shares * weights[:, None]).sum(0)))
        shares = shares / _or_one(shares.sum(1, keepdim=True))
        weights = here
    return shares


def _or_one(sums: torch.Tensor) -> torch.Tensor:
    """Return sums to divide by, with 1 in place of 0. A small number instead would not work: XLA
    merges several divisions into one by a product, which would underflow to zero."""
    return sums.where(sums > 0, 1.0)


# -- indicators of a collapse, which are not part of the loss --------------------------------------


@torch.no_grad()
def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the mean entropy of the probabilities, (..., prototypes), divided by its maximum,
    log(prototypes): 1 if all prototypes are equally probable."""
    # 0 log 0 is 0.
    entropies = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1)
    return entropies.mean() / math.log(probabilities.shape[-1])


@torch.no_grad()
def token_moments(tokens: torch.Tensor) -> torch.Tensor:
    """Return the means over images of normalized class tokens, (images, crops, width), and of their
    squares: (2, crops, width), fp32."""
    units = F.normalize(tokens.float(), dim=-1)
    return torch.stack([units.mean(0), units.square().mean(0)])


@torch.no_grad()
def token_std(moments: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of normalized class tokens over images, averaged over crops and
    entries, times the square root of the width: 1 if tokens are spread evenly over the unit sphere,
    0 if all are equal (SimSiam, arXiv 2011.10566, figure 2, middle)."""
    mean, of_squares = moments
    variance = (of_squares - mean.square()).clamp(min=0)
    return variance.sqrt().mean() * math.sqrt(variance.shape[-1])


# -- the losses ------------------------------------------------------------------------------------


def class_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all pairs of a global crop seen by the teacher and a
    different crop seen by the student.

    ``logits``: the student's, divided by its temperature, (images, crops, prototypes), global crops
    first. ``targets``: (images, 2, prototypes).
    """
    logs = F.log_softmax(logits, dim=-1)
    count, crops = targets.shape[1], logits.shape[1]
    # For each crop, sum the targets of all other global crops: one sum over prototypes.
    every = targets.sum(1, keepdim=True)
    global_part = ((every - targets) * logs[:, :count]).sum((1, 2))
    local_part = (every * logs[:, count:]).sum((1, 2))
    return -(global_part + local_part).mean() / (count * (crops - 1))


def patch_loss(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of masked patches, averaged over the patches of an image, then over
    all global crops, as in DINOv2's code. One of the two global crops of an image has masked
    patches.

    ``logits``: the student's, divided by its temperature, (images, slots, prototypes). ``targets``:
    the same shape, zeros in slots without a patch. ``mask``: (images, patches).
    """
    losses = -(targets * F.log_softmax(logits, dim=-1)).sum(-1)
    return (losses.sum(1) / mask.sum(1).clamp(min=1)).mean() / 2


def koleo_loss(tokens: torch.Tensor, group: int) -> torch.Tensor:
    """Return the KoLeo loss (arXiv 1806.03198) of class tokens (images, width), in groups of
    adjacent images: the negative mean log distance to the nearest neighbor on the unit sphere."""
    tokens = F.normalize(tokens, dim=-1).unflatten(0, (-1, group))
    with torch.no_grad():
        cosines = tokens @ tokens.transpose(1, 2)
        itself = torch.eye(group, dtype=torch.bool, device=tokens.device)
        nearest = cosines.masked_fill(itself, -2.0).argmax(-1)
        places = torch.arange(group, device=tokens.device)
        chosen = (nearest[..., None] == places).to(tokens.dtype)
    # A product with ones and zeros, as in models/select.py: the gradient of a gather is a scatter.
    difference = tokens - chosen @ tokens
    return -(difference.square().sum(-1) + _EPS**2).sqrt().log().mean()
