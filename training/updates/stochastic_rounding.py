"""Rounds numbers to bf16 up or down at random, so that on average nothing is lost.

A moving average that keeps 99.9 % of itself changes by less than half of what bf16 can tell apart:
rounded to the nearest number it would stay where it is for ever. The random bits are a hash of
where a number is and of a key: they need no generator, whose state would have to be kept and whose
other draws would change, and are as many on each device as the device has numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

_DISCARDED = 0xFFFF
"""The bits of an fp32 number that bf16 has not."""
_LARGEST = torch.finfo(torch.bfloat16).max
_FACTORS = (-2048144789, -1028477387)
"""Of MurmurHash3's last step, by which each bit of a number changes each bit of its hash with
about equal chance (0x85EBCA6B and 0xC2B2AE35 as int32)."""
_STEP = -1640531527
"""What keys of one tensor are apart: 2**32 divided by the golden ratio, as int32."""
_RUN = 1 << 12


def random_bits(
    shape: Sequence[int], device: torch.device, key: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """Return 32 random bits for each entry of a tensor, int32, on the device.

    They follow from the entry's place, from ``key`` and from the number of the ``step``: scalars on
    the device, the one int32, the other whole.
    """
    seed = hashed(key + step.to(torch.int32) * _STEP)
    return hashed(_places(shape, device) + seed)


def key_of(seed: int, *names: object) -> int:
    """Return the key of a run's ``seed`` and of what has these names, as an int32 number."""
    return zlib.crc32(repr((seed, names)).encode()) - 2**31


Bitcast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""Returns the numbers of a dtype that have the same bits."""


def to_bf16(
    x: torch.Tensor, bits: torch.Tensor, same_bits: Bitcast = torch.Tensor.view
) -> torch.Tensor:
    """Round fp32 numbers to one of their two neighbours in bf16, each the likelier the nearer.

    ``bits`` are random, int32: the lower 16 are used. What bf16 has stays as it is, what is not
    finite, too; what is larger than bf16's largest number becomes that.
    """
    own = same_bits(x, torch.int32)
    noise = torch.where(x.abs() < _LARGEST, bits & _DISCARDED, 0)
    rounded = same_bits((own + noise) & ~_DISCARDED, torch.float32)
    # Cut off, something that is not a number could become infinite.
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def upper(bits: torch.Tensor) -> torch.Tensor:
    """Return the other half of random bits, those that ``to_bf16`` does not use."""
    return _shifted(bits, 16)


def hashed(x: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int32 number, as int32; different ones have different hashes."""
    first, second = _FACTORS
    x = (x ^ _shifted(x, 16)) * first
    x = (x ^ _shifted(x, 13)) * second
    return x ^ _shifted(x, 16)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Move bits ``count`` places down, with zeros from above."""
    # Not ``>>``, which torch_xla 2.9 makes a division of, rounded towards zero.
    places = torch.full((), count, dtype=torch.int32, device=x.device)
    return torch.bitwise_right_shift(x, places) & ((1 << (32 - count)) - 1)


def _places(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return each entry's place in the flattened tensor, modulo 2**32, as int32.

    It is computed of the places along each dimension: a count of all would be a constant of the
    compiled program as large as the tensor, and no part of it a device's own.
    """
    places = torch.zeros((), dtype=torch.int32, device=device)
    for size in shape:
        places = places.unsqueeze(-1) * size + _count(size, device)
    return places


def _count(size: int, device: torch.device) -> torch.Tensor:
    if size <= _RUN:
        return torch.arange(size, dtype=torch.int32, device=device)
    starts = torch.arange(-(-size // _RUN), dtype=torch.int32, device=device) * _RUN
    run = torch.arange(_RUN, dtype=torch.int32, device=device)
    return (starts.unsqueeze(-1) + run).flatten()[:size]
