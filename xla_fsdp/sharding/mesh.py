"""The mesh of devices, and along which of its axes a tensor is cut. Needs no device."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from models.config import VitConfig
from training.errors import UsageError

AXES = ("dcn", "fsdp", "tensor")
Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
"""For each dimension the mesh axes it is cut along, the outermost first; () if it is not cut."""

BATCH: Axes = ("dcn", "fsdp")
"""What the batch is cut along: devices along "tensor" work on the same images."""


@dataclass(frozen=True)
class MeshShape:
    """Devices along each axis; a device's place is its number written in these digits.

    ``dcn``: copies of the parameters, on different slices if there are several. ``fsdp``: what
    parameters are cut over, and gathered over before use. ``tensor``: what blocks compute cut
    over (attention heads, MLP columns).
    """

    dcn: int
    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        return self.dcn * self.fsdp * self.tensor

    @property
    def live(self) -> dict[str, int]:
        """The axes that have several devices, with their sizes; on one device "fsdp"."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return {a: size for a, size in sizes.items() if size > 1} or {"fsdp": 1}

    def __str__(self) -> str:
        return "mesh " + " x ".join(f"{axis} {size}" for axis, size in self.live.items())

    def spec(self, *dimensions: Axes) -> Spec:
        """A spec without the axes that have one device only."""
        return tuple(tuple(a for a in axes if a in self.live) for axes in dimensions)

    def parts(self, spec: Sequence[Axes]) -> int:
        """How many different parts a tensor is cut into."""
        return math.prod(self.live[axis] for axes in spec for axis in axes)

    # -- parameters -------------------------------------------------------------------

    def parameter_spec(self, shape: Sequence[int], tensor_dim: int | None = None) -> Spec:
        """How a parameter is kept. Its block computes with ``tensor_dim`` cut, if it has one.

        Cut evenly: along the largest dimension that has a multiple of the devices. Where
        "tensor" cuts a dimension, "fsdp" cuts another one, or the parts of the same: gathering
        over "fsdp" then leaves what "tensor" needs.
        """
        if tensor_dim is None or self.tensor == 1:
            for axes in self._cuts():
                found = _largest(shape, self.parts([axes]))
                if found is not None:
                    return self._cut_along({found: axes}, len(shape))
            return self._cut_along({}, len(shape))
        others = [1 if d == tensor_dim else size for d, size in enumerate(shape)]
        found = _largest(others, self.fsdp) if self.fsdp > 1 else None
        if found is not None:
            cuts: dict[int, Axes] = {tensor_dim: ("tensor",), found: ("fsdp",)}
            return self._cut_along(cuts, len(shape))
        both = shape[tensor_dim] % (self.tensor * self.fsdp) == 0
        return self._cut_along(
            {tensor_dim: ("tensor", "fsdp") if both else ("tensor",)}, len(shape)
        )

    def gathered_spec(self, shape: Sequence[int], tensor_dim: int | None = None) -> Spec:
        """How a parameter is computed with."""
        if tensor_dim is None or self.tensor == 1:
            return self._cut_along({}, len(shape))
        return self._cut_along({tensor_dim: ("tensor",)}, len(shape))

    @property
    def smallest_cut(self) -> int:
        """A parameter without a dimension that is a multiple of this is not cut at all."""
        return self.parts([self._cuts()[-1]])

    def _cuts(self) -> list[Axes]:
        """Over all devices of a copy, or at least over "fsdp"."""
        cuts = [self.spec(axes)[0] for axes in (("fsdp", "tensor"), ("fsdp",))]
        return [axes for axes in cuts if axes] or [()]

    def _cut_along(self, cuts: dict[int, Axes], dimensions: int) -> Spec:
        return self.spec(*(cuts.get(d, ()) for d in range(dimensions)))


def _largest(shape: Sequence[int], parts: int) -> int | None:
    """The largest dimension that is a multiple of ``parts``."""
    divisible = [d for d, size in enumerate(shape) if size % parts == 0]
    return max(divisible, key=lambda d: shape[d]) if divisible else None


# -- from the arguments ---------------------------------------------------------------


def mesh_shape(args: argparse.Namespace, devices: int) -> MeshShape:
    """The mesh that the flags ask for. Raises UsageError if it has not as many devices."""
    dcn, tensor = args.mesh_dcn, args.mesh_tensor
    fsdp = args.mesh_fsdp or max(1, devices // (dcn * tensor))
    shape = MeshShape(dcn, fsdp, tensor)
    if shape.devices != devices:
        raise UsageError(
            f"--mesh_dcn {dcn} x --mesh_fsdp {fsdp} x --mesh_tensor {tensor} is not the "
            f"{devices} device(s) of this run"
        )
    return shape


def counts_by_host(mesh: MeshShape) -> bool:
    """Whether the mesh counts devices by slice and host, and not by their numbers."""
    return mesh.devices != mesh.fsdp


def check_mesh(args: argparse.Namespace, config: VitConfig, devices: int) -> None:
    """Raises UsageError for a mesh that does not fit the devices or the model."""
    mesh = mesh_shape(args, devices)
    if config.num_heads % mesh.tensor:
        raise UsageError(
            f"--mesh_tensor {mesh.tensor} does not divide --num_heads {config.num_heads}"
        )
    hidden = int(config.embed_dim * config.mlp_ratio)
    if hidden % mesh.tensor:
        raise UsageError(f"--mesh_tensor {mesh.tensor} does not divide the MLP's width, {hidden}")
