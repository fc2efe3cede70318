"""Attention where an image's tokens are over devices or processes, against PyTorch's on all."""

import json

import pytest
import torch
import torch.nn.functional as F

from models.blocks import combine_parts
from tests.support.cli import run_program
from tests.support.marks import long
from torch_fsdp import domain
from xla_fsdp.attention.sharded import PlainProducts

REL = 1e-6
SCALE = 0.3


def drawn(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def assert_near(found, expected, rel=REL):
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        assert (a - b).norm() <= rel * b.norm(), number


@pytest.mark.parametrize("processes", [3, long(4)])
def test_over_processes(processes):
    """Ring and Ulysses, even and uneven parts, with and without prefix and own queries."""
    done = run_program("-m", "tests.fakes.attention_over_processes", "cuda", processes=processes)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert len(cases) == 16 * (2 if processes == 3 else 1)
    for case in cases:
        assert max(case["errors"]) <= REL, case


def whole_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=SCALE)


@pytest.mark.parametrize("value_width", [8, 16])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_parts_of_keys_by_process(by_kernel, value_width, monkeypatch):
    """Outputs of two parts put together; each part's share of the gradients, given the whole's."""
    if not by_kernel:
        monkeypatch.setattr(domain, "_kernels", lambda q, v: None)
        monkeypatch.setattr(domain, "_QUERIES", 4)  # of 10, so that the last are fewer
    q, k, v, grad = drawn((2, 3, 10, 8), (2, 3, 12, 8), (2, 3, 12, value_width), (10, value_width))
    output = whole_attention(q, k, v)
    grad = grad.detach().expand_as(output).contiguous()
    expected = torch.autograd.grad(output, (q, k, v), grad)
    with torch.no_grad():
        statistics = (SCALE * q @ k.mT).logsumexp(-1)
        parts = list(zip(k.split((5, 7), 2), v.split((5, 7), 2), strict=True))
        found = [domain.attend(q, *(x.contiguous() for x in part), SCALE) for part in parts]
        shares = [(total - statistics).exp()[..., None] for _, total in found]
        together = sum(share * out for share, (out, _) in zip(shares, found, strict=True))
        assert_near([together], [output])
        grads = [
            domain.attend_backward(
                grad, q, *(x.contiguous() for x in part), output.contiguous(), statistics, SCALE
            )
            for part in parts
        ]
    (q_1, k_1, v_1), (q_2, k_2, v_2) = grads
    assert_near((q_1 + q_2, torch.cat([k_1, k_2], 2), torch.cat([v_1, v_2], 2)), expected)


def test_lower_precision_by_process(monkeypatch):
    """Plain products of bf16 are as near to fp32 as PyTorch's own are."""
    monkeypatch.setattr(domain, "_kernels", lambda q, v: None)
    inputs = drawn(*[(2, 3, 40, 16)] * 3)
    lower = [x.detach().bfloat16() for x in inputs]
    found, statistics = domain.attend(*lower, SCALE)
    expected = whole_attention(*(x.float() for x in lower))
    assert found.dtype == torch.bfloat16
    assert statistics.dtype == torch.float32
    assert_near([found.float()], [expected], rel=0.01)


def test_parts_are_combined():
    """Three parts of unlike sizes and magnitudes, one after the other, as a ring does."""
    q, k, v = drawn((2, 3, 10, 8), (2, 3, 12, 8), (2, 3, 12, 16))
    k = k * torch.linspace(0.1, 30, 12)[:, None]
    products, output, statistics = PlainProducts(), None, None
    for keys, values in zip(k.split((5, 1, 6), 2), v.split((5, 1, 6), 2), strict=True):
        found = products.forward(q, keys, values, None, SCALE)
        if output is None:
            output, statistics = found
        else:
            output, statistics = combine_parts(output, statistics, *found)
    whole = (SCALE * q @ k.mT).logsumexp(-1)
    assert_near((output, statistics), (whole_attention(q, k, v), whole))


@pytest.mark.parametrize("padding", [0, 3])
def test_plain_products_on_xla(padding):
    """The last keys are padding, marked as such: nothing is of them, their gradients are zero."""
    q, k, v, grad = drawn((2, 3, 9, 8), (2, 3, 12, 8), (2, 3, 12, 16), (2, 3, 9, 16))
    kept = 12 - padding
    output = whole_attention(q, k[:, :, :kept], v[:, :, :kept])
    expected = torch.autograd.grad(output, (q, k, v), grad)
    valid = (torch.arange(12) < kept).to(torch.int32).expand(2, -1) if padding else None
    with torch.no_grad():
        plain = PlainProducts()
        found, statistics = plain.forward(q, k, v, valid, SCALE)
        inner = (found * grad).sum(-1)
        grads = plain.backward(q, k, v, statistics, grad, inner, valid, SCALE)
        wanted = (SCALE * q @ k[:, :, :kept].mT).logsumexp(-1)
    assert_near((found, statistics, *grads), (output, wanted, *expected))


def test_ring_as_a_loop_of_the_graph():
    """Even and padded parts, and a part that is nothing but padding."""
    done = run_program("-m", "tests.fakes.ring_on_xla")
    assert done.returncode == 0, done.stderr
    for errors in json.loads(done.stdout.splitlines()[-1]):
        assert max(errors) < REL, errors


@pytest.mark.long
def test_ring_of_kernels():
    """Pallas kernels, by JAX's interpreter; padded widths, padded and whole parts."""
    done = run_program("-m", "tests.fakes.ring_on_cpu")
    assert done.returncode == 0, done.stderr
    for errors in json.loads(done.stdout.splitlines()[-1]):
        assert max(errors) < 1e-5, errors
