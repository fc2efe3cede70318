"""Attention to parts of the keys by CUDA's flash kernels, put together as in ring attention."""

import pytest
import torch
import torch.nn.functional as F

from torch_fsdp import domain

pytestmark = pytest.mark.gpu

SCALE = 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 128])
def test_parts_are_the_whole(dtype, width):
    """Of 300 keys, 130 and 170; against PyTorch's attention in fp64 on the same numbers."""
    torch.manual_seed(0)
    shapes = ((2, 3, 200, width), (2, 3, 300, width), (2, 3, 300, width), (2, 3, 200, width))
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*exact, scale=SCALE)
    expected = [whole, *torch.autograd.grad(whole, exact, grad.double())]

    halves = zip(k.split((130, 170), 2), v.split((130, 170), 2), strict=True)
    parts = [[x.contiguous() for x in half] for half in halves]
    found = [domain.attend(q, *part, SCALE) for part in parts]
    total = torch.logsumexp(torch.stack([statistics for _, statistics in found]), 0)
    output = sum(each.float() * (s - total).exp()[..., None] for each, s in found).to(dtype)
    grads = [domain.attend_backward(grad, q, *part, output, total, SCALE) for part in parts]
    together = [
        output,
        sum(each[0].float() for each in grads),
        torch.cat([each[1] for each in grads], 2),
        torch.cat([each[2] for each in grads], 2),
    ]
    for a, b in zip(together, expected, strict=True):
        assert (a.double() - b).norm() <= (8 * torch.finfo(dtype).eps + 3e-6) * b.norm()
