"""Which form the product of attention takes: ``--attention``, with auto resolved."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from training.errors import UsageError
from training.mesh import Mesh
from training.options.buckets import sizes_of_largest
from training.options.config import RunConfig
from xla_fsdp.attention.whole_kernels import Whole
from xla_fsdp.config import XlaConfig

if TYPE_CHECKING:
    from models.spec import ModelSizes, ModelSpec

FLASH_FROM = 1025
"""Tokens from which auto takes flash attention."""
GATHER_UP_TO = 16_384
"""Tokens up to which auto gathers keys over "domain": there the TPU compiler expects a step that is
shorter than a ring's, and memory is the same (docs/domain_parallelism.md)."""
_NAMES = {"flash": "flash", "sdpa": "PyTorch's", "whole": "whole sequences'"}
WIDEST_HEAD = 256
"""The kernels hold rows this wide in a TPU core's vector memory."""


def resolve_attention(
    config: RunConfig, own: XlaConfig, model: ModelSpec, generation: int | None
) -> tuple[XlaConfig, str]:
    """Decide ``--attention``; returns how the line that describes a run tells of it, too.

    ``generation`` is that of the TPU, None where there is none. Nothing is told where there is
    nothing to choose. Raises UsageError for kernels that cannot be used.
    """
    sizes, form = sizes_of_largest(config, model), own.attention
    of_kernels = _hinders_kernels(config, sizes, generation)
    of_whole = of_kernels or _hinders_whole(config, sizes, generation or 0)
    if form != "auto":
        reason = {"flash": of_kernels, "whole": of_whole}.get(form)
        if reason:
            raise UsageError(f"--attention {form} {reason}: use --attention sdpa")
        return own, "" if form == "sdpa" else f", {_NAMES[form]} attention"
    if of_kernels:
        return replace(own, attention="sdpa"), ""
    form = "flash" if sizes.num_tokens >= FLASH_FROM else "sdpa" if of_whole else "whole"
    text = f", {_NAMES[form]} attention ({sizes.num_tokens:,} tokens; flash from {FLASH_FROM:,})"
    return replace(own, attention=form), text


def resolve_domain(config: RunConfig, mesh: Mesh, model: ModelSpec) -> RunConfig:
    """Return the configuration with ``--domain_attention`` decided. Raises UsageError.

    Nothing is decided where tokens are not sharded.
    """
    if mesh.domain == 1:
        return config
    form, hindered = config.sharding.domain_attention, None
    if model.sizes.attn_drop_rate:
        hindered = f"has no dropout, here --att_dropout {model.sizes.attn_drop_rate}"
    if mesh.tensor > 1:
        hindered = f"does not go with --mesh_tensor {mesh.tensor}"
    if form == "ulysses":
        raise UsageError("--domain_attention ulysses needs --backend cuda: use ring or gather")
    if form == "ring" and hindered:
        raise UsageError(f"--domain_attention ring {hindered}: use gather")
    if form == "auto":
        few = model.sizes.num_tokens <= GATHER_UP_TO
        form = "gather" if hindered or few else "ring"
    return replace(config, sharding=replace(config.sharding, domain_attention=form))


def _hinders_whole(config: RunConfig, sizes: ModelSizes, generation: int) -> str | None:
    if sizes.num_tokens >= FLASH_FROM:
        return f"takes up to {FLASH_FROM - 1:,} tokens, this model has {sizes.num_tokens:,}"
    if config.sharding.mesh_domain > 1:
        return f"does not go with --mesh_domain {config.sharding.mesh_domain}"
    tokens, dtype = sizes.num_tokens, torch.float32
    if config.sharding.precision == "bf16":
        dtype = torch.bfloat16
    heads = sizes.num_heads // config.sharding.mesh_tensor
    if not Whole(1, tokens, heads, sizes.head_dim, dtype).fits(generation):
        return f"has no room in vector memory for {heads} heads of {sizes.head_dim}"
    return None


def _hinders_kernels(config: RunConfig, sizes: ModelSizes, generation: int | None) -> str | None:
    if generation is None:
        return "needs a TPU: its kernels run nowhere else"
    if sizes.attn_drop_rate:
        return f"has no dropout, here --att_dropout {sizes.attn_drop_rate}"
    tensor, domain = config.sharding.mesh_tensor, config.sharding.mesh_domain
    if tensor > 1 and domain > 1:
        return f"does not go with --mesh_domain {domain} and --mesh_tensor {tensor} at once"
    if sizes.head_dim > WIDEST_HEAD:
        return f"takes heads up to {WIDEST_HEAD} wide, this model's are {sizes.head_dim}"
    if sizes.value_dim != sizes.head_dim:
        return f"takes values as wide as keys, this model's are {sizes.value_dim}"
    return None
