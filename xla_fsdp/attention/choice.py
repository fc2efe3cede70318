"""Which form the product of attention takes: ``--attention``, with auto resolved."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from training.config import RunConfig
from training.errors import UsageError
from training.mesh import Mesh
from xla_fsdp.config import XlaConfig

if TYPE_CHECKING:
    from models.spec import ModelSizes, ModelSpec

WHOLE_UP_TO = 1024
"""Tokens up to which the kernels that hold whole sequences find room in a core's vector memory."""
GATHER_UP_TO = 16_384
"""Tokens up to which auto gathers keys over "domain": there the TPU compiler expects a step that is
shorter than a ring's, and memory is the same (docs/domain_parallelism.md)."""
_NAMES = {"flash": "flash", "sdpa": "PyTorch's", "whole": "whole sequences'"}
WIDEST_HEAD = 256
"""The kernels hold rows this wide in a TPU core's vector memory."""


def resolve_attention(
    config: RunConfig, own: XlaConfig, model: ModelSpec, *, on_tpu: bool
) -> tuple[XlaConfig, str]:
    """Decide ``--attention``; returns how the line that describes a run tells of it, too.

    Nothing is told where there is nothing to choose. Raises UsageError for ``--attention flash``
    where the kernels cannot be used.
    """
    sizes = model.sizes
    hindered = _hinders_kernels(config, sizes, on_tpu)
    too_long = sizes.num_tokens > WHOLE_UP_TO
    if own.attention != "auto":
        form, reason = own.attention, hindered
        if form == "whole" and too_long and not hindered:
            reason = f"takes up to {WHOLE_UP_TO:,} tokens, this model has {sizes.num_tokens:,}"
        if form != "sdpa" and reason:
            raise UsageError(f"--attention {form} {reason}: use --attention sdpa")
        return own, "" if form == "sdpa" else f", {_NAMES[form]} attention"
    if hindered:
        return replace(own, attention="sdpa"), ""
    form = "flash" if too_long or config.sharding.mesh_domain > 1 else "whole"
    why = f" ({sizes.num_tokens:,} tokens; flash from {WHOLE_UP_TO + 1:,})"
    return replace(own, attention=form), f", {_NAMES[form]} attention{why}"


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


def _hinders_kernels(config: RunConfig, sizes: ModelSizes, on_tpu: bool) -> str | None:
    if not on_tpu:
        return "needs a TPU: its kernels run nowhere else"
    if sizes.attn_drop_rate:
        return f"has no dropout, here --att_dropout {sizes.attn_drop_rate}"
    if config.sharding.mesh_tensor > 1:
        return f"does not go with --mesh_tensor {config.sharding.mesh_tensor}"
    if sizes.head_dim > WIDEST_HEAD:
        return f"takes heads up to {WIDEST_HEAD} wide, this model's are {sizes.head_dim}"
    if sizes.value_dim != sizes.head_dim:
        return f"takes values as wide as keys, this model's are {sizes.value_dim}"
    return None
