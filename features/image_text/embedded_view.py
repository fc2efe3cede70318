"""What is read of images and pairs whose embeddings are computed: the model takes both."""

from __future__ import annotations

from typing import Any

import torch

from data.batch import Batch
from data.images import ImageView
from features.image_text.view import ImageTextView


class EmbeddedImageView(ImageView):
    """Images alone."""

    def with_others(self, images: Any, batch: Batch) -> tuple[Any, None]:
        return images, None


class EmbeddedPairView(ImageTextView):
    """Images and their texts."""

    def with_others(self, images: Any, batch: Batch) -> tuple[Any, torch.Tensor]:
        return images, batch["text"].flatten(0, -2)  # of sequences: of all of their images
