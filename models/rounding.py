"""Matrices in numbers of one byte, int8 or fp8, with fp32 factors: the same on every backend."""

import torch

BYTE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST: dict[torch.dtype, float] = {
    torch.int8: 127,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max,
}
"""The number that the largest magnitude becomes: int8 has as many steps on either side."""
LEAST_FACTOR = 1e-30
"""The factor of a row of zeros; one that is not normal would be 0 on a TPU."""


def round_to_bytes(
    x: torch.Tensor, dtype: torch.dtype, along: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` in a dtype of ``LARGEST``, rounded to the nearest, halves to even, and the fp32
    factors that give it back, one for all that is ``along`` these dimensions, which keep size 1."""
    x = x.float()
    factors = (x.abs().amax(along, keepdim=True) / LARGEST[dtype]).clamp(min=LEAST_FACTOR)
    scaled = x / factors
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype), factors


def from_bytes(numbers: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what ``round_to_bytes`` has rounded."""
    return (numbers.float() * factors).to(dtype)
