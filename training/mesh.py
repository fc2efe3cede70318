"""Names the axes of the mesh of devices, and says along which of them a tensor is sharded.

It is the same for every backend and for the data loader, and needs no device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from training.config import ShardingConfig
from training.errors import UsageError

AXES = ("dcn", "fsdp", "domain", "tensor")
Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
"""The mesh axes that each dimension is sharded along, the outermost first; () for none."""

LOGICAL_AXIS_RULES: dict[str, Axes] = {
    "batch": ("dcn", "fsdp"),
    "tokens": ("domain",),
    "tokens between the halves of a block": ("domain", "tensor"),
    "width": (),
    "head": (),
    "heads": ("tensor",),
    "hidden": ("tensor",),
    "qkv": (),
    "glu": (),
}
"""The mesh axes that shard each logical dimension: of activations, and of weights while a block
computes with them. ``ModelSpec.block_dimensions`` names the dimensions of a model's weights. At
rest, weights are sharded along "fsdp" and "domain" too (``Mesh.parameter_spec``)."""


_GATHERED: Axes = ("fsdp", "domain")
"""What weights are sharded along at rest, and gathered over before they are computed with."""


@dataclass(frozen=True)
class Mesh:
    """Holds how many devices each axis has; a device's place is its number in these digits.

    ``dcn``: copies of the parameters, on different slices if there are several. ``fsdp``: what
    parameters are sharded over, and gathered over before use. ``domain``: what the tokens of an
    image are sharded over, and parameters, too. ``tensor``: what the work of a block is sharded
    over (attention heads, MLP columns).
    """

    dcn: int = 1
    fsdp: int = 1
    domain: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.dcn * self.fsdp * self.domain * self.tensor

    @property
    def batch_parts(self) -> int:
        """Return into how many parts a batch is divided: devices that differ along the other axes
        only work on the same images."""
        return math.prod(getattr(self, axis) for axis in LOGICAL_AXIS_RULES["batch"])

    @property
    def devices_a_part(self) -> int:
        """Return how many devices, next to each other, work on the same part of a batch."""
        return self.devices // self.batch_parts

    def batch_part(self, place: int) -> int:
        """Return which part of a batch the device at this place of the mesh works on."""
        return place // self.devices_a_part

    @property
    def counts_by_host(self) -> bool:
        """Tell whether places are counted by slice and host, and not by the devices' numbers."""
        return self.devices != self.fsdp

    @property
    def live(self) -> dict[str, int]:
        """Return the axes that have several devices, with their sizes; on one device "fsdp"."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return {a: size for a, size in sizes.items() if size > 1} or {"fsdp": 1}

    def __str__(self) -> str:
        return "mesh " + " x ".join(f"{axis} {size}" for axis, size in self.live.items())

    def spec(self, *dimensions: Axes) -> Spec:
        """Return the spec of these dimensions without the axes that have one device only."""
        return tuple(tuple(a for a in axes if a in self.live) for axes in dimensions)

    def rows_of(self, rows: int, place: int) -> range:
        """Return which of ``rows`` rows of an image the device at this place works on.

        They are next to each other: of 14 rows, 4 devices have 4, 4, 3 and 3.
        """
        index = place // self.tensor % self.domain
        each, more = divmod(rows, self.domain)
        first = index * each + min(index, more)
        return range(first, first + each + (index < more))

    def logical_spec(self, *kinds: str) -> Spec:
        """Return the spec of a tensor with these logical dimensions (``LOGICAL_AXIS_RULES``)."""
        return self.spec(*(LOGICAL_AXIS_RULES[kind] for kind in kinds))

    def parts(self, spec: Sequence[Axes]) -> int:
        """Return how many different parts a tensor of this spec is divided into."""
        return math.prod(self.live[axis] for axes in spec for axis in axes)

    @property
    def parts_axes(self) -> Axes:
        """Return the axes of what attention over "domain" has, (domain x images, ...)."""
        return tuple(a for axes in self.logical_spec("tokens", "batch") for a in axes)

    def saved_activation_spec(self, shape: Sequence[int], images: int, tokens: int) -> Spec | None:
        """Return the spec of an activation that is saved for the backward pass, without "tensor".

        None if its shape does not tell which dimensions it has.
        """
        rest: Spec = ((),) * (len(shape) - 1)
        if not shape or shape[0] % images:
            return None
        if self.domain == 1:
            return (*self.logical_spec("batch"), *rest)
        if tuple(shape[:2]) == (images, tokens):
            return (*self.logical_spec("batch", "tokens"), *rest[1:])
        return (self.parts_axes, *rest) if shape[0] == self.domain * images else None

    # -- parameters -------------------------------------------------------------------

    def parameter_spec(self, shape: Sequence[int], tensor_dim: int | None = None) -> Spec:
        """Return how a parameter is kept; its block computes with ``tensor_dim`` sharded, if given.

        Sharded evenly: along the largest dimension that has a multiple of the devices. Where
        "tensor" shards a dimension, "fsdp" and "domain" shard another one, or the parts of the
        same: gathering over these then leaves what "tensor" needs.
        """
        if tensor_dim is None or self.tensor == 1:
            for axes in self._choices():
                found = _largest(shape, self.parts([axes]))
                if found is not None:
                    return self._sharded_along({found: axes}, len(shape))
            return self._sharded_along({}, len(shape))
        others = [1 if d == tensor_dim else size for d, size in enumerate(shape)]
        parts = self.parts([self.spec(_GATHERED)[0]])
        found = _largest(others, parts) if parts > 1 else None
        if found is not None:
            along: dict[int, Axes] = {tensor_dim: ("tensor",), found: _GATHERED}
            return self._sharded_along(along, len(shape))
        both = shape[tensor_dim] % (self.tensor * parts) == 0
        return self._sharded_along(
            {tensor_dim: ("tensor", *_GATHERED) if both else ("tensor",)}, len(shape)
        )

    def positions_spec(self, shape: Sequence[int]) -> Spec:
        """Return how a parameter with an entry for each token, (1, tokens, width), is kept.

        It lies with the tokens, a multiple of "domain", so that no device ever needs all entries;
        "fsdp" shards the width.
        """
        along: dict[int, Axes] = {1: ("domain",)}
        if shape[2] % self.fsdp == 0:
            along[2] = ("fsdp",)
        return self._sharded_along(along, len(shape))

    def gathered_spec(self, shape: Sequence[int], tensor_dim: int | None = None) -> Spec:
        """Return how a parameter lies while a block computes with it."""
        if tensor_dim is None or self.tensor == 1:
            return self._sharded_along({}, len(shape))
        return self._sharded_along({tensor_dim: ("tensor",)}, len(shape))

    @property
    def fewest_parts(self) -> int:
        """Return of what a dimension must be a multiple for its parameter to be sharded."""
        return self.parts([self._choices()[-1]])

    def _choices(self) -> list[Axes]:
        """Return what a parameter may be sharded over: all of a copy, or at least "fsdp"."""
        wanted: list[Axes] = [(*_GATHERED, "tensor"), _GATHERED, ("fsdp",)]
        choices = [self.spec(axes)[0] for axes in wanted]
        return [axes for axes in choices if axes] or [()]

    def _sharded_along(self, axes: dict[int, Axes], dimensions: int) -> Spec:
        return self.spec(*(axes.get(d, ()) for d in range(dimensions)))


def _largest(shape: Sequence[int], parts: int) -> int | None:
    """Return the largest dimension that is a multiple of ``parts``."""
    divisible = [d for d, size in enumerate(shape) if size % parts == 0]
    return max(divisible, key=lambda d: shape[d]) if divisible else None


# -- from the flags -------------------------------------------------------------------


def make_mesh(sharding: ShardingConfig, devices: int, what: str = "device(s) of this run") -> Mesh:
    """Return the mesh that the flags ask for. Raises UsageError if it has not as many devices."""
    dcn, domain, tensor = sharding.mesh_dcn, sharding.mesh_domain, sharding.mesh_tensor
    fsdp = sharding.mesh_fsdp or max(1, devices // (dcn * domain * tensor))
    mesh = Mesh(dcn=dcn, fsdp=fsdp, domain=domain, tensor=tensor)
    if mesh.devices != devices:
        between = f" x --mesh_domain {domain}" if domain > 1 else ""
        raise UsageError(
            f"--mesh_dcn {dcn} x --mesh_fsdp {fsdp}{between} x --mesh_tensor {tensor} is not the "
            f"{devices} {what}"
        )
    return mesh
