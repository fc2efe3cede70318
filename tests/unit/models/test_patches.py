"""Patches embedded by a matrix product: values and gradients of PyTorch's convolutions."""

import copy

import pytest
import timm
import torch
from torch import nn

from models.patches import embed_by_product

pytestmark = pytest.mark.fast


def values_and_gradients(model, images):
    images = images.clone().requires_grad_()
    output = model(images)
    output.square().sum().backward()
    return [output, images.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("convolution", "size"),
    [
        (nn.Conv2d(3, 24, 4, 4), (12, 20)),
        (nn.Conv2d(1, 24, (2, 6), (2, 6), bias=False), (8, 12)),
        (nn.Conv2d(5, 24, 4, 4), (15, 9)),  # what is left of rows and columns is not used
        (nn.Conv3d(2, 24, (2, 4, 3), (2, 4, 3)), (6, 8, 9)),
    ],
)
def test_as_the_convolution(convolution, size):
    convolution, images = convolution.double(), torch.randn(2, convolution.in_channels, *size)
    model = nn.Sequential(convolution)
    by_product = copy.deepcopy(model)
    embed_by_product(by_product)
    assert "forward" in vars(by_product[0])
    found = values_and_gradients(by_product, images.double())
    torch.testing.assert_close(found, values_and_gradients(model, images.double()))


def test_as_timms_model():
    """With timm's whole model in fp32, names and shapes of the weights as before."""
    torch.manual_seed(0)
    kwargs = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **kwargs)
    by_product, images = copy.deepcopy(model), torch.randn(2, 3, 32, 32)
    embed_by_product(by_product)
    assert "forward" in vars(by_product.patch_embed.proj)
    expected = values_and_gradients(model, images)
    found = values_and_gradients(by_product, images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    shapes = {name: values.shape for name, values in by_product.state_dict().items()}
    assert shapes == {name: values.shape for name, values in model.state_dict().items()}


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(4, 8, 3, 3, padding=1),
        nn.Conv2d(4, 8, 3, 2),
        nn.Conv2d(4, 8, 2, 2, groups=2),
        nn.Conv2d(4, 8, 3, 3, dilation=2),
        nn.Conv2d(4, 8, 1),
    ],
)
def test_other_convolutions_stay(convolution):
    embed_by_product(nn.Sequential(convolution))
    assert "forward" not in vars(convolution)


def test_patches_are_marked():
    shapes, convolution = [], nn.Conv2d(3, 8, 4, 4)

    def mark(patches):
        shapes.append(patches.shape)
        return patches

    embed_by_product(convolution, mark)
    convolution(torch.zeros(2, 3, 8, 12))
    assert shapes == [(2, 2, 3, 3 * 4 * 4)]
