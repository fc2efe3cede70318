"""Prints, as JSON, how far a ring of Pallas kernels is from PyTorch's attention.

As in flash_on_cpu.py, JAX's interpreter runs the kernels, on CPU tensors, and so the ring's rounds
are no loop of XLA's. All devices of the ring are rows of one batch here, marks do nothing.
"""

import functools
import json

import jax.experimental.pallas as pl
import torch
import torch.nn.functional as F

from tests.fakes.flash_on_cpu import Interpreted, gradients, interpreted
from torch_fsdp.domain import PartProducts
from tpu_attention import flash
from tpu_attention.flash import FlashProducts
from xla_fsdp import scan
from xla_fsdp.attention.sharded import Ring

# (devices, tokens, width of a head): parts that the kernels take as they are, and padded ones.
CASES = [(2, 256, 64), (3, 200, 64), (2, 300, 136)]


def same(x: torch.Tensor) -> torch.Tensor:
    return x


class Unrolled:
    """In place of ``Scan``: computes each round where it is called."""

    def __init__(self, body: scan.Body, *_, rounds: int, **__) -> None:
        self._body, self._rounds = body, rounds

    def __call__(self, state: scan.Tensors, inputs: scan.Tensors):
        for _ in range(self._rounds):
            state, _ = self._body(state, inputs)
        return state, []


def main() -> None:
    scan.Scan = Unrolled
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    flash.kernel = interpreted
    errors = []
    for devices, tokens, width in CASES:
        torch.manual_seed(tokens)
        inputs = [torch.randn(1, 2, tokens, width) for _ in range(3)]
        weights = torch.randn(1, 2, tokens, width)
        ring = Ring(devices, FlashProducts(Interpreted()), same, same)
        found = gradients(ring.attention, inputs, weights)
        expected = gradients(F.scaled_dot_product_attention, inputs, weights)
        errors.append(
            [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
        )
    # The same kernels in a ring of processes: of some keys, all that PyTorch's products return.
    q, k, v, grad = (torch.randn(2, 3, tokens, 64) for tokens in (200, 300, 300, 200))
    found, expected = [], []
    for values, products in (
        (found, PartProducts.by_flash(Interpreted())),
        (expected, PartProducts()),
    ):
        output, statistics = products.attend(q, k, v, 0.1)
        values += [output, statistics]
        values += products.backward(grad, q, k, v, output, statistics, 0.1)
    errors.append(
        [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    )
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
