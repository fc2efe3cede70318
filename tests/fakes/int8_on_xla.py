"""Prints, as JSON, the largest differences of ``--matmul int8``'s product from NumPy's."""

import json

import numpy as np
import torch
import torch_xla

from xla_fsdp.products import product


def numbers_of(x, axes):
    """Round by hand, in float64: to 127 steps on either side, halves to even."""
    largest = np.abs(x).max(axes, keepdims=True)
    factors = np.where(largest > 0, largest, 1) / 127
    return np.round(x / factors), factors


def compare(equation, x_shape, weight_shape):
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(shape) for shape in (x_shape, weight_shape))
    x[0] *= 100  # an outlier is a row's own
    x[1] = 0
    x, weight = (torch.tensor(values).bfloat16().float().numpy() for values in (x, weight))
    given, result = equation.split("->")
    of_x, of_weight = given.split(",")
    summed = set(of_x) & set(of_weight)
    axes = [tuple(map(names.index, summed)) for names in (of_x, of_weight)]
    (x8, x_factors), (w8, w_factors) = numbers_of(x, axes[0]), numbers_of(weight, axes[1])
    expected = np.einsum(equation, x8 * x_factors, w8 * w_factors)
    exact = np.einsum(equation, x, weight)
    up = random.standard_normal(expected.shape)
    grads = [
        np.einsum(f"{result},{of_weight}->{of_x}", up, w8 * w_factors),
        np.einsum(f"{result},{of_x}->{of_weight}", up, x),
    ]

    unsharded = ((),) * len(weight_shape)
    unmarked = (unsharded, unsharded, lambda x, _: x)
    tensors = [torch.tensor(each).float().to("xla").requires_grad_() for each in (x, weight)]
    with torch.autocast("xla", torch.bfloat16):
        found = product(equation, *tensors, None, unmarked)
    (found.float() * torch.tensor(up).float().to("xla")).sum().backward()
    torch_xla.sync()

    def error(here, wanted):
        here = here.detach().float().cpu().numpy()
        return float(np.abs(here - wanted).max() / np.abs(wanted).max())

    return {
        "equation": equation,
        "output": error(found, expected),
        "of rounding": float(np.abs(expected - exact).max() / np.abs(exact).max()),
        "gradients": [error(t.grad, wanted) for t, wanted in zip(tensors, grads, strict=True)],
        "dtypes": [str(found.dtype), *(str(t.grad.dtype) for t in tensors)],
        "rows of zeros": float(found[1].detach().float().abs().max().cpu()),
    }


if __name__ == "__main__":
    cases = [
        ("aby,zy->abz", (3, 5, 64), (96, 64)),
        ("bnd,ced->bnce", (2, 7, 64), (3, 32, 64)),
        ("bne,de->bnd", (2, 5, 96), (64, 96)),
    ]
    print(json.dumps([compare(*case) for case in cases]))
