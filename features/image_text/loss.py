"""The losses of SigLIP (arXiv 2303.15343) and CLIP (arXiv 2103.00020) over all devices.

Both compare each image with each text of the global batch. No device ever has the matrix of these
logits, its gradient, or all texts: a device compares its own images with some texts of every
replica at a time, and its own texts with some images of every replica, and computes the gradients
at once, so nothing of a chunk is kept for a backward pass. Results are those of one device with all
pairs, but for the order of sums.

Embeddings are exchanged in fp32: they are small beside the weights of towers that need FSDP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from data.batch import PADDING
from training.backend import ScanBody, Tensors

_CHUNK_BYTES = 24 * 2**20
"""About what a device holds of a chunk: its logits and their gradients, its texts in fp32 and in
another precision. PyTorch, which fuses nothing, holds about three times as much."""
_FP32 = 4
_ABSENT = -1e9
"""The logit of a pair that does not exist: exp(_ABSENT) is 0. Not infinite, as the difference of
two infinite numbers is not a number."""


class Pairs(NamedTuple):
    """Embeddings of pairs, or gradients of a loss with respect to them. All have two dimensions in
    front: the replicas whose samples this process has (``Backend.replicas_here``), and the pairs of
    each of them."""

    images: torch.Tensor
    """(replicas here, pairs, width), fp32, of length 1."""
    texts: torch.Tensor
    """The same of the texts."""
    scale: torch.Tensor
    """(replicas here, pairs), fp32: what each image's products with texts are multiplied by."""
    bias: torch.Tensor
    """(replicas here, pairs), fp32: what is added to them."""


class Contrast(NamedTuple):
    """What comes of comparing all pairs. The mean over replicas of each is that over all pairs, as
    that of the value of ``Objective.loss``."""

    loss: torch.Tensor
    """A scalar."""
    gradients: Pairs | None
    nearest: torch.Tensor | None
    """(2,), fp32: the share of images whose own text is more similar than all other texts, and the
    share of texts whose own image is."""


class Replicas(Protocol):
    """The operations of a ``Backend`` that the losses need."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor: ...

    def scan(
        self, body: ScanBody, state: Tensors, shared: Tensors, stacked: Tensors
    ) -> Tensors: ...


@torch.no_grad()
def contrast(
    kind: str,
    pairs: Pairs,
    ids: torch.Tensor,
    count: torch.Tensor | int,
    replicas: Replicas,
    *,
    padded: bool = False,
    gradients: bool = True,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Contrast:
    """Return the loss, the gradients of its mean over replicas, and how many find their own; the
    latter two are None without ``gradients``.

    ``kind``: "siglip" or "clip". ``ids``: (replicas here, pairs), the number of each pair, int32.
    ``count``: the number of pairs of all replicas. ``padded``: some pairs are padding, with the
    number PADDING.
    """
    both = _Both(pairs, ids, replicas, padded=padded, chunk_bytes=chunk_bytes)
    return (_siglip if kind == "siglip" else _clip)(both, count, gradients=gradients)


def loss_by_chance(kind: str, pairs: int) -> float:
    """Return the smallest loss of so many ``pairs``, 2 or more, if all similarities are equal.

    Each softmax of CLIP is then 1 / pairs. SigLIP's best logit gives each pair that probability.
    """
    if kind == "clip":
        return math.log(pairs)
    return math.log(pairs) - (pairs - 1) * math.log1p(-1 / pairs)


class _Chunk(NamedTuple):
    others: torch.Tensor
    """(others, width): texts of all replicas, a part of those of each, or images."""
    scale: torch.Tensor
    """What the products with them were multiplied by, (own, 1) or (others,)."""
    logits: torch.Tensor
    """(own, others); those of absent pairs are so small that they count for nothing."""
    matches: torch.Tensor
    """Which pairs belong together, boolean."""

    def divide(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits of pairs that belong together, (own,), 0 where there is none; all
        others, (own, others); and the largest of these, (own,)."""
        matching = self.logits.where(self.matches, 0.0).sum(1)
        different = self.logits.masked_fill(self.matches, _ABSENT)
        return matching, different, different.amax(1)

    def gradient(self, of_logits: torch.Tensor) -> torch.Tensor:
        """Return the gradient of its own, (own, width), that follows from that of the logits."""
        return (self.scale * of_logits) @ self.others


_Update = Callable[[Tensors, _Chunk, Tensors], Tensors]
"""A function (sums, chunk, what ``_Compare`` is given) -> the sums with those of the chunk."""


@dataclass(frozen=True)
class _Compare:
    """Compares the pairs here with a chunk of others, and adds what follows to the sums so far.

    XLA compiles it once for all chunks, so it reads no tensors but its arguments; and objects that
    are equal compute the same.
    """

    replicas: Replicas
    padded: bool
    update: _Update

    def __call__(self, sums: Tensors, given: Tensors) -> Tensors:
        others = self.replicas.all_gather(given["others"]).flatten(0, 1)
        own_ids, ids, scale = given["own_ids"], given["ids"], given["scale"]
        logits = scale * (given["own"] @ others.T) + given["bias"]
        matches = own_ids == ids
        if self.padded:
            absent = (own_ids == PADDING) | (ids == PADDING)
            matches = matches & ~absent
            logits = logits.masked_fill(absent, _ABSENT)
        return self.update(sums, _Chunk(others, scale, logits, matches), given)


