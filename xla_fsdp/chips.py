"""What the chips can do: dense bf16 matrix FLOP/s a chip.

From Google Cloud's TPU system architecture pages (v2 to v6e, 7x). torch_xla sees
two devices a chip up to v3 and on 7x.
"""

from __future__ import annotations

import torch_xla.runtime as xr

_BF16_PER_CHIP = {2: 45e12, 3: 123e12, 4: 275e12, 6: 918e12, 7: 2307e12}
_V5E, _V5P = 197e12, 459e12


def peak_flops() -> float | None:
    """Of one device, in bf16 operations per second; None on a CPU or an unknown chip.

    fp32 products run as bf16 passes on the same unit, so MFU is counted against
    this figure at either precision.
    """
    if xr.device_type() != "TPU":
        return None
    from torch_xla._internal import tpu

    version = tpu.version()
    if version == 5:
        kind = tpu.get_tpu_env().get("ACCELERATOR_TYPE", "")
        per_chip = _V5P if kind.startswith("v5p") else _V5E
    elif version in _BF16_PER_CHIP:
        per_chip = _BF16_PER_CHIP[version]
    else:
        return None
    return per_chip / (2 if version <= 3 or version == 7 else 1)
