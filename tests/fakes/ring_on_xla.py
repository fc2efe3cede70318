"""Prints, as JSON, how far ring attention is from PyTorch's, in values and gradients.

The rounds are a loop of XLA's graph, on one CPU device. All devices of the ring are rows of one
batch here, marks do nothing.
"""

import json

import torch
import torch.nn.functional as F

from tests.fakes.flash_on_cpu import gradients
from tests.fakes.ring_on_cpu import same
from xla_fsdp.attention.sharded import PlainProducts, Ring

# (devices, tokens, width of values). Of 9 tokens over 4 devices each part is padded, and the last
# one is nothing else.
CASES = [(1, 16, 8), (2, 16, 8), (4, 9, 8), (3, 14, 24), (8, 16, 24)]


def main() -> None:
    errors = []
    for devices, tokens, value_width in CASES:
        torch.manual_seed(tokens)
        q, k = torch.randn(2, 2, 3, tokens, 8)
        v, weights = torch.randn(2, 2, 3, tokens, value_width)
        ring = Ring(devices, PlainProducts(), same, same)
        on_xla = [x.to("xla") for x in (q, k, v)]
        for _ in range(2):  # the second time with the loop of the first
            found = gradients(ring.attention, on_xla, weights.to("xla"))
        expected = gradients(F.scaled_dot_product_attention, [q, k, v], weights)
        pairs = zip((x.cpu() for x in found), expected, strict=True)
        errors.append([((a - b).norm() / b.norm()).item() for a, b in pairs])
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
