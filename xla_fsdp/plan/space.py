"""What a plan for TPUs is chosen among: slices, and the values of a few flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from training.errors import UsageError
from training.mesh import Mesh
from training.options.config import RunConfig, UseConfig
from training.plan.choices import combinations
from training.plan.config import PlanConfig
from training.plan.shape import state_bytes
from xla_fsdp.compile_only.topologies import Topology, parse_topology
from xla_fsdp.config import XlaConfig
from xla_fsdp.plan.model import POLICIES, Layout

CHOICES: dict[str, tuple[Any, ...]] = {
    "grad_ckpt": tuple(POLICIES),
    "grad_accum_steps": (1, 2, 4, 8, 16),
    "attention": ("sdpa", "whole", "flash"),
    "mesh_domain": (1, 2, 4, 8),
    "mesh_tensor": (1, 2, 4, 8),
}
"""The values of each flag that are tried, by its field; one that the user gives stays as given."""

_IN_A_PLANE = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split()
_IN_A_CUBE = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8".split()
USUAL = [
    f"{kind}:{sides}"
    for kind, shapes in {
        "v4": _IN_A_CUBE,
        "v5e": _IN_A_PLANE,
        "v5p": _IN_A_CUBE,
        "v6e": _IN_A_PLANE,
    }.items()
    for sides in shapes
]
"""Slices that Google Cloud has, of each kind of chip, but for larger ones."""
LARGEST = ("v4:8x8x8", "v5e:16x16", "v5p:8x8x8", "v6e:16x16")
"""Of each kind of chip the slice with the most chips: more are several slices."""


@dataclass(frozen=True)
class Candidate:
    """One way to train on TPUs."""

    topology: Topology
    mesh: Mesh
    grad_ckpt: str
    grad_accum_steps: int
    attention: str

    @property
    def kind(self) -> str:
        """Return the kind of chip as ``--tpu_topology`` names it."""
        return self.topology.name.partition(":")[0]

    @property
    def settings(self) -> str:
        """Return what is chosen beside the slice, in a few words."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.live.items())
        passes = f", {self.grad_accum_steps} passes" if self.grad_accum_steps > 1 else ""
        return f"{axes}, {self.grad_ckpt}, {self.attention}{passes}"

    def layout(self, config: RunConfig) -> Layout:
        return Layout(
            mesh=self.mesh,
            batch_size=config.data.batch_size,
            passes=self.grad_accum_steps,
            policy=self.grad_ckpt,
            attention=self.attention,
            value_bytes=4 if config.sharding.precision == "fp32" else 2,
            state_bytes=state_bytes(config),
        )

    def flags(self, config: RunConfig, own: XlaConfig) -> tuple[RunConfig, XlaConfig]:
        """Return the configurations with this choice in them."""
        sharding = replace(
            config.sharding,
            mesh_dcn=self.mesh.dcn,
            mesh_domain=self.mesh.domain,
            mesh_tensor=self.mesh.tensor,
            grad_ckpt=self.grad_ckpt,  # type: ignore[arg-type]
        )
        data = replace(config.data, grad_accum_steps=self.grad_accum_steps)
        own = replace(own, attention=self.attention, tpu_topology=None)  # type: ignore[arg-type]
        config = replace(config, use=UseConfig(), planning=PlanConfig(), plan=False)
        return replace(config, sharding=sharding, data=data), own


def candidates(
    config: RunConfig, own: XlaConfig, choices: Mapping[str, tuple[Any, ...]] = CHOICES
) -> Iterator[Candidate]:
    """Yield all that the flags leave open, whether the program takes it or not.

    What cannot divide the batch is left out. Raises UsageError for a slice that is unknown.
    """
    for topology in slices(config, own):
        for chosen in combinations(choices, config, own):
            mesh = _mesh(topology, chosen.pop("mesh_domain"), chosen.pop("mesh_tensor"))
            if mesh is None or config.sharding.mesh_fsdp not in (None, mesh.fsdp):
                continue
            if config.data.batch_size % (mesh.batch_parts * chosen["grad_accum_steps"]) == 0:
                yield Candidate(topology, mesh, **chosen)


def slices(config: RunConfig, own: XlaConfig) -> list[Topology]:
    """Return the slices up to ``--chips_at_most`` chips. Raises UsageError.

    Of each as many as ``--mesh_dcn`` says. Where neither that nor slices are given, of the largest
    several: where one slice has as many chips, several smaller are no better.
    """
    most, dcn = config.planning.chips_at_most, config.sharding.mesh_dcn
    asked = own.tpu_topology.split(",") if own.tpu_topology else USUAL
    several = not own.tpu_topology and "mesh_dcn" not in config.given
    found = [
        topology
        for name in asked
        for number in ([1, 2, 4, 8] if name in LARGEST and several else [dcn])
        if (topology := parse_topology(name, number)).chips <= most
    ]
    if not found:
        fewest = min(parse_topology(name, dcn).chips for name in asked)
        raise UsageError(f"--chips_at_most {most}: the smallest slice has {fewest} chips")
    return found


def _mesh(topology: Topology, domain: int, tensor: int) -> Mesh | None:
    fsdp, rest = divmod(topology.slice_chips, domain * tensor)
    return None if rest else Mesh(topology.slices, fsdp, domain, tensor)
