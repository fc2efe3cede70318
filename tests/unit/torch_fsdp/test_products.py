"""Products in int8 and fp8 against formulas in float64: values, gradients, a whole block."""

import copy

import numpy as np
import pytest
import timm
import torch

from models.rounding import BYTE_DTYPES, from_bytes, round_to_bytes
from torch_fsdp.products import ROUNDED, RoundedProduct, multiply_rounded

pytestmark = pytest.mark.fast

FORMATS = list(BYTE_DTYPES)


def nearest(x, name):
    """Rows of ``x`` rounded by hand: int8 has 127 steps on either side, e4m3 8 in each octave down
    to 2**-6, and 448 is its largest number; halves go to even."""
    largest = {"int8": 127, "fp8": 448}[name]
    factors = np.abs(x).max(-1, keepdims=True) / largest
    scaled = x / np.where(factors > 0, factors, 1)
    if name == "int8":
        return np.round(scaled) * factors
    octave = np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6)))
    step = 2.0 ** (octave - 3)
    return np.round(scaled / step) * step * factors


def operands(dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=random) for shape in ((3, 5, 64), (96, 64), (3, 5, 96))
    )
    x[0] *= 100  # an outlier is a row's own
    x[1, 2] = weight[7] = 0
    return x.to(dtype), weight, grad.to(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers(name):
    _, weight, _ = operands()
    numbers, factors = round_to_bytes(weight, BYTE_DTYPES[name], (1,))
    assert numbers.dtype == BYTE_DTYPES[name]
    assert factors.shape == (96, 1)
    found = from_bytes(numbers, factors, torch.float32).double().numpy()
    # A quotient that fp32 puts on a half goes the other way: a step of few numbers.
    expected = nearest(weight.double().numpy(), name)
    assert np.mean(~np.isclose(found, expected, rtol=1e-6, atol=0)) < 1e-3
    assert not found[7].any()


@pytest.mark.parametrize("name", FORMATS)
def test_product_and_gradients(name):
    """The product of the rounded numbers, and the gradients of one with the rounded weight."""
    x, weight, grad = operands()
    numbers, factors = round_to_bytes(weight, BYTE_DTYPES[name], (1,))
    x.requires_grad_()
    whole = from_bytes(numbers, factors, torch.bfloat16).requires_grad_()
    y = RoundedProduct.apply(x, whole, numbers, factors)
    y.backward(grad)
    x64, weight64, grad64 = (each.detach().double().numpy() for each in (x, weight, grad))
    rounded = nearest(weight64, name)
    for found, expected, without_rounding in (
        (y, nearest(x64, name) @ rounded.T, x64 @ weight64.T),
        (x.grad, grad64 @ rounded, grad64 @ weight64),
        (whole.grad, np.einsum("bto,bti->oi", grad64, x64), 0),
    ):
        assert found.dtype == torch.bfloat16
        found = found.detach().double().numpy()
        scale = np.abs(expected).max(-1, keepdims=True).clip(min=1e-9)
        off, rounding = (
            np.linalg.norm((each - expected) / scale) for each in (found, without_rounding)
        )
        # What is left are results in bf16, and numbers halfway between two others.
        assert off < 0.5 * rounding
        assert off < 0.01 * np.linalg.norm(expected / scale)


class PlainProduct(torch.nn.Linear):
    """The same with straight-through gradients, of PyTorch's own operations in fp32."""

    name: str

    def forward(self, x):
        def rounded(values):
            found = torch.from_numpy(nearest(values.detach().double().numpy(), self.name))
            return found.to(values.dtype)

        weight = self.weight + (rounded(self.weight) - self.weight).detach()
        y = x @ weight.t()
        return y + (rounded(x) @ weight.t() - y).detach() + self.bias


@pytest.mark.parametrize("name", FORMATS)
def test_block(name):
    torch.manual_seed(0)
    block = timm.create_model("vit_tiny_patch16_224", depth=1).blocks[0]
    plain = copy.deepcopy(block)
    for part in plain.modules():
        if type(part) is torch.nn.Linear:
            part.__class__, part.name = PlainProduct, name
    multiply_rounded(block)
    weights = {}
    for key, part in block.named_modules():
        if type(part) is torch.nn.Linear:
            rounded = round_to_bytes(part.weight.detach(), BYTE_DTYPES[name], (1,))
            weights[f"{key}.weight"] = from_bytes(*rounded, torch.float32).requires_grad_()
            part._parameters["weight"] = weights[f"{key}.weight"]
            part._buffers.update(zip(ROUNDED, rounded, strict=True))
    assert len(weights) == 4
    x = torch.randn(2, 7, 192)
    found, expected = block(x), plain(x)
    # Numbers that fp32 rounds the other way make a step's difference in an activation here and
    # there.
    assert (found - expected).norm() < 1e-2 * expected.norm()
    found.square().sum().backward()
    expected.square().sum().backward()
    for key, weight in weights.items():
        wanted = plain.get_parameter(key).grad
        assert (weight.grad - wanted).norm() < 1e-2 * wanted.norm(), key
