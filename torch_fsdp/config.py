"""The flags of PyTorch's own devices: NVIDIA GPUs, or gloo on the CPU, and TPUs by TorchTPU."""

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
"""Older flags, common to all backends: field, value, and the ``--zero_dp_strategy`` they mean."""
FP8_MULTIPLE = {"none": 1, "delayed": 16, "current": 16, "rowwise": 16, "mxfp8": 32}
"""Every dimension of an FP8 matrix product must be a multiple of this, by recipe."""


def zero_strategy(text: str) -> int:
    """Read one of Megatron-FSDP's sharding strategies, by number or name."""
    if text in _ZERO_NAMES:
        return _ZERO_NAMES.index(text)
    if text in ("0", "1", "2", "3"):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is none of 0, 1, 2, 3, {', '.join(_ZERO_NAMES)}")


def outer_strategy(text: str) -> int:
    """Read a strategy that can shard over HSDP's groups, by number or name."""
    strategy = zero_strategy(text)
    if strategy > 1:
        raise argparse.ArgumentTypeError(f"is 0 (no_shard) or 1 (optim), not {text}")
    return strategy


@dataclass(frozen=True)
class TorchConfig:
    """How PyTorch runs a training on GPUs, with gloo on the CPU, or on TPUs by TorchTPU."""

    group: ClassVar[str] = "GPU (--backend cuda), and TorchTPU (--backend torchtpu)"
    backends: ClassVar[tuple[str, ...]] = ("cuda", "torchtpu")

    fsdp: Literal["auto", "megatron", "fsdp2"] = flag(
        "auto",
        "form of FSDP; megatron: NVIDIA's; fsdp2: PyTorch's; auto: megatron on CUDA without "
        "--objective dino or --teacher, else fsdp2",
    )
    zero_dp_strategy: int | None = flag(
        None,
        "what is sharded, by number or name; 0 no_shard: nothing; 1 optim: optimizer state "
        "(megatron); 2 optim_grads: gradients too; 3 optim_grads_params: parameters too (default: "
        "3)",
        kind=zero_strategy,
        metavar="{0,1,2,3}",
    )
    outer_dp_sharding_strategy: int = flag(
        0,
        "what is sharded over the groups of --mesh_dcn too (megatron); 0 no_shard: nothing; 1 "
        "optim: optimizer state",
        kind=outer_strategy,
        metavar="{0,1}",
        requires=("fsdp=megatron", "mesh_dcn", "zero_dp_strategy=3"),
    )
    meta_init: bool | None = flag(
        None,
        "initialize the weights unit by unit, so that no device ever holds the whole model; fsdp2 "
        "always does (default: on if the model is larger than a quarter of the device's memory)",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = flag(
        "fp32",
        "dtype in which gradients are summed over the devices",
        shorthands={"--grad_reduce_in_fp32": "fp32"},
    )
    preserve_fp32_weights: bool = flag(
        True,
        "store weights in --precision only, without an fp32 copy (megatron) (default: with fp32 "
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
        requires=(
            "fsdp=megatron",
            "zero_dp_strategy=0|zero_dp_strategy=1|zero_dp_strategy=2",
        ),
    )
    forward_prefetch: int = flag(
        1,
        "number of blocks gathered ahead in the forward pass (fsdp2); 0: none",
        kind=count,
        metavar="N",
        requires=("fsdp=fsdp2",),
    )
    backward_prefetch: int = flag(
        1,
        "number of blocks gathered ahead in the backward pass (fsdp2); 0: none",
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
    block: Literal["timm", "te"] = flag(
        "timm",
        "implementation of the transformer block; timm: timm's; te: TransformerLayer of NVIDIA's "
        "TransformerEngine",
        requires=("backend=cuda", "objective=classify"),
    )
    fp8: Literal["none", "delayed", "current", "rowwise", "mxfp8"] = flag(
        "none",
        "FP8 matrix products in the blocks, by TransformerEngine with --block te, else by torchao, "
        "which requires --compile; current: a scale for each tensor, of its values; delayed: of "
        "those in the steps before (te); rowwise: a scale for each row (timm); mxfp8: for every 32 "
        "numbers (te, Blackwell)",
        requires=("backend=cuda", "precision=bf16", "objective=classify"),
    )
    compile: bool | None = flag(
        None,
        "compile each block with torch.compile (default: on with torchtpu alone)",
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

    @property
    def product_multiple(self) -> int:
        """Sizes of matrix products must be multiples of this."""
        return FP8_MULTIPLE[self.fp8]

    @property
    def keeps_fp32_weights(self) -> bool:
        """Whether weights are stored in fp32 at any precision."""
        return self.preserve_fp32_weights

    def shrunk(self) -> TorchConfig:
        """Return the same for a model of a few blocks."""
        return self
