"""Dense bf16 matrix FLOP/s of TPU chips, from Google Cloud's TPU architecture pages."""

from __future__ import annotations

# By the name in the slice's accelerator type ("v5p" of "v5p-128"): bf16 FLOP/s of a chip,
# and the devices a chip that torch_xla sees.
_CHIPS = {
    "v2": (45e12, 2),
    "v3": (123e12, 2),
    "v4": (275e12, 1),
    "v5litepod": (197e12, 1),
    "v5p": (459e12, 1),
    "v6e": (918e12, 1),
    "tpu7x": (2307e12, 2),
}


def peak_of(kind: str) -> float | None:
    """Return the bf16 FLOP/s of one device of a kind of TPU; None if it is not in the table."""
    if kind not in _CHIPS:
        return None
    flops, devices = _CHIPS[kind]
    return flops / devices


def peak_flops() -> float | None:
    """Return the FLOP/s of one device here; None on a CPU and where the kind of TPU is unknown.

    fp32 products run as bf16 passes on the same unit, so MFU is counted against
    this figure at either precision.
    """
    import torch_xla.runtime as xr

    if xr.device_type() != "TPU":
        return None
    from xla_fsdp.torch_xla_private import tpu_type

    try:
        return peak_of(tpu_type())
    except (OSError, KeyError):  # no metadata server, or none that names the slice
        return None
