"""Attention to a part of the keys, with what is needed to put such parts together.

``forward`` gives each query's output over these keys alone, and the logarithm of its sum of
exponentials; ``backward`` is given that of all keys, and then gives these keys' share of the
gradients (Dao, FlashAttention-2, arXiv 2307.08691, section 3.1). Both take PyTorch's own flash
kernels where there are any for the device, else plain products of a few queries at a time.
"""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten
_WIDEST_HEAD = 256
"""PyTorch's flash kernels on CUDA take heads up to this width, multiples of 8."""
_WIDTH_MULTIPLE = 8
_QUERIES = 1024
"""How many queries' scores the plain products hold at a time."""

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q k') v and, in fp32, log(sum(exp(scale q k'))).

    Queries, keys and values are (batch, heads, tokens, width), statistics (batch, heads, tokens).
    """
    if _on_cpu(q, v):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    if _on_cuda(q, v):
        output, statistics, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return output, statistics
    outputs, statistics = [], []
    for part in q.split(_QUERIES, dim=2):
        scores = _scores(part, k, scale)
        total = scores.logsumexp(-1)
        outputs.append((scores - total[..., None]).exp_().to(v.dtype) @ v)
        statistics.append(total)
    return torch.cat(outputs, dim=2), torch.cat(statistics, dim=2)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    scale: float,
) -> Tensors3:
    """Return what these keys contribute to the gradients of q, k and v.

    ``output`` and ``statistics`` are over all keys, ``grad`` is the gradient of ``output``.
    """
    if _on_cpu(q, v):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, statistics, 0.0, False, scale=scale
        )
    if _on_cuda(q, v):
        none = torch.empty((), dtype=torch.int64, device=q.device)  # nothing is drawn at random
        return _aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, output, statistics, None, None, q.shape[2], k.shape[2]),
            *(0.0, False, none, none),
            scale=scale,
        )
    grad_k, grad_v, grads_q = torch.zeros_like(k), torch.zeros_like(v), []
    whole = (each.split(_QUERIES, dim=2) for each in (grad, q, output, statistics))
    for grad_part, part, output_part, total in zip(*whole, strict=True):
        weights = (_scores(part, k, scale) - total[..., None]).exp_()
        grad_v += weights.to(v.dtype).mT @ grad_part
        inner = (grad_part.float() * output_part.float()).sum(-1, keepdim=True)
        grad_scores = weights * ((grad_part @ v.mT).float() - inner) * scale
        grad_scores = grad_scores.to(q.dtype)
        grads_q.append(grad_scores @ k)
        grad_k += grad_scores.mT @ part
    return torch.cat(grads_q, dim=2), grad_k, grad_v


def padded(width: int, where: torch.Tensor) -> int:
    """Return the width that heads must be padded to, with zeros, for the kernels of ``where``."""
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE if where.is_cuda else width


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    return (q @ k.mT).float() * scale


def _on_cpu(q: torch.Tensor, v: torch.Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _on_cuda(q: torch.Tensor, v: torch.Tensor) -> bool:
    halves = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and halves and q.shape[-1] == v.shape[-1] <= _WIDEST_HEAD
