"""Which implementation of attention a run uses: ``--attention``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from tpu_attention.kernels import WholeSizes
from training.config import RunConfig, ShardingConfig
from training.errors import UsageError

if TYPE_CHECKING:
    from models.spec import ModelSizes, ModelSpec

FLASH_FROM = 1025
"""The number of tokens from which "auto" selects flash attention."""
WIDEST_HEAD = 256
"""The largest head width whose rows the kernels hold in a TPU core's vector memory."""
KERNELS = ("whole", "flash")


def resolve_attention(
    sharding: ShardingConfig,
    model: ModelSpec,
    of_largest: ModelSizes,
    vector_memory: int | None,
    without: Literal["sdpa", "plain"] = "sdpa",
) -> ShardingConfig:
    """Resolve ``--attention``. ``of_largest``: the model's sizes with its largest images;
    ``vector_memory``: bytes that a kernel may ask for, None without a TPU; ``without``: what "auto"
    is without kernels. Raises UsageError for kernels that cannot be used."""
    stacks = [*model.stacks.values()]
    if len(stacks) == 1:
        stacks = [of_largest]
    largest = max(stacks, key=lambda sizes: sizes.num_tokens)
    reasons = (_why_no_kernels(sharding, sizes, vector_memory) for sizes in stacks)
    no_kernels = next(filter(None, reasons), None)
    dtype = torch.bfloat16 if sharding.precision == "bf16" else torch.float32
    tensor, domain = sharding.mesh_tensor, sharding.mesh_domain
    exchanges_heads = domain > 1 and sharding.domain_attention == "ulysses"
    parts = tensor * (domain if exchanges_heads else 1)
    needed = max(
        WholeSizes(1, s.num_tokens, s.num_heads // parts, s.head_dim, dtype).vector_memory()
        for s in stacks
    )
    no_whole = no_kernels
    if no_kernels:
        pass
    elif largest.num_tokens >= FLASH_FROM:
        no_whole = f"supports up to {FLASH_FROM - 1:,} tokens, not {largest.num_tokens:,}"
    elif domain > 1 and not exchanges_heads:
        no_whole = f"is incompatible with --mesh_domain {domain}"
    elif needed > (vector_memory or 0):
        heads = largest.num_heads // parts
        no_whole = f"exceeds the vector memory with {heads} heads of width {largest.head_dim}"

    asked = sharding.attention
    if asked == "plain" and without == "sdpa":
        raise UsageError("--attention plain requires --backend torchtpu: with xla use sdpa")
    if asked != "auto":
        if reason := {"flash": no_kernels, "whole": no_whole}.get(asked):
            raise UsageError(f"--attention {asked} {reason}: use --attention {without}")
        return sharding
    if not no_kernels and largest.num_tokens >= FLASH_FROM:
        return replace(sharding, attention="flash")
    return replace(sharding, attention=without if no_whole else "whole")


def _why_no_kernels(
    sharding: ShardingConfig, sizes: ModelSizes, vector_memory: int | None
) -> str | None:
    if vector_memory is None:
        return "requires a TPU"
    if sizes.attn_drop_rate:
        return f"does not support --att_dropout {sizes.attn_drop_rate}"
    tensor, domain = sharding.mesh_tensor, sharding.mesh_domain
    if tensor > 1 and domain > 1:
        return f"does not support --mesh_domain {domain} together with --mesh_tensor {tensor}"
    if sizes.head_dim > WIDEST_HEAD:
        return f"supports heads up to {WIDEST_HEAD} wide, not {sizes.head_dim}"
    if sizes.value_dim != sizes.head_dim:
        return f"requires values as wide as keys ({sizes.head_dim}), not {sizes.value_dim}"
    return None


def choose_mask(model: Any, attention: str) -> None:
    """Let a model of several images per sequence (``ModelSpec.segments``) pass segments to its
    blocks if attention runs in kernels; by default it passes a boolean mask."""
    if hasattr(model, "mask_of") and attention in KERNELS:
        model.mask_of = lambda segments: segments


def for_teacher(config: RunConfig) -> RunConfig:
    """Return a teacher's flags: its attention may resolve differently, also if --print_config has
    filled in the student's. Flags only turn kernels off."""
    if config.sharding.attention not in KERNELS:
        return config
    return replace(config, sharding=replace(config.sharding, attention="auto"))
