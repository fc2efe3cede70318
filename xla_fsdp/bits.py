"""Reads numbers on the devices as others of the same bits.

torch_xla 2.9 has ``Tensor.view(dtype)`` computed by the host, which has to wait for the devices.
"""

from __future__ import annotations

import functools

import torch
import torch_xla.core.xla_builder as xb

from xla_fsdp.torch_xla_private import call_computation

_TYPES = {torch.float32: xb.Type.F32, torch.int32: xb.Type.S32}


def same_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of another dtype that have the bits of ``x``, each as many."""
    (result,) = call_computation("xla::bitcast", [x], _computation(tuple(x.shape), x.dtype, dtype))
    return result


@functools.cache
def _computation(shape: tuple[int, ...], given: torch.dtype, wanted: torch.dtype) -> object:
    builder = xb.create_builder("bitcast")
    x = xb.mkparam(builder, 0, xb.Shape.create(_TYPES[given], shape))
    return x.bitcast(_TYPES[wanted]).build("bitcast")
