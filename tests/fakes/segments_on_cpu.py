"""Prints, as JSON, what attention within segments computes: an interpreter runs the kernels.

What is tested is ``attention`` of tpu_attention.flash and whole themselves, on CPU tensors, as
in ``flash_on_cpu`` and ``whole_on_cpu``, beside PyTorch's with a matrix of booleans.
"""

import functools
import json

import jax.experimental.pallas as pl
import torch
import torch.nn.functional as F

from tests.fakes import flash_on_cpu, whole_on_cpu
from tests.fakes.flash_on_cpu import Interpreted
from tpu_attention import flash, kernels, whole

# tokens, heads, width of a head, dtype, tokens of each segment of the two images, the rest is
# padding: blocks of keys and of queries, segments that cross them, queries in one span or in
# several, heads that share a register or have their own.
CASES = {
    "flash": [
        (300, 4, 32, "float32", [[100, 7, 150], [300]]),
        (300, 2, 64, "bfloat16", [[1, 1, 290], [128, 128]]),
        (1408, 1, 128, "float32", [[60] * 20, []]),
    ],
    "whole": [
        (100, 2, 64, "float32", [[30, 7, 50], [100]]),
        (100, 2, 80, "float32", [[30, 7, 50], []]),
        (256, 4, 64, "bfloat16", [[1, 1, 200], [128, 128]]),
        # Windows of 256 and 512 keys, from the first key on and further behind, and all keys.
        (700, 2, 64, "float32", [[400, 200], [256, 256, 100]]),
        (1000, 2, 64, "float32", [[248] * 4, [100, 400, 250, 250]]),
    ],
}
_IN_SPANS = 1408
"""Tokens of the case whose queries are divided into spans."""
CALLS = {"calls": Interpreted()}
ATTENTION = {
    "flash": functools.partial(flash.attention, **CALLS),
    "whole": functools.partial(whole.attention, **CALLS),
}


def segments_of(tokens: int, lengths: list[list[int]]) -> torch.Tensor:
    """The number of each token's segment, from 1 on; 0 behind the last one."""
    rows = []
    for row in lengths:
        numbers = torch.arange(1, len(row) + 1).repeat_interleave(torch.tensor(row, dtype=int))
        rows.append(F.pad(numbers, (0, tokens - len(numbers))))
    return torch.stack(rows).to(torch.int32)


def by_pytorch(q, k, v, segments: torch.Tensor) -> torch.Tensor:
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def gradients(product, inputs: list[torch.Tensor], weights: torch.Tensor, **given):
    """The output and the gradients of queries, keys and values, (batch, heads, tokens, width)."""
    return flash_on_cpu.gradients(functools.partial(product, **given), inputs, weights)


def compare(form: str, tokens: int, heads: int, width: int, dtype: str, lengths) -> dict:
    torch.manual_seed(tokens)
    kernels._QUERY_GRADIENT_BYTES = 4 * 128 * (768 if tokens == _IN_SPANS else 2**13)
    kind, attention = getattr(torch, dtype), ATTENTION[form]
    segments = segments_of(tokens, lengths)
    inputs = [2 * torch.randn(2, heads, tokens, width).to(kind) for _ in range(3)]
    weights = torch.randn(2, heads, tokens, width)
    plain = [x.float() for x in inputs]
    expected = gradients(by_pytorch, plain, weights, segments=segments)
    found = gradients(attention, inputs, weights, segments=segments)

    # Other values in padding and in every second segment, and other gradients.
    stays = (segments % 2 == 1)[:, None, :, None]
    changed = [torch.where(stays, x, 3 * torch.randn_like(x)) for x in inputs]
    other_weights = torch.where(stays, weights, torch.randn_like(weights))
    again = gradients(attention, changed, other_weights, segments=segments)
    stays = stays.expand_as(weights)
    return {
        "dtype": dtype,
        "errors": [
            ((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
        ],
        "unchanged": all(
            torch.equal(a[stays], b[stays]) for a, b in zip(found, again, strict=True)
        ),
        "others_changed": not torch.equal(found[0], again[0]),
    }


def edges(form: str) -> dict:
    """All tokens in one segment, which may be padding; each token in its own; segments that are in
    no order."""
    torch.manual_seed(0)
    tokens, attention = 300, ATTENTION[form]
    *inputs, weights = (torch.randn(2, 2, tokens, 64) for _ in range(4))
    row = torch.zeros(2, tokens, dtype=torch.int32)
    in_one = gradients(attention, inputs, weights, segments=row)
    without = gradients(attention, inputs, weights)
    alone = gradients(attention, inputs, weights, segments=row + torch.arange(tokens).int())
    expected = (inputs[2], 0, 0, weights)
    tokens = 600
    *inputs, weights = (torch.randn(1, 2, tokens, 64) for _ in range(4))
    mixed = {"segments": torch.randint(0, 5, (1, tokens)).int()}
    pairs = zip(
        gradients(attention, inputs, weights, **mixed),
        gradients(by_pytorch, inputs, weights, **mixed),
        strict=True,
    )
    return {
        "one_segment": all(map(torch.equal, in_one, without)),
        "alone": max((a - b).abs().max().item() for a, b in zip(alone, expected, strict=True)),
        "mixed": max(((a - b).norm() / b.norm()).item() for a, b in pairs),
    }


def main() -> None:
    pl.pallas_call = functools.partial(pl.pallas_call, interpret=True)
    flash.kernel, whole.kernel = flash_on_cpu.interpreted, whole_on_cpu.interpreted
    found = [compare(form, *case) for form, cases in CASES.items() for case in cases]
    print(json.dumps({"cases": found, "edges": [edges(form) for form in CASES]}))


if __name__ == "__main__":
    main()
