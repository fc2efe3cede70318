"""Whether a run's images can be sharded over processes, and by which form of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_fsdp.config import GpuConfig
from models.errors import ModelError
from training.errors import UsageError
from training.mesh import Mesh
from training.options.config import RunConfig
from training.options.resolve import MODEL_FLAG, check_rows

if TYPE_CHECKING:
    from models.spec import ModelSpec

_DROPOUTS = ("pos_drop_rate", "proj_drop_rate", "attn_drop_rate")


def resolve_domain(config: RunConfig, own: GpuConfig, mesh: Mesh, model: ModelSpec) -> RunConfig:
    """Return the configuration with ``--domain_attention`` decided. Raises UsageError.

    Nothing is decided where images are not sharded.
    """
    if mesh.domain == 1:
        return config
    given = f"--mesh_domain {mesh.domain}"
    check_rows(mesh, model)
    if own.fsdp == "megatron":
        raise UsageError(f"{given} needs --fsdp fsdp2: Megatron-FSDP shards no images here")
    if own.block == "te":
        raise UsageError(f"{given} does not go with --block te: use --block timm")
    if own.compile and config.sharding.grad_ckpt == "selective":
        # Seen with PyTorch 2.9: what is compiled is not run where a policy looks at operations.
        raise UsageError(
            f"--compile with {given} needs --grad_ckpt full or none: selective would leave nothing "
            "compiled"
        )
    reason = model.why_no_token_part()
    for name in _DROPOUTS:
        if model.settings[name]:
            reason = f"processes would drop the same places of their tokens (<{name}>)"
    if reason:
        reason = ModelError(reason).told(MODEL_FLAG)
        raise UsageError(f"{given} on GPUs does not go with --model {model.name}: {reason}")
    form, heads = config.sharding.domain_attention, model.sizes.num_heads
    if form == "gather":
        raise UsageError("--domain_attention gather needs --backend xla: use ring or ulysses")
    if form == "ulysses" and heads % mesh.domain:
        raise UsageError(
            f"--domain_attention ulysses needs heads that {given} divides, not {heads}: use ring"
        )
    if form == "auto":
        form = "ring" if heads % mesh.domain else "ulysses"
    return replace(config, sharding=replace(config.sharding, domain_attention=form))
