"""The losses of SigLIP (arXiv 2303.15343) and CLIP (arXiv 2103.00020) over all devices.

Both compare each image with each text of the global batch. No device ever has the matrix of these
logits, its gradient, or all texts: a device compares its own images with some texts of every
replica at a time, and computes the gradients at once, so nothing of a chunk is kept for a backward
pass. Results are those of one device with all pairs, but for the order of sums.

Embeddings are exchanged in fp32: they are small beside the weights of towers that need FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from data.batch import PADDING

_CHUNK_BYTES = 24 * 2**20
"""About what a device holds of a chunk: its logits and their gradients, its texts and theirs."""
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


class Replicas(Protocol):
    """The operations of a ``Backend`` that the losses need."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor: ...

    def reduce_scatter(self, values: torch.Tensor) -> torch.Tensor: ...


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
) -> tuple[torch.Tensor, Pairs | None]:
    """Return the loss, a scalar, and the gradients of its mean over replicas; None without
    ``gradients``. Both are such that ``Objective.loss`` may return the loss.

    ``kind``: "siglip" or "clip". ``ids``: (replicas here, pairs), the number of each pair, int32.
    ``count``: the number of pairs of all replicas. ``padded``: some pairs are padding, with the
    number PADDING.
    """
    chunks = _Chunks(pairs, ids, replicas, padded=padded, chunk_bytes=chunk_bytes)
    return (_siglip if kind == "siglip" else _clip)(chunks, count, gradients=gradients)


class _Chunk(NamedTuple):
    texts: torch.Tensor
    """(texts, width): a part of those of each replica."""
    logits: torch.Tensor
    """(images, texts) of the images here."""
    matches: torch.Tensor
    """Which pairs belong together, boolean."""
    absent: torch.Tensor | None
    """Which pairs do not exist, boolean, as one of the two is padding; None: all exist."""


