"""What a run on GPUs is asked beside what every backend takes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import count, flag

_ZERO_FLAGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FP8_MULTIPLE = {"none": 1, "delayed": 16, "current": 16, "mxfp8": 32}
"""FP8 matrix products want every dimension to be a multiple of this, by recipe."""


def zero_strategy(text: str) -> int:
    """Read one of Megatron-FSDP's sharding strategies, by number or name."""
    if text in _ZERO_FLAGS:
        return _ZERO_FLAGS.index(text)
    if text in ("0", "1", "2", "3"):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is none of 0, 1, 2, 3, {', '.join(_ZERO_FLAGS)}")


def outer_strategy(text: str) -> int:
    """Read a strategy that can shard over HSDP's groups, by number or name."""
    strategy = zero_strategy(text)
    if strategy > 1:
        raise argparse.ArgumentTypeError(f"is 0 (no_shard) or 1 (optim), not {text}")
    return strategy


@dataclass(frozen=True)
class TorchConfig:
    """How PyTorch runs a training on GPUs, or with gloo on the CPU."""

    group: ClassVar[str] = "GPU (--backend cuda)"

    fsdp: Literal["auto", "megatron", "fsdp2"] = flag(
        "auto",
        "megatron: NVIDIA's Megatron-FSDP; fsdp2: PyTorch's fully_shard, a block a unit; auto: "
        "megatron on CUDA, fsdp2 on the CPU",
        common=True,
    )
    zero_dp_strategy: int | None = flag(
        None,
        "what is sharded: 0 no_shard, 1 optim (megatron), 2 optim_grads, 3 optim_grads_params; "
        "number or name (default: 3)",
        kind=zero_strategy,
        metavar="{0,1,2,3}",
    )
    outer_dp_sharding_strategy: int = flag(
        0,
        "megatron with --mesh_dcn: 0 no_shard; 1 optim, optimizer state is sharded over the outer "
        "groups too",
        kind=outer_strategy,
        metavar="{0,1}",
        needs=("fsdp=megatron", "mesh_dcn", "zero_dp_strategy=3"),
    )
    meta_init: bool | None = flag(
        None,
        "fill the weights unit by unit, so that the model never stands whole on a device; fsdp2 "
        "always does (default: on if the model takes over a quarter of the device)",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = flag(
        "fp32",
        "of gradients while they are summed over the devices",
        shorthands={"--grad_reduce_in_fp32": "fp32"},
    )
    preserve_fp32_weights: bool = flag(
        True,
        "megatron: keep weights in --precision only, no fp32 copy (default: fp32 kept)",
        names=("--no_preserve_fp32_weights",),
        needs=("fsdp=megatron", "precision=bf16", "reduce_dtype=bf16"),
    )
    overlap_grad_reduce: bool = flag(
        True,
        "megatron: reduce gradients during the backward pass; strategies 2 and 3 always do",
        needs=("fsdp=megatron", "zero_dp_strategy=0|zero_dp_strategy=1"),
        conflicts=("mesh_dcn",),
    )
    overlap_param_gather: bool = flag(
        True,
        "megatron: gather the next weights during computation; strategy 3 always does",
        needs=(
            "fsdp=megatron",
            "zero_dp_strategy=0|zero_dp_strategy=1|zero_dp_strategy=2",
        ),
    )
    forward_prefetch: int = flag(
        1,
        "fsdp2: blocks to gather ahead of the one that computes; 0: none, in order",
        kind=count,
        metavar="N",
        needs=("fsdp=fsdp2",),
    )
    backward_prefetch: int = flag(
        1, "fsdp2: the same in the backward pass", kind=count, metavar="N", needs=("fsdp=fsdp2",)
    )
    cpu_offload: bool = flag(
        False,
        "fsdp2: keep weights, gradients and optimizer in host memory, update on the CPU",
        needs=("fsdp=fsdp2",),
    )
    block: Literal["timm", "te"] = flag(
        "timm",
        "te: NVIDIA TransformerEngine's TransformerLayer in place of timm's block",
    )
    fp8: Literal["none", "delayed", "current", "mxfp8"] = flag(
        "none",
        "with --block te: recipe of FP8 matrix products",
        needs=("block=te", "precision=bf16"),
    )
    compile: bool = flag(False, "torch.compile each block", common=True)
    channels_last: bool = flag(False, "images and patch embedding in channels-last memory order")
    tf32: bool = flag(False, "allow TF32 in fp32 matrix products and convolutions")

    def shrunk(self) -> TorchConfig:
        """Return the same for a model of a few blocks."""
        return self

    @property
    def product_multiple(self) -> int:
        """Sizes of matrix products are multiples of this."""
        return FP8_MULTIPLE[self.fp8]

    @property
    def keeps_fp32_weights(self) -> bool:
        return self.preserve_fp32_weights
