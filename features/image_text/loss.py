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
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from data.batch import PADDING

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
    """The operation of a ``Backend`` that the losses need."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor: ...


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


class _Common(NamedTuple):
    """What both sides know of the pairs."""

    replicas: Replicas
    padded: bool
    rows: int
    """How many pairs of each replica a chunk has."""
    own_ids: torch.Tensor
    """The numbers of the pairs here, (own, 1)."""
    all_ids: Sequence[torch.Tensor]
    """The numbers of the pairs of all replicas, by chunk."""


class _Side:
    """The images here with all texts, in chunks, or the texts here with all images.

    Knows nothing of the other side: of two objects that refer to each other, Python frees the
    tensors late, and XLA computes those that are not freed as outputs of the step.
    """

    def __init__(
        self,
        common: _Common,
        own: torch.Tensor,
        others: torch.Tensor,
        scales: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """``scales``, ``biases``: by chunk, what products are multiplied by, and what is added to
        them."""
        self._common, self._scales, self._biases = common, scales, biases
        self._own, self._others = own.flatten(0, 1), others.split(common.rows, dim=1)
        self.gradient = torch.zeros_like(self._own)
        self.matching = self._own.new_zeros(len(self._own))
        """The logit of each of its own with what it belongs to, (own,); 0 for padding."""
        self._largest = torch.full_like(self.matching, _ABSENT)

    def __iter__(self) -> Iterator[_Chunk]:
        own_ids, all_ids = self._common.own_ids, self._common.all_ids
        chunks = zip(self._others, all_ids, self._scales, self._biases, strict=True)
        for part, ids, scale, bias in chunks:
            others = self._common.replicas.all_gather(part).flatten(0, 1)
            logits = scale * (self._own @ others.T) + bias
            matches = own_ids == ids
            if self._common.padded:
                absent = (own_ids == PADDING) | (ids == PADDING)
                matches = matches & ~absent
                logits = logits.masked_fill(absent, _ABSENT)
            yield _Chunk(others, scale, logits, matches)

    def add_gradient(self, chunk: _Chunk, gradient: torch.Tensor) -> None:
        """Add what follows from the gradient of a chunk's logits."""
        self.gradient = self.gradient + (chunk.scale * gradient) @ chunk.others

    def divide(self, chunk: _Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return of a chunk, once, the logits of pairs that belong together, (own,), 0 where there
        is none; all others, (own, others); and the largest of these, (own,)."""
        matching = chunk.logits.where(chunk.matches, 0.0).sum(1)
        different = chunk.logits.masked_fill(chunk.matches, _ABSENT)
        largest = different.amax(1)
        self.matching = self.matching + matching
        self._largest = torch.maximum(self._largest, largest)
        return matching, different, largest

    def logsumexp(self) -> torch.Tensor:
        """Return log(sum(exp(logits))) of each of its own over all others, (own,); 0 for
        padding."""
        total: torch.Tensor | None = None
        for chunk in self:
            _, different, largest = self.divide(chunk)
            found = (different - largest[:, None]).exp().sum(1).log() + largest
            # At once: of all chunks they would have as many numbers as a part of the matrix.
            total = found if total is None else torch.stack([total, found]).logsumexp(0)
        assert total is not None
        return torch.stack([total, self.matching]).logsumexp(0)

    def is_pair(self) -> torch.Tensor:
        """Return which of its own are no padding, boolean, (own,)."""
        return self._common.own_ids[:, 0] != PADDING

    def nearest(self) -> torch.Tensor:
        """Return how many of its own are more similar to what they belong to than to all others, a
        scalar, once all chunks are divided. Of equally similar ones, wrong ones count first."""
        return ((self.matching > self._largest) & self.is_pair()).sum().float()


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
        self._rows = rows_of_chunk(self.count, own, pairs.images.shape[-1], chunk_bytes)
        by_chunk = self._in_chunks(all_ids)
        common = _Common(replicas, padded, self._rows, ids.flatten()[:, None], by_chunk)
        own_factors = [[x.flatten()[:, None]] * len(by_chunk) for x in (pairs.scale, pairs.bias)]
        all_factors = map(self.of_all, (pairs.scale, pairs.bias))
        self.images = _Side(common, pairs.images, pairs.texts, *own_factors)
        self.texts = _Side(common, pairs.texts, pairs.images, *all_factors)
        self.of_bias = torch.zeros_like(pairs.bias.flatten())

    def _in_chunks(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [part.flatten() for part in values.split(self._rows, dim=1)]

    def of_all(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of all replicas by chunk, given those here, (replicas here, pairs)."""
        return self._in_chunks(self._replicas.all_gather(values))

    def by_replica(self, values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(0, (self.here, -1))

    def result(self, loss: torch.Tensor, count: torch.Tensor | int) -> Contrast:
        """Return all, given the loss, and the gradient of the logits times ``count``."""
        factor = self.count / self.here / count
        of_images, of_texts, of_bias = (
            self.by_replica(factor * each)
            for each in (self.images.gradient, self.texts.gradient, self.of_bias)
        )
        # Images are only used multiplied by the scale.
        of_scale = (of_images * self._pairs.images).sum(-1) / self._pairs.scale
        nearest = torch.stack([side.nearest() for side in (self.images, self.texts)])
        return Contrast(loss, Pairs(of_images, of_texts, of_scale, of_bias), factor * nearest)


def rows_of_chunk(replicas: int, pairs: int, width: int, chunk_bytes: int = _CHUNK_BYTES) -> int:
    """Return how many pairs of each replica, which has so many ``pairs``, a chunk has."""
    bytes_of_row = 2 * _FP32 * replicas * (pairs + width)
    chunks = -(-pairs // max(1, chunk_bytes // bytes_of_row))
    return -(-pairs // chunks)


def _siglip(both: _Both, count: torch.Tensor | int, *, gradients: bool) -> Contrast:
    """Return the sum of -log sigmoid(z logit) over all pairs, with z = 1 for a pair that belongs
    together, otherwise -1, divided by the number of images."""

    def add_gradient(
        side: _Side, chunk: _Chunk, matching: torch.Tensor, different: torch.Tensor
    ) -> torch.Tensor:
        of_matching = -(-matching).sigmoid()[:, None]
        gradient = torch.where(chunk.matches, of_matching, different.sigmoid())
        side.add_gradient(chunk, gradient)
        return gradient

    losses = []
    for chunk in both.images:
        matching, different, _ = both.images.divide(chunk)
        losses.append(F.softplus(different).sum())
        if gradients:
            added = add_gradient(both.images, chunk, matching, different)
            both.of_bias = both.of_bias + added.sum(1)
    losses.append(F.softplus(-both.images.matching).where(both.images.is_pair(), 0.0).sum())
    loss = torch.stack(losses).sum() * (both.count / both.here) / count
    if not gradients:
        return Contrast(loss, None, None)
    for chunk in both.texts:
        matching, different, _ = both.texts.divide(chunk)
        add_gradient(both.texts, chunk, matching, different)
    return both.result(loss, count)


def _clip(both: _Both, count: torch.Tensor | int, *, gradients: bool) -> Contrast:
    """Return the mean of the cross-entropies of images' texts among all texts, and of texts' images
    among all images.

    A first pass over the chunks of each side finds the sums that softmax divides by, a second one
    computes the gradients.
    """
    sums = {side: side.logsumexp() for side in (both.images, both.texts)}
    here = torch.stack([(total - side.matching).sum() for side, total in sums.items()]).sum()
    loss = here * (both.count / both.here) / (2 * count)
    if not gradients:
        return Contrast(loss, None, None)
    for side, other in ((both.images, both.texts), (both.texts, both.images)):
        own_sums, all_sums = sums[side][:, None], both.of_all(both.by_replica(sums[other]))
        for chunk, other_sums in zip(side, all_sums, strict=True):
            shares = (chunk.logits - own_sums).exp() + (chunk.logits - other_sums).exp()
            side.add_gradient(chunk, torch.where(chunk.matches, shares - 2, shares) / 2)
    return both.result(loss, count)


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
