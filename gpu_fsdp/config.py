"""The flags of NVIDIA's libraries (Megatron-FSDP, TransformerEngine, FP8), besides FSDP2's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal, Self

from config_fields import flag
from torch_fsdp.config import Fsdp2Config, zero_strategy

FP8_MULTIPLE = {"none": 1, "delayed": 16, "current": 16, "rowwise": 16, "mxfp8": 32}
"""For each recipe, the number of which all dimensions of an FP8 product must be multiples."""


def outer_strategy(text: str) -> int:
    """Parse a ZeRO stage that can also shard across HSDP's groups, given by number or name."""
    strategy = zero_strategy(text)
    if strategy > 1:
        raise argparse.ArgumentTypeError(f"must be 0 (no_shard) or 1 (optim), not {text}")
    return strategy


@dataclass(frozen=True)
class TorchConfig(Fsdp2Config):
    """All flags of the PyTorch backends: those of FSDP2 and of NVIDIA's libraries."""

    fsdp: Literal["auto", "megatron", "fsdp2", "simple"] = flag(
        "auto",
        "FSDP implementation; megatron: NVIDIA's Megatron-FSDP; fsdp2: PyTorch's FSDP2; simple: "
        "SimpleFSDP, which with --compile runs each training step as one program (not yet run on a "
        "TPU); auto: the one that a flag requires; else with TorchTPU simple, if it supports all "
        "flags; else megatron on GPUs if a pass keeps them busy for more than twice the host's "
        "time, by its FLOPs, without --objective dino and --teacher; else fsdp2",
    )
    meta_init: bool | None = flag(
        None,
        "initialize the weights unit by unit, so that no device ever holds the whole model; fsdp2 "
        "always does (default: on if the model is larger than a quarter of the device's memory)",
    )
    outer_dp_sharding_strategy: int = flag(
        0,
        "what is also sharded across the groups of --mesh_dcn (megatron); 0 no_shard: nothing; 1 "
        "optim: optimizer state",
        kind=outer_strategy,
        metavar="{0,1}",
        requires=("fsdp=megatron", "mesh_dcn", "zero_dp_strategy=3"),
    )
    preserve_fp32_weights: bool = flag(
        True,
        "store weights only in --precision, without an fp32 copy (megatron) (default: with an fp32 "
        "copy)",
        names=("--no_preserve_fp32_weights",),
        requires=("fsdp=megatron", "precision=bf16", "reduce_dtype=bf16"),
    )
    overlap_grad_reduce: bool = flag(
        True,
        "reduce gradients during the backward pass (megatron); always on with --zero_dp_strategy 2 "
        "and 3",
        requires=("fsdp=megatron", "zero_dp_strategy=0|zero_dp_strategy=1"),
        incompatible_with=("mesh_dcn",),
    )
    overlap_param_gather: bool = flag(
        True,
        "gather the next unit's weights during computation (megatron); always on with "
        "--zero_dp_strategy 3",
        requires=("fsdp=megatron", "zero_dp_strategy=0|zero_dp_strategy=1|zero_dp_strategy=2"),
    )
    block: Literal["timm", "te"] = flag(
        "timm",
        "implementation of the transformer block; timm: timm's; te: the TransformerLayer of "
        "NVIDIA's TransformerEngine (experimental: not yet run at scale)",
        requires=("backend=cuda", "objective=classify"),
    )
    fp8: Literal["none", "delayed", "current", "rowwise", "mxfp8"] = flag(
        "none",
        "FP8 recipe of the matrix products in the blocks, computed by TransformerEngine with "
        "--block te, else by torchao, which requires torch.compile (experimental: not yet run at "
        "scale); current: one scale per tensor, from its values; delayed: one scale per tensor, "
        "from previous steps (te); rowwise: one scale per row (timm); mxfp8: one scale per 32 "
        "values (te, Blackwell)",
        requires=("backend=cuda", "precision=bf16", "objective=classify"),
    )

    @property
    def keeps_fp32_weights(self) -> bool:
        """Whether weights are stored in fp32 for every ``--precision``."""
        return self.preserve_fp32_weights

    @property
    def product_multiple(self) -> int:
        """Dimensions of matrix products must be multiples of this."""
        return FP8_MULTIPLE[self.fp8]

    def shrunk(self) -> Self:
        """Return this configuration for a model with a few blocks."""
        return self
