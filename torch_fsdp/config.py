"""The flags of FSDP2, on NVIDIA GPUs, on the CPU with gloo, and on TPUs with TorchTPU.

(The flags of NVIDIA's libraries, which can replace it, are in ``gpu_fsdp/config.py``.)
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import count, flag

_ZERO_NAMES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ZERO_FLAGS = {
    "--run_without_fsdp": ("run_without_fsdp", True, 0),
    "--no_reshard_after_forward": ("reshard_after_forward", False, 2),
}
"""Older flags, common to all backends: field, value and the equivalent ``--zero_dp_strategy``."""


def zero_strategy(text: str) -> int:
    """Parse a ZeRO stage, given by number or name."""
    if text in _ZERO_NAMES:
        return _ZERO_NAMES.index(text)
    if text in ("0", "1", "2", "3"):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not one of 0, 1, 2, 3, {', '.join(_ZERO_NAMES)}")


@dataclass(frozen=True)
class Fsdp2Config:
    """How FSDP2 runs a training. Runs use ``TorchConfig``, which adds the flags for NVIDIA GPUs."""

    group: ClassVar[str] = "GPU (--backend cuda), and TorchTPU (--backend torchtpu)"
    backends: ClassVar[tuple[str, ...]] = ("cuda", "torchtpu")

    zero_dp_strategy: int | None = flag(
        None,
        "ZeRO stage, by number or name; 0 no_shard: shard nothing; 1 optim: optimizer state "
        "(megatron); 2 optim_grads: also gradients; 3 optim_grads_params: also parameters "
        "(default: 3)",
        kind=zero_strategy,
        metavar="{0,1,2,3}",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = flag(
        "fp32",
        "dtype in which gradients are reduced across devices",
        shorthands={"--grad_reduce_in_fp32": "fp32"},
    )
    forward_prefetch: int = flag(
        1,
        "number of blocks whose weights are gathered ahead in the forward pass (fsdp2); 0: none",
        kind=count,
        metavar="N",
        requires=("fsdp=fsdp2",),
    )
    backward_prefetch: int = flag(
        1,
        "number of blocks whose weights are gathered ahead in the backward pass (fsdp2); 0: none",
        kind=count,
        metavar="N",
        requires=("fsdp=fsdp2",),
    )
    cpu_offload: bool = flag(
        False,
        "store weights, gradients and optimizer state in host memory and update them on the CPU "
        "(fsdp2)",
        requires=("backend=cuda", "fsdp=fsdp2"),
    )
    compile: bool | None = flag(
        None,
        "compile each block with torch.compile (default: on, if it works; off on the CPU, and on "
        "GPUs with --mesh_domain, --block te or native resolution)",
    )
    channels_last: bool = flag(
        False,
        "store images and the patch embedding in channels-last memory order",
        requires=("backend=cuda", "objective=classify|objective=mae"),
    )
    tf32: bool = flag(
        False,
        "allow TF32 in fp32 matrix products and convolutions",
        requires=("backend=cuda",),
    )