class _Side:
    """The images here with all texts, in chunks, or the texts here with all images.

    Knows nothing of the other side: of two objects that refer to each other, Python frees the
    tensors late, and XLA computes those that are not freed as outputs of the step.
    """

    def __init__(
        self, replicas: Replicas, rows: int, own: Tensors, others: Tensors, *, padded: bool
    ) -> None:
        """``rows``: how many pairs of each replica a chunk has. ``own``, ``others``: what
        ``_Compare`` is given of the pairs here, (own, ...), and of those that they are compared
        with, (replicas, pairs, ...)."""
        self._replicas, self._rows, self._padded = replicas, rows, padded
        self._own, self._others = own, others
        self.sums: dict[str, torch.Tensor] = {}
        """What was added up for each of its own, (own,); "gradient" is (own, width). "matching" is
        the logit with what it belongs to, 0 for padding; "largest" that of all others."""

    def add(
        self,
        update: _Update,
        names: Sequence[str],
        own: Tensors = MappingProxyType({}),
        others: Tensors = MappingProxyType({}),
    ) -> None:
        """Add up the ``sums`` of these names over all chunks. ``update`` is given ``own`` and
        ``others``, too."""
        body = _Compare(self._replicas, self._padded, update)
        own, others = {**self._own, **own}, {**self._others, **others}
        sums: Tensors = {name: self._first(name) for name in names}
        pairs = others["ids"].shape[1]
        rest = pairs % self._rows  # the last chunk, if it is smaller
        parts = [(slice(pairs - rest), self._rows), (slice(pairs - rest, pairs), rest)]
        for part, rows in parts if rest else parts[:1]:
            stacked = {name: _in_chunks(x[:, part], rows) for name, x in others.items()}
            sums = self._replicas.scan(body, sums, own, stacked)
        self.sums |= sums

    def _first(self, name: str) -> torch.Tensor:
        own = self._own["own"]
        if name == "gradient":
            return torch.zeros_like(own)
        return own.new_full(own.shape[:1], _ABSENT if name in ("largest", "logsumexp") else 0.0)

    def is_pair(self) -> torch.Tensor:
        """Return which of its own are no padding, boolean, (own,)."""
        return self._own["own_ids"][:, 0] != PADDING

    def nearest(self) -> torch.Tensor:
        """Return how many of its own are more similar to what they belong to than to all others, a
        scalar. Of equally similar ones, wrong ones count first."""
        is_nearest = self.sums["matching"] > self.sums["largest"]
        return (is_nearest & self.is_pair()).sum().float()


