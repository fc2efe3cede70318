"""Attention in the lower precision, which autocast of torch_xla 2.9 leaves out.

On other devices PyTorch lowers ``scaled_dot_product_attention`` as any product; for XLA it does
not, so queries and keys that a norm has made fp32 would meet values in bf16, which is an error.
"""

from __future__ import annotations

import torch

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def _lowered(keys: torch._C.DispatchKeySet, *args, **kwargs) -> torch.Tensor:
    """Cast fp32 arguments as for other products; what attention is made of stays under autocast."""
    dtype = torch.get_autocast_dtype("xla")
    lower = [
        x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in args
    ]
    return _ATTENTION.redispatch(keys.remove("AutocastXLA"), *lower, **kwargs)


_library = torch.library.Library("aten", "IMPL")
_library.impl("scaled_dot_product_attention", _lowered, "AutocastXLA", with_keyset=True)
