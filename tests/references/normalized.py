"""What a model is shown of images as sources give them, by torchvision: for references."""

import torch
from torchvision.transforms.v2 import functional

from training.resolve import Run


def normalized(images: torch.Tensor, run: Run) -> torch.Tensor:
    if images.dtype != torch.uint8:
        return images
    mean, std = run.config.data.preprocessing.of_channels(images.shape[1])
    return functional.normalize(functional.to_dtype(images, torch.float32, scale=True), mean, std)
