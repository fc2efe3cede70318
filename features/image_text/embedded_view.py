"""What is read of images and pairs whose embeddings are computed: the model takes both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from data.batch import Batch
from data.images import ImageView
from data.source import Constant, image_normalizer
from features.image_text.view import ImageTextView


class EmbeddedImageView(ImageView):
    """Images alone."""

    def model_input(
        self, mean: torch.Tensor, std: torch.Tensor, spatial: int, constant: Constant
    ) -> Callable[[Batch], Any]:
        normalize = image_normalizer(mean, std, spatial, constant)
        return lambda batch: (normalize(batch["image"]), None)


class EmbeddedPairView(ImageTextView):
    """Images and their texts."""

    def model_input(
        self, mean: torch.Tensor, std: torch.Tensor, spatial: int, constant: Constant
    ) -> Callable[[Batch], Any]:
        normalize = image_normalizer(mean, std, spatial, constant)
        return lambda batch: (normalize(batch["image"]), batch["text"])
