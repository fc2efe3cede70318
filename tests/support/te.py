"""Parameters of TransformerEngine's blocks."""

import torch

from models.registry import open_model
from tests.fakes.filled import filled
from tests.support.cli import TINY_SIZES

SMALL = {**TINY_SIZES, "num_classes": 10}


def shaken(**options):
    """The small model with values that make every parameter matter."""
    model = filled(open_model("vit_10b", SMALL | options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms and biases must count, and q, k, v differ
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()
