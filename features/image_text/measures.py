"""What an evaluation of pairs computes on the devices: embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
from training.evaluation.report import has_own_images
from training.objectives.base import OF_IMAGES, Measure


class PairRetrieval(Measure):
    """Collects the embeddings of this process's pairs, and compares those of all processes."""

    def __init__(
        self,
        kind: str,
        image_input: Callable[[Batch], Any],
        backend: Backend,
    ) -> None:
        """``kind``: of the loss, "siglip" or "clip". ``image_input``: from a batch to the model's
        input of its images."""
        self._kind, self._image_input, self._backend = kind, image_input, backend
        self._parts: list[dict[str, np.ndarray]] = []
        self._scale = self._bias = 0.0
        self.is_complete = False
        """Whether the evaluation reached its end."""

    def of_batch(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        # The images of sequences follow each other.
        text = batch["text"].flatten(0, -2)[:, None]  # (images, texts of each, tokens)
        others = {}
        if "other_texts" in batch:
            text = torch.cat([text, batch["other_texts"].flatten(0, -3)], dim=1)
            others["others"] = batch["others"].flatten()
        embedded = Embedded(*model((self._image_input(batch), text.flatten(0, 1))))
        same = [self._backend.mean(each.mean()) for each in (embedded.scale, embedded.bias)]
        of_images = {
            "index": batch["index"].flatten(),
            "images": embedded.images,
            "texts": embedded.texts.unflatten(0, text.shape[:2]),
            "tokens": text,
            **others,
        }
        return {"scale_and_bias": torch.stack(same), OF_IMAGES: of_images}

    def add(self, values: Mapping[str, Any]) -> None:
        self._scale, self._bias = values["scale_and_bias"]
        part = {"others": np.zeros(1, np.int64)} | values[OF_IMAGES]
        part["others"] = np.broadcast_to(part["others"], part["index"].shape)
        self._parts.append(part | {"tokens": ids_of_texts(part["tokens"])})

    def pairs(self) -> EmbeddedPairs:
        """Return the pairs of this process, none if an earlier process has the same; all processes
        must call it."""
        parts = self._parts
        if not has_own_images(self._backend):
            parts = [{name: values[:0] for name, values in parts[0].items()}]
        index, images, texts, text_ids, others = (
            torch.from_numpy(np.concatenate([part[name] for part in parts]))
            for name in ("index", "images", "texts", "tokens", "others")
        )
        exists = torch.arange(texts.shape[1]) <= others[:, None]
        return EmbeddedPairs(index, images, texts, text_ids, exists)

    def result(self) -> PairEvaluation:
        """Return the loss and the recalls; all processes must call this."""
        self.is_complete = True
        return evaluate_pairs(self.pairs(), self._kind, self._scale, self._bias)
