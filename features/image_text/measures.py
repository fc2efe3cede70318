"""What evaluations compute on the devices: embeddings of pairs, and of texts by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from data.batch import Batch
from features.image_text.model import Embedded
from features.image_text.retrieval import (
    EmbeddedPairs,
    PairEvaluation,
    evaluate_pairs,
    ids_of_texts,
)
from training.backend import Backend
from training.objectives.base import ImageValues, Measure


class PairRetrieval(Measure):
    """Collects the embeddings of this process's pairs, and compares those of all processes."""

    def __init__(
        self,
        kind: str,
        normalize: Callable[[torch.Tensor], torch.Tensor],
        backend: Backend,
    ) -> None:
        """``kind``: of the loss, "siglip" or "clip"."""
        self._kind, self._normalize, self._backend = kind, normalize, backend
        self._values = ImageValues(backend)
        self._parts: list[dict[str, np.ndarray]] = []
        self._scale = self._bias = 0.0

    def of_batch(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        embedded = Embedded(*model((self._normalize(batch["image"]), batch["text"])))
        same = [self._backend.mean(each.mean()) for each in (embedded.scale, embedded.bias)]
        values = {"scale_and_bias": torch.stack(same)}
        self._values.send(
            batch["index"],
            images=embedded.images,
            texts=embedded.texts,
            tokens=batch["text"],
        )
        return values

    def add(self, values: Mapping[str, list[float]]) -> None:
        self._scale, self._bias = values["scale_and_bias"]
        part = self._values.receive()
        self._parts.append(part | {"tokens": ids_of_texts(part["tokens"])})

    def pairs(self) -> EmbeddedPairs:
        """Return the pairs of ``ImageValues``."""
        index, text_ids, images, texts = (
            torch.from_numpy(np.concatenate([part[name] for part in self._parts]))
            for name in ("index", "tokens", "images", "texts")
        )
        return EmbeddedPairs(index, index, text_ids, images, texts)

    def result(self) -> PairEvaluation:
        """Return the loss and the recalls; all processes must call this."""
        return evaluate_pairs(self.pairs(), self._kind, self._scale, self._bias)
