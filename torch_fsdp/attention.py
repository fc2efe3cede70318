"""Attention in the blocks on TorchTPU (``--attention``): PyTorch's, plain products, or the kernels
of ``tpu_attention``, each call of which is one operation to whatever traces a graph."""

import functools
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from models.blocks import Attend, Product, attentions, use_attend
from torch_fsdp import torch_tpu_private
from tpu_attention import flash, whole
from tpu_attention.kernels import Calls, FlashSizes, Kernel, WholeSizes

_KERNELS: dict[str, Any] = {"whole": whole.kernel, "flash": flash.kernel}
_SIZES: dict[str, Any] = {"whole": WholeSizes, "flash": FlashSizes}
_NUMBERS = {
    form: [field.name for field in fields(sizes) if field.name != "dtype"]
    for form, sizes in _SIZES.items()
}
"""The fields of a kernel's sizes but for its dtype, which is that of queries."""


def _kernel(inputs: list[torch.Tensor], form: str, backward: bool, sizes: list[float]) -> Kernel:
    given = {
        name: int(value) if value == int(value) else value
        for name, value in zip(_NUMBERS[form], sizes, strict=True)
    }
    with _disable_current_modes():  # what lowers it is not of the graph
        all_sizes = _SIZES[form](**given, dtype=inputs[0].dtype)
        return _KERNELS[form](all_sizes, backward=backward)


@torch.library.custom_op("vit::attention_kernel", mutates_args=())
def attention_kernel(
    inputs: list[torch.Tensor], form: str, backward: bool, sizes: list[float]
) -> list[torch.Tensor]:
    """Call a kernel on one device; ``sizes``: the values of ``_NUMBERS``."""
    kernel = _kernel(inputs, form, backward, sizes)
    return torch_tpu_private.call_kernel(kernel.module, inputs, kernel.results)


@attention_kernel.register_fake
def _(
    inputs: list[torch.Tensor], form: str, backward: bool, sizes: list[float]
) -> list[torch.Tensor]:
    results = _kernel(inputs, form, backward, sizes).results
    return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in results]


class TpuCalls(Calls):
    """Calls kernels in what a process computes, which has one device."""

    def call(
        self, kernel: Any, sizes: Any, parts: list[torch.Tensor], *, backward: bool
    ) -> list[torch.Tensor]:
        form = "whole" if isinstance(sizes, WholeSizes) else "flash"
        numbers = [float(getattr(sizes, name)) for name in _NUMBERS[form]]
        return torch.ops.vit.attention_kernel(parts, form, backward, numbers)


_ATTEND: dict[str, Attend] = {
    "whole": functools.partial(whole.attend, calls=TpuCalls()),
    "flash": functools.partial(flash.attend, calls=TpuCalls()),
}


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1) @ v


_PRODUCTS: dict[str, Product] = {
    "sdpa": F.scaled_dot_product_attention,
    "plain": _plain,
    "whole": functools.partial(whole.attention, calls=TpuCalls()),
    "flash": functools.partial(flash.attention, calls=TpuCalls()),
}


def product_of(form: str) -> Product:
    """Return the function of queries, keys and values, (batch, heads, tokens, width), that computes
    attention as ``--attention`` says."""
    return _PRODUCTS[form]


def use_attention(block: nn.Module, form: str) -> None:
    """Let timm's attention in a block compute its product as ``--attention`` says. Kernels leave
    plain products to layers that ``use_attend`` does not know: torch.compile refuses, in a
    recomputation, what ``use_product`` needs."""
    if form == "sdpa":
        return
    for part in attentions(block):
        if not (form in _ATTEND and use_attend(part, _ATTEND[form])):
            part.fused_attn = False  # type: ignore[assignment]