def _in_chunks(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Return (chunks, replicas, rows, width) of (replicas, pairs, width), or (chunks, replicas x
    rows) of (replicas, pairs)."""
    chunks = values.unflatten(1, (-1, rows)).movedim(1, 0)
    return chunks.flatten(1) if values.dim() == 2 else chunks


class _Both:
    """All pairs of images and texts, from both sides.

    A device computes the gradients of its own images from all texts, and those of its own texts
    from all images. So it computes each logit twice, which is little, and no gradients are summed
    over devices: XLA would hold those of all texts to sum them (docs/evidence/image_text.md).
    """

    def __init__(
        self,
        pairs: Pairs,
        ids: torch.Tensor,
        replicas: Replicas,
        *,
        padded: bool,
        chunk_bytes: int,
    ) -> None:
        self._pairs, self._replicas = pairs, replicas
        all_ids = replicas.all_gather(ids)
        self.count, (self.here, own) = len(all_ids), ids.shape
        rows = rows_of_chunk(self.count, own, pairs.images.shape[-1], chunk_bytes)
        factors = {"scale": pairs.scale, "bias": pairs.bias}
        own_ids = ids.flatten()[:, None]
        self.images = _Side(
            replicas,
            rows,
            {"own": pairs.images.flatten(0, 1), "own_ids": own_ids}
            | {name: factor.flatten()[:, None] for name, factor in factors.items()},
            {"others": pairs.texts, "ids": all_ids},
            padded=padded,
        )
        self.texts = _Side(
            replicas,
            rows,
            {"own": pairs.texts.flatten(0, 1), "own_ids": own_ids},
            {"others": pairs.images, "ids": all_ids}
            | {name: replicas.all_gather(factor) for name, factor in factors.items()},
            padded=padded,
        )

    def by_replica(self, values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(0, (self.here, -1))

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all replicas, (replicas, pairs), given those here, (own,)."""
        return self._replicas.all_gather(self.by_replica(values))

    def result(self, loss: torch.Tensor, count: torch.Tensor | int) -> Contrast:
        """Return all, given the loss, and sums of gradients times ``count``."""
        factor, images, texts = self.count / self.here / count, self.images.sums, self.texts.sums
        of_bias = images.get("of_bias", torch.zeros_like(images["matching"]))
        of_images, of_texts, of_bias = (
            self.by_replica(factor * each)
            for each in (images["gradient"], texts["gradient"], of_bias)
        )
        # Images are only used multiplied by the scale.
        of_scale = (of_images * self._pairs.images).sum(-1) / self._pairs.scale
        nearest = torch.stack([side.nearest() for side in (self.images, self.texts)])
        return Contrast(loss, Pairs(of_images, of_texts, of_scale, of_bias), factor * nearest)


def rows_of_chunk(replicas: int, pairs: int, width: int, chunk_bytes: int = _CHUNK_BYTES) -> int:
    """Return how many pairs of each replica, which has so many ``pairs``, a chunk has."""
    bytes_of_row = 2 * _FP32 * replicas * (pairs + width)
    fewest = -(-pairs // max(1, chunk_bytes // bytes_of_row))
    # Chunks of one size, if that makes them at most twice as many.
    even = (chunks for chunks in range(fewest, 2 * fewest) if pairs % chunks == 0)
    return -(-pairs // next(even, fewest))


# -- SigLIP ----------------------------------------------------------------------------------------


def _siglip(both: _Both, count: torch.Tensor | int, *, gradients: bool) -> Contrast:
    """Return the sum of -log sigmoid(z logit) over all pairs, with z = 1 for a pair that belongs
    together, otherwise -1, divided by the number of images."""
    images, texts = both.images, both.texts
    of_logits = ["of_bias", "gradient"] if gradients else []
    images.add(_add_siglip, ["matching", "largest", "loss", *of_logits])
    of_matching = F.softplus(-images.sums["matching"]).where(images.is_pair(), 0.0)
    loss = (images.sums["loss"] + of_matching).sum() * (both.count / both.here) / count
    if not gradients:
        return Contrast(loss, None, None)
    texts.add(_add_siglip, ["matching", "largest", "gradient"])
    return both.result(loss, count)


def _add_siglip(sums: Tensors, chunk: _Chunk, given: Tensors) -> Tensors:
    matching, different, largest = chunk.divide()
    found = {
        "matching": sums["matching"] + matching,
        "largest": torch.maximum(sums["largest"], largest),
    }
    if "loss" in sums:
        found["loss"] = sums["loss"] + F.softplus(different).sum(1)
    if "gradient" in sums:
        of_matching = -(-matching).sigmoid()[:, None]
        gradient = torch.where(chunk.matches, of_matching, different.sigmoid())
        if "of_bias" in sums:
            found["of_bias"] = sums["of_bias"] + gradient.sum(1)
        found["gradient"] = sums["gradient"] + chunk.gradient(gradient)
    return found


# -- CLIP ------------------------------------------------------------------------------------------


def _clip(both: _Both, count: torch.Tensor | int, *, gradients: bool) -> Contrast:
    """Return the mean of the cross-entropies of images' texts among all texts, and of texts' images
    among all images.

    A first pass over the chunks of each side finds the sums that softmax divides by, a second one
    computes the gradients.
    """
    sides = both.images, both.texts
    totals = []
    for side in sides:
        side.add(_add_logsumexp, ["matching", "largest", "logsumexp"])
        with_matching = torch.stack([side.sums["logsumexp"], side.sums["matching"]])
        totals.append(with_matching.logsumexp(0))  # 0 for padding
    here = torch.stack([t - side.sums["matching"] for t, side in zip(totals, sides, strict=True)])
    loss = here.sum() * (both.count / both.here) / (2 * count)
    if not gradients:
        return Contrast(loss, None, None)
    for side, total, other_total in zip(sides, totals, reversed(totals), strict=True):
        everywhere = both.all_gather(other_total)
        side.add(_add_clip, ["gradient"], {"total": total[:, None]}, {"other_total": everywhere})
    return both.result(loss, count)


def _add_logsumexp(sums: Tensors, chunk: _Chunk, given: Tensors) -> Tensors:
    """Add log(sum(exp(logits))) of those that do not belong together."""
    matching, different, largest = chunk.divide()
    found = (different - largest[:, None]).exp().sum(1).log() + largest
    return {
        "matching": sums["matching"] + matching,
        "largest": torch.maximum(sums["largest"], largest),
        "logsumexp": torch.stack([sums["logsumexp"], found]).logsumexp(0),
    }


def _add_clip(sums: Tensors, chunk: _Chunk, given: Tensors) -> Tensors:
    logits = chunk.logits
    shares = (logits - given["total"]).exp() + (logits - given["other_total"]).exp()
    gradient = torch.where(chunk.matches, shares - 2, shares) / 2
    return {"gradient": sums["gradient"] + chunk.gradient(gradient)}


# -- The loss of embeddings in a graph -------------------------------------------------------------


class WithGradients(torch.autograd.Function):
    """The value of a loss whose gradients with respect to ``tensors`` are already known."""

    @staticmethod
    def forward(ctx, value: torch.Tensor, gradients: Pairs, *tensors: torch.Tensor):
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return None, None, *(grad * gradient for gradient in ctx.saved_tensors)
