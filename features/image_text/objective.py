"""Image-text pre-training: embeddings of matching images and texts become alike, others unlike.

With ``--grad_accum_steps``, each image is still compared with all texts of the global batch
(GradCache, arXiv 2101.06983): the embeddings of all micro-batches are computed first, without
gradients, then the gradients of the loss with respect to them. The second pass over a micro-batch
only continues these to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from data.batch import PADDING, Batch
from features.image_text.config import ImageTextConfig
from features.image_text.loss import Pairs, WithGradients, contrast, loss_by_chance, rows_of_chunk
from features.image_text.measures import PairRetrieval
from features.image_text.model import MAX_LOGIT_SCALE, Embedded, ImageTextSpec
from training.backend import Backend
from training.data import input_of
from training.objectives.base import Measure, Objective
from training.schedule import StepRates

if TYPE_CHECKING:
    from training.resolve import Run

_ROUNDING = 1e-6


class ImageTextPairs(Objective):
    """Trains both towers by the loss of SigLIP or CLIP over all pairs of the global batch."""

    takes_positions = True

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        spec, data = run.model, run.config.data
        assert isinstance(spec, ImageTextSpec)
        self._kind, self._backend = run.config.objective.objective, backend
        self._image_input = input_of(run, backend.constant)
        self._pairs, self._segments = data.batch_size, spec.segments
        self._counts: list[torch.Tensor] = []
        """Of each micro-batch of sequences, the numbers of images and of tokens."""
        self._ahead: list[tuple[torch.Tensor, Pairs]] = []
        """For each micro-batch to come, the step's loss and the gradients of its embeddings."""
        self.measured_last: PairRetrieval | None = None
        """The measure of the last evaluation, until it is drawn."""
        self._parts: list[torch.Tensor] = []
        """For each micro-batch, scale and bias."""
        self._nearest: torch.Tensor | None = None
        """Of the step, ``Contrast.nearest``."""
        text, flags, replicas = (
            spec.config.text,
            run.config.of(ImageTextConfig),
            run.mesh.batch_shards,
        )
        of_replica = data.batch_size // replicas * (spec.segments or 1)
        rows = rows_of_chunk(replicas, of_replica, spec.embedding_width)
        locked = "image" if flags.lock_image else "text" if flags.lock_text else ""
        say(
            f"objective: {self._kind}, text tower with {text.depth} blocks {text.width} wide, "
            f"{text.length} tokens"
            + (f", {locked} tower locked" if locked else "")
            + f"; {replicas * rows} of {replicas * of_replica} texts compared at a time"
        )
        if self._segments is None:  # else the number of pairs varies
            chance = loss_by_chance(self._kind, data.batch_size)
            say(f"objective: a loss of {chance:.2f} is chance: no pair differs from another")
        if data.grad_accum_steps > 1:
            say(
                f"objective: --grad_accum_steps {data.grad_accum_steps} compares all pairs of the "
                "batch, at the cost of one more forward pass"
            )

    def begin_step(self, rates: StepRates) -> None:
        self._ahead.clear()
        self._parts.clear()
        self._counts.clear()

    def before_micro_batches(
        self, model: nn.Module, micro_batches: Sequence[Batch], first_index: int
    ) -> None:
        if len(micro_batches) == 1:
            return
        found: list[tuple[Pairs, torch.Tensor]] = []
        for index, batch in enumerate(micro_batches, first_index):
            self._backend.begin_micro_batch(index)
            with torch.no_grad():
                found.append((self._embed(model, batch), self._ids(batch)))
            self._backend.end_step()
        all_pairs, all_ids = zip(*found, strict=True)
        pairs = Pairs(*(torch.cat(parts, dim=1) for parts in zip(*all_pairs, strict=True)))
        count = len(micro_batches)
        loss, gradients = self._loss(pairs, torch.cat(all_ids, dim=1))
        # The step divides the sum over micro-batches by their number.
        split = zip(*((count * each).chunk(count, dim=1) for each in gradients), strict=True)
        self._ahead = [(loss, Pairs(*parts)) for parts in split]
        self._backend.end_step()

    def loss(self, model: nn.Module, batch: Batch, micro_batch_index: int) -> torch.Tensor:
        pairs = self._embed(model, batch)
        if self._ahead:
            loss, gradients = self._ahead.pop(0)
        else:
            detached = Pairs(*(each.detach() for each in pairs))
            loss, gradients = self._loss(detached, self._ids(batch))
        if self._segments is not None:
            images, tokens = self._ids(batch) != PADDING, batch["segment_ids"] > 0
            self._counts.append(torch.stack([images.sum(), tokens.sum()]).float())
        # Stacked first: XLA computes the mean of a view of a parameter by another graph in step 1.
        self._parts.append(torch.stack([pairs.scale.detach(), pairs.bias.detach()]).mean((1, 2)))
        return WithGradients.apply(loss, gradients, *pairs)

    def _embed(self, model: nn.Module, batch: Batch) -> Pairs:
        """Return the embeddings of a batch, by replica."""
        texts = batch["text"].flatten(0, -2)  # of sequences: of all of their images
        embedded = Embedded(*model((self._image_input(batch), texts)))
        return Pairs(*(self._by_replica(each) for each in embedded))

    def _by_replica(self, values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(0, (self._backend.replicas_here, -1))

    def _ids(self, batch: Batch) -> torch.Tensor:
        """Return the number of each pair of a batch in the global batch, by replica; PADDING for a
        place of a sequence without an image."""
        numbers = batch["position"].to(torch.int32)
        if self._segments is not None:
            place = torch.arange(self._segments, dtype=torch.int32, device=numbers.device)
            is_there = (batch["segment_ids"][:, None] == place[:, None] + 1).any(2)
            numbers = torch.where(is_there, numbers[:, None] * self._segments + place, PADDING)
            numbers = numbers.flatten()
        return self._by_replica(numbers)

    def _loss(self, pairs: Pairs, ids: torch.Tensor) -> tuple[torch.Tensor, Pairs]:
        # Divided by the number of images, of which sequences have another number in each step.
        padded = self._segments is not None
        count = self._backend.sum((ids != PADDING).sum().float()) if padded else self._pairs
        found = contrast(self._kind, pairs, ids, count, self._backend, padded=padded)
        loss, gradients, self._nearest = found
        assert gradients is not None
        if self._kind == "clip":
            # At its limit, the scale does not grow: the gradient of all replicas decides.
            grows = self._backend.sum(gradients.scale.sum()) < 0
            stays = grows & (pairs.scale >= MAX_LOGIT_SCALE * (1 - _ROUNDING))
            gradients = gradients._replace(scale=gradients.scale.masked_fill(stays, 0.0))
        return loss, gradients

    def parts(self) -> dict[str, torch.Tensor]:
        mean = sum(self._parts[1:], start=self._parts[0]) / len(self._parts)
        assert self._nearest is not None
        all_means = self._backend.mean(torch.cat([mean, 100 * self._nearest]))
        scale, bias, to_text, to_image = all_means.unbind()
        found = {
            "logit_scale": scale,
            "batch_image_to_text_r1": to_text,
            "batch_text_to_image_r1": to_image,
        }
        if self._kind == "siglip":
            found["logit_bias"] = bias
        if self._counts:
            images, tokens = self._backend.sum(torch.stack(self._counts).sum(0)).unbind()
            found |= {"images": images, "tokens": tokens}
        return found

    def measure(self, images: int = 0) -> Measure:
        self.measured_last = PairRetrieval(self._kind, self._image_input, self._backend)
        return self.measured_last
