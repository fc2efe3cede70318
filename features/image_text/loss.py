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
    """(others, width): a part of the texts of each replica, or of its images times the scale."""
    logits: torch.Tensor
    """(own, others), of those that do not belong together. All other logits are so small that they
    count for nothing."""
    largest: torch.Tensor
    """The largest logit of each of its own, (own,), what it belongs to included."""


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
        own_ids, ids = given["own_ids"], given["ids"]
        # In place: on CPUs, new memory of this size takes as long as what is computed.
        logits = (given["own"] @ others.T).add_(given["bias"])
        if self.padded:
            logits.masked_fill_((own_ids == PADDING) | (ids == PADDING), _ABSENT)
        largest = logits.amax(1)
        logits.masked_fill_(own_ids == ids, _ABSENT)
        return self.update(sums, _Chunk(others, logits, largest), given)


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
        self.own = own["own"]
        self.sums: dict[str, torch.Tensor] = {}
        """What was added up for each of its own, (own,); "gradient" is (own, width), of ``own``.
        "largest" is the largest logit, "largest_other" that of those it does not belong to."""

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
        if name == "gradient":
            return torch.zeros_like(self.own)
        is_largest = name in ("largest", "largest_other", "logsumexp")
        return self.own.new_full(self.own.shape[:1], _ABSENT if is_largest else 0.0)

    def is_pair(self) -> torch.Tensor:
        """Return which of its own are no padding, boolean, (own,)."""
        return self._own["own_ids"][:, 0] != PADDING

    def nearest(self) -> torch.Tensor:
        """Return how many of its own are more similar to what they belong to than to all others, a
        scalar. Of equally similar ones, wrong ones count first."""
        is_nearest = self.sums["largest"] > self.sums["largest_other"]
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
        own_ids, bias = ids.flatten()[:, None], pairs.bias.flatten()[:, None]
        scaled = pairs.scale[..., None] * pairs.images
        self.images = _Side(
            replicas,
            rows,
            {"own": scaled.flatten(0, 1), "own_ids": own_ids, "bias": bias},
            {"others": pairs.texts, "ids": all_ids},
            padded=padded,
        )
        self.texts = _Side(
            replicas,
            rows,
            {"own": pairs.texts.flatten(0, 1), "own_ids": own_ids},
            {"others": scaled, "ids": all_ids, "bias": replicas.all_gather(pairs.bias)},
            padded=padded,
        )
        matching = (scaled * pairs.texts).sum(-1) + pairs.bias
        self.matching = matching.where(ids != PADDING, 0.0).flatten()
        """The logits of pairs that belong together, (own,); 0 for padding."""

    def by_replica(self, values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(0, (self.here, -1))

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all replicas, (replicas, pairs), given those here, (own,)."""
        return self._replicas.all_gather(self.by_replica(values))

    def result(
        self, loss: torch.Tensor, count: torch.Tensor | int, of_matching: torch.Tensor
    ) -> Contrast:
        """Return all, given the loss. ``of_matching``: the gradients of the logits of pairs that
        belong together, (own,), times ``count`` as those in the sums."""
        images, texts = self.images, self.texts
        of_matching = of_matching.where(images.is_pair(), 0.0)
        factor = self.count / self.here / count
        if "of_bias" in images.sums:
            of_bias = images.sums["of_bias"] + of_matching
        else:  # CLIP's softmax does not depend on it
            of_bias = torch.zeros_like(of_matching)
        of_scaled, of_texts, of_bias = (
            self.by_replica(factor * each)
            for each in (
                images.sums["gradient"] + of_matching[:, None] * texts.own,
                texts.sums["gradient"] + of_matching[:, None] * images.own,
                of_bias,
            )
        )
        of_scale = (of_scaled * self._pairs.images).sum(-1)
        gradients = Pairs(self._pairs.scale[..., None] * of_scaled, of_texts, of_scale, of_bias)
        nearest = torch.stack([side.nearest() for side in (images, texts)])
        return Contrast(loss, gradients, factor * nearest)


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
    images.add(_add_siglip, ["largest", "largest_other", "loss", *of_logits])
    of_matching = F.softplus(-both.matching).where(images.is_pair(), 0.0)
    loss = (images.sums["loss"] + of_matching).sum() * (both.count / both.here) / count
    if not gradients:
        return Contrast(loss, None, None)
    texts.add(_add_siglip, ["largest", "largest_other", "gradient"])
    return both.result(loss, count, -(-both.matching).sigmoid())


def _add_siglip(sums: Tensors, chunk: _Chunk, given: Tensors) -> Tensors:
    found = _largest(sums, chunk)
    if "loss" in sums:
        found["loss"] = sums["loss"] + F.softplus(chunk.logits).sum(1)
    if "gradient" in sums:
        gradient = chunk.logits.sigmoid()
        if "of_bias" in sums:
            found["of_bias"] = sums["of_bias"] + gradient.sum(1)
        found["gradient"] = sums["gradient"] + gradient @ chunk.others
    return found


def _largest(sums: Tensors, chunk: _Chunk) -> dict[str, torch.Tensor]:
    found = {"largest": chunk.largest, "largest_other": chunk.logits.amax(1)}
    return {name: torch.maximum(sums[name], values) for name, values in found.items()}


# -- CLIP ------------------------------------------------------------------------------------------


def _clip(both: _Both, count: torch.Tensor | int, *, gradients: bool) -> Contrast:
    """Return the mean of the cross-entropies of images' texts among all texts, and of texts' images
    among all images.

    A first pass over the chunks of each side finds the sums that softmax divides by, a second one
    computes the gradients.
    """
    sides, matching = (both.images, both.texts), both.matching
    totals = []
    for side in sides:
        side.add(_add_logsumexp, ["largest", "largest_other", "logsumexp"])
        totals.append(torch.stack([side.sums["logsumexp"], matching]).logsumexp(0))  # 0 for padding
    loss = (
        torch.stack([t - matching for t in totals]).sum() * (both.count / both.here) / (2 * count)
    )
    if not gradients:
        return Contrast(loss, None, None)
    for side, total, other_total in zip(sides, totals, reversed(totals), strict=True):
        everywhere = both.all_gather(other_total)
        side.add(_add_clip, ["gradient"], {"total": total[:, None]}, {"other_total": everywhere})
    shares = torch.stack([(matching - total).exp() for total in totals]).sum(0)
    return both.result(loss, count, (shares - 2) / 2)


def _add_logsumexp(sums: Tensors, chunk: _Chunk, given: Tensors) -> Tensors:
    """Add log(sum(exp(logits))) of those that do not belong together."""
    found = chunk.logits.logsumexp(1)
    total = torch.stack([sums["logsumexp"], found]).logsumexp(0)
    return _largest(sums, chunk) | {"logsumexp": total}


def _add_clip(sums: Tensors, chunk: _Chunk, given: Tensors) -> Tensors:
    shares = (
        (chunk.logits - given["total"]).exp_().add_((chunk.logits - given["other_total"]).exp_())
    )
    return {"gradient": sums["gradient"] + (shares @ chunk.others) / 2}


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
