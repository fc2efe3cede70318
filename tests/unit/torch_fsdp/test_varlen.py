"""Variable-length attention of packed sequences: what it is given, and what becomes of the results.
PyTorch's own kernels need a GPU (tests/hardware/gpu/test_native_resolution.py)."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from models.registry import open_model
from tests.fakes.filled import filled
from torch_fsdp import varlen

pytestmark = pytest.mark.fast

TOKENS, PLACES = 24, 4
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, "native_resolution": True}
LENGTHS = [[5, 2, 9], [24], [], [3, 3, 3, 15]]
"""Of the images of each sequence, the rest of which is padding."""
MODELS = ["vit_tiny_patch16_224", "timm/eva02_tiny_patch14_224", "timm/vit_small_patch16_rope_224"]


def plain(query, key, value, bounds, bounds_of_keys, most, most_keys):
    """The signature of PyTorch's, computed part by part: (tokens of all, heads, width)."""
    assert bounds is bounds_of_keys
    assert bounds.dtype == torch.int32
    assert most == most_keys == TOKENS
    ends = bounds.tolist()
    assert (ends[0], ends[-1]) == (0, len(query))
    parts = []
    for first, end in itertools.pairwise(ends):
        if end > first:
            q, k, v = (x[first:end].transpose(0, 1)[None] for x in (query, key, value))
            parts.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return torch.cat(parts)


def packed(prefix):
    segments = torch.zeros(len(LENGTHS), TOKENS, dtype=torch.int32)
    places = torch.zeros(len(LENGTHS), TOKENS, 4, dtype=torch.int32)
    for row, lengths in enumerate(LENGTHS):
        end = 0
        for number, length in enumerate(lengths, 1):
            first, end = end, end + length
            segments[row, first:end] = number
            places[row, first + prefix : end, 1] = torch.arange(length - prefix)
            places[row, first + prefix : end, 2:] = torch.tensor([1, length - prefix])
    patches = torch.randn(len(LENGTHS), TOKENS, 3 * 16 * 16)
    return {"patches": patches, "patch_coord": places, "segment_ids": segments}


@pytest.mark.parametrize("name", MODELS)
def test_as_attention_with_a_mask(name, monkeypatch):
    monkeypatch.setitem(sys.modules, varlen.MODULE, SimpleNamespace(varlen_attn=plain))
    sequences = {"token_budget": TOKENS, "max_images_per_sequence": PLACES}
    spec = open_model(name, SMALL | sequences | {"patch_size": 16, "img_size": 64})
    given, results = packed(spec.shape.prefix), []
    present = torch.tensor([n < len(row) for row in LENGTHS for n in range(PLACES)])
    for uses_varlen in (False, True):
        model = filled(spec)
        if uses_varlen:
            varlen.use_varlen(model, spec)
        logits = model(given)[present]
        logits.square().sum().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    for masked, by_length in zip(*results, strict=True):
        torch.testing.assert_close(by_length, masked, rtol=1e-4, atol=1e-5)


def test_bounds_have_one_shape_whatever_the_images():
    bounds = varlen.bounds_of(PLACES, packed(1)["segment_ids"])
    assert bounds.shape == (len(LENGTHS) * (PLACES + 1) + 1,)
    expected = [0]
    for lengths in LENGTHS:
        for length in [*lengths, *[0] * (PLACES - len(lengths)), TOKENS - sum(lengths)]:
            expected.append(expected[-1] + length)
    assert bounds.tolist() == expected