class _Chunks:
    """The pairs of images here with all texts, in chunks; sums up their gradients."""

    def __init__(
        self,
        pairs: Pairs,
        ids: torch.Tensor,
        replicas: Replicas,
        *,
        padded: bool,
        chunk_bytes: int,
    ) -> None:
        self._pairs, self._replicas, self.padded = pairs, replicas, padded
        self._images, self._ids = pairs.images.flatten(0, 1), ids.flatten()[:, None]
        self._scale, self._bias = (x.flatten()[:, None] for x in (pairs.scale, pairs.bias))
        all_ids = replicas.all_gather(ids)
        self.replicas, (self.here, own) = len(all_ids), ids.shape
        rows = rows_of_chunk(self.replicas, own, pairs.images.shape[-1], chunk_bytes)
        self._texts = pairs.texts.split(rows, dim=1)
        self._text_ids = [part.flatten() for part in all_ids.split(rows, dim=1)]
        self._of_images = torch.zeros_like(self._images)
        self._of_bias = torch.zeros_like(self._images[:, 0])
        self._of_texts: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[_Chunk]:
        for part, ids in zip(self._texts, self._text_ids, strict=True):
            texts = self._replicas.all_gather(part).flatten(0, 1)
            logits = self._scale * (self._images @ texts.T) + self._bias
            matches, absent = self._ids == ids, None
            if self.padded:
                absent = (self._ids == PADDING) | (ids == PADDING)
                matches = matches & ~absent
            yield _Chunk(texts, logits, matches, absent)

    def add_gradient(self, chunk: _Chunk, gradient: torch.Tensor) -> None:
        """Add what follows from the gradient of a chunk's logits."""
        if chunk.absent is not None:
            gradient = gradient.masked_fill(chunk.absent, 0.0)
        self._of_bias = self._of_bias + gradient.sum(1)
        of_products = self._scale * gradient
        self._of_images = self._of_images + of_products @ chunk.texts
        of_texts = (of_products.T @ self._images).unflatten(0, (self.replicas, -1))
        self._of_texts.append(self._replicas.reduce_scatter(of_texts))

    def logsumexp_of_images(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log(sum(exp(logits))) over the images of all replicas, (texts,)."""
        of_replicas = logits.unflatten(0, (self.here, -1)).logsumexp(1)
        return self._replicas.all_gather(of_replicas).logsumexp(0)

    def gradients(self, count: torch.Tensor | int) -> Pairs:
        """Return the gradients, given that of the logits times ``count``."""
        factor = self.replicas / self.here / count
        of_images = (factor * self._of_images).unflatten(0, (self.here, -1))
        return Pairs(
            of_images,
            factor * torch.cat(self._of_texts, dim=1),
            # Images are only used multiplied by the scale.
            (of_images * self._pairs.images).sum(-1) / self._pairs.scale,
            (factor * self._of_bias).unflatten(0, (self.here, -1)),
        )


def rows_of_chunk(replicas: int, pairs: int, width: int, chunk_bytes: int = _CHUNK_BYTES) -> int:
    """Return how many texts of each replica, which has so many ``pairs``, a chunk has."""
    bytes_of_row = 2 * _FP32 * replicas * (pairs + width)
    chunks = -(-pairs // max(1, chunk_bytes // bytes_of_row))
    return -(-pairs // chunks)


def _siglip(
    chunks: _Chunks, count: torch.Tensor | int, *, gradients: bool
) -> tuple[torch.Tensor, Pairs | None]:
    """Return the sum of -log sigmoid(z logit) over all pairs, with z = 1 for a pair that belongs
    together, otherwise -1, divided by the number of images."""
    losses = []
    for chunk in chunks:
        signed = torch.where(chunk.matches, -chunk.logits, chunk.logits)
        if chunk.absent is not None:
            signed = signed.masked_fill(chunk.absent, _ABSENT)
        losses.append(F.softplus(signed).sum())
        if gradients:
            probabilities = signed.sigmoid()
            chunks.add_gradient(chunk, torch.where(chunk.matches, -probabilities, probabilities))
    loss = torch.stack(losses).sum() * (chunks.replicas / chunks.here) / count
    return loss, chunks.gradients(count) if gradients else None


def _clip(
    chunks: _Chunks, count: torch.Tensor | int, *, gradients: bool
) -> tuple[torch.Tensor, Pairs | None]:
    """Return the mean of the cross-entropies of images' texts among all texts, and of texts' images
    among all images.

    A first pass over the chunks finds the sums that softmax divides by, a second one computes the
    gradients.
    """
    of_images: torch.Tensor | None = None
    by_text, matching = [], []
    for chunk in chunks:
        logits = _without_absent(chunk)
        matching.append(logits.where(chunk.matches, 0.0).sum())
        found = logits.logsumexp(1)
        # Summed up at once: of all chunks they would have as many numbers as a part of the matrix.
        of_images = found if of_images is None else torch.stack([of_images, found]).logsumexp(0)
        by_text.append(chunks.logsumexp_of_images(logits))
    assert of_images is not None
    of_all_texts = torch.cat(by_text)
    if chunks.padded:
        of_images = of_images.where(of_images > _ABSENT / 2, 0.0)
        of_all_texts = of_all_texts.where(of_all_texts > _ABSENT / 2, 0.0)
    here = of_images.sum() - 2 * torch.stack(matching).sum()
    loss = (here * (chunks.replicas / chunks.here) + of_all_texts.sum()) / (2 * count)
    if not gradients:
        return loss, None
    for chunk, of_texts in zip(chunks, by_text, strict=True):
        logits = _without_absent(chunk)
        both = (logits - of_images[:, None]).exp() + (logits - of_texts).exp()
        chunks.add_gradient(chunk, torch.where(chunk.matches, both - 2, both) / 2)
    return loss, chunks.gradients(count)


def _without_absent(chunk: _Chunk) -> torch.Tensor:
    return chunk.logits if chunk.absent is None else chunk.logits.masked_fill(chunk.absent, _ABSENT)


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
