"""Which ``--grad_ckpt`` auto takes, by the planner's arithmetic: nothing is compiled for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from training.mesh import Mesh
from training.options.config import RunConfig
from training.plan.shape import shape_of, state_bytes
from xla_fsdp.compile_only.topologies import Chip
from xla_fsdp.config import XlaConfig
from xla_fsdp.plan.model import POLICIES, Estimate, Layout, estimate

if TYPE_CHECKING:
    from models.spec import ModelSpec

_USABLE = 0.8
"""Share of HBM that the arithmetic may fill: it is off by up to a quarter (tests/test_plan.py)."""


def resolve_policy(
    config: RunConfig,
    own: XlaConfig,
    model: ModelSpec,
    mesh: Mesh,
    device: str,
    chip: Chip | None,
) -> tuple[RunConfig, str]:
    """Return the configuration with ``--grad_ckpt`` decided, and how a run's line tells of it.

    ``device`` is "TPU" or "CPU"; ``chip`` is None where the kind of TPU is unknown.
    """
    asked = config.sharding.grad_ckpt
    if asked == "offload" and device == "CPU":
        return _with(config, "full"), " (--grad_ckpt offload: the CPU is the host, nothing moves)"
    if asked != "auto":
        return config, ""
    if not own.scan_blocks:
        return _with(config, "full"), " (--grad_ckpt auto: blocks are not scanned)"
    if chip is None:
        return _with(config, "full"), " (--grad_ckpt auto: what fits is known for TPUs alone)"
    layout = Layout(
        mesh=mesh,
        batch_size=config.data.batch_size,
        passes=config.data.grad_accum_steps,
        policy="full",
        attention=own.attention,
        value_bytes=4 if config.sharding.precision == "fp32" else 2,
        state_bytes=state_bytes(config),
    )
    found = {
        name: estimate(shape_of(model), replace(layout, policy=name), chip) for name in POLICIES
    }
    fitting = {
        name: each for name, each in found.items() if each.peak_bytes <= _USABLE * chip.hbm_bytes
    }
    if fitting:
        chosen = min(fitting, key=lambda name: fitting[name].step_s)
        why = "by arithmetic the fastest that fits"
    else:
        chosen = min(found, key=lambda name: found[name].peak_bytes)
        why = "by arithmetic nothing fits, this needs least"
    return _with(config, chosen), f" (--grad_ckpt auto: {why}, {_told(found)})"


def _told(found: dict[str, Estimate]) -> str:
    return ", ".join(
        f"{name} {each.step_s * 1e3:,.0f} ms and {each.peak_bytes / 2**30:.1f} GiB"
        for name, each in found.items()
    )


def _with(config: RunConfig, policy: str) -> RunConfig:
    sharding = replace(config.sharding, grad_ckpt=policy)  # type: ignore[arg-type]
    return replace(config, sharding=sharding)
