"""The device mesh: its axes, and the layout (spec) of each kind of tensor on it.

Glossary: an *axis* belongs to the mesh ("fsdp"), a *dimension* to a tensor. A *logical axis* names
what a dimension counts ("tokens", "heads"). A *spec* lists, for each dimension of a tensor, the
mesh axes that shard it. All backends and the data loader use this module; it needs no device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.config import ShardingConfig
from training.errors import UsageError

AXES = ("dcn", "fsdp", "domain", "tensor")
Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
"""The mesh axes that shard each dimension, the outermost first; () for a replicated dimension."""

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
"""The mesh axes that shard each logical axis: of activations, and of unsharded parameters while a
block computes. ``models.blocks.logical_axes`` gives the logical axes of its parameters. At
rest, parameters are sharded along "fsdp" and "domain" too (``Mesh.parameter_spec``)."""

_PARAMETER_AXES: Axes = ("fsdp", "domain")
"""The axes that shard parameters at rest, and over which they are gathered before use."""


@dataclass(frozen=True)
class Mesh:
    """The number of devices along each axis. The place of a device is its index in row-major order.

    ``dcn``: replicas of the parameters, on different slices if there are several. ``fsdp``: shards
    parameters, which are gathered before use, and the batch. ``domain``: shards the tokens of an
    image, and parameters. ``tensor``: shards attention heads and MLP columns of each block.
    """

    dcn: int = 1
    fsdp: int = 1
    domain: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.dcn * self.fsdp * self.domain * self.tensor

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Return the size of each axis with several devices; {"fsdp": 1} for a single device."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return {a: size for a, size in sizes.items() if size > 1} or {"fsdp": 1}

    def __str__(self) -> str:
        return "mesh " + " x ".join(f"{axis} {size}" for axis, size in self.axis_sizes.items())

    @property
    def counts_by_host(self) -> bool:
        """Return True if places are ordered by slice and host rather than by device number."""
        return self.devices != self.fsdp

    # Which part of the batch and of its images a device works on.

    @property
    def batch_shards(self) -> int:
        """Return the number of parts that a batch is divided into. Devices that differ only along
        the other axes work on the same images."""
        return math.prod(getattr(self, axis) for axis in LOGICAL_AXIS_RULES["batch"])

    @property
    def devices_a_part(self) -> int:
        """Return the number of adjacent devices that work on the same part of a batch."""
        return self.devices // self.batch_shards

    def batch_shard(self, place: int) -> int:
        """Return which part of a batch the device at this place works on."""
        return place // self.devices_a_part

    def rows_of(self, rows: int, place: int) -> range:
        """Return the range of an image's ``rows`` rows that the device at this place works on. For
        example, 4 devices divide 14 rows into 4, 4, 3 and 3."""
        index = place // self.tensor % self.domain
        least, more = divmod(rows, self.domain)
        first = index * least + min(index, more)
        return range(first, first + least + (index < more))

    # Specs of activations.

    def spec(self, *dimensions: Axes) -> Spec:
        """Return the spec of these dimensions, without axes of one device."""
        return tuple(tuple(a for a in axes if a in self.axis_sizes) for axes in dimensions)

    def logical_spec(self, *logical_axes: str) -> Spec:
        """Return the spec of a tensor with these logical axes, by ``LOGICAL_AXIS_RULES``."""
        return self.spec(*(LOGICAL_AXIS_RULES[name] for name in logical_axes))

    def shard_count(self, spec: Sequence[Axes]) -> int:
        """Return the number of different shards that a tensor with this spec is divided into."""
        return math.prod(self.axis_sizes[axis] for axes in spec for axis in axes)

    @property
    def domain_batch_axes(self) -> Axes:
        """Return the axes that shard dimension 0 of (domain x images, ...), the layout in attention
        over "domain"."""
        return tuple(a for axes in self.logical_spec("tokens", "batch") for a in axes)

    def saved_activation_spec(self, shape: Sequence[int], images: int, tokens: int) -> Spec | None:
        """Return the spec of a block's tensor saved for the backward pass; None if the shape does
        not reveal the batch dimension. ``images``, ``tokens``: numbers of one forward pass over all
        devices."""
        rest: Spec = ((),) * (len(shape) - 1)
        if not shape or shape[0] % images:
            return None
        if self.domain == 1:
            return (*self.logical_spec("batch"), *rest)
        if tuple(shape[:2]) == (images, tokens):
            return (*self.logical_spec("batch", "tokens"), *rest[1:])
        return (self.domain_batch_axes, *rest) if shape[0] == self.domain * images else None

    # Specs of parameters.

    def parameter_spec(self, shape: Sequence[int], tensor_dim: int | None = None) -> Spec:
        """Return the spec of a parameter at rest. Its block computes with ``tensor_dim`` sharded.

        Shards are even: the largest dimension that is a multiple of the number of devices is
        sharded over all axes, or else over "fsdp" alone; if there is none, the parameter is
        replicated. If "tensor" shards a dimension, "fsdp" and "domain" shard another one, or the
        shards of the same one, so that gathering over these two leaves the "tensor" shards.
        """
        along: dict[int, Axes] = {}
        candidates = self._parameter_axes()
        if tensor_dim is not None and self.tensor > 1:
            along, candidates = {tensor_dim: ("tensor",)}, list(self.spec(_PARAMETER_AXES))
        for axes in candidates:
            shards = self.shard_count([axes])
            even = [d for d, size in enumerate(shape) if size % shards == 0 and d not in along]
            if even:
                along[max(even, key=lambda d: shape[d])] = axes
                break
            if tensor_dim in along and shape[tensor_dim] % (self.tensor * shards) == 0:
                along[tensor_dim] = ("tensor", *axes)
        return self._sharded_along(along, len(shape))

    def position_embedding_spec(self, shape: Sequence[int]) -> Spec:
        """Return the spec of a parameter (1, tokens, width), sharded like the tokens and along
        "fsdp". The number of tokens is a multiple of "domain"."""
        width_axes = ("fsdp",) if shape[2] % self.fsdp == 0 else ()
        return self._sharded_along({1: ("domain",), 2: width_axes}, len(shape))

    def unsharded_spec(self, shape: Sequence[int], tensor_dim: int | None = None) -> Spec:
        """Return the spec of a parameter while its block computes: only "tensor" shards it."""
        along = {} if tensor_dim is None else {tensor_dim: ("tensor",)}
        return self._sharded_along(along, len(shape))

    @property
    def min_shards(self) -> int:
        """Return the smallest number of shards; a parameter without a dimension that is a multiple
        of it is replicated."""
        return self.shard_count([self._parameter_axes()[-1]])

    def _parameter_axes(self) -> list[Axes]:
        """Return the axes that may shard a parameter, in order of preference."""
        wanted: list[Axes] = [(*_PARAMETER_AXES, "tensor"), _PARAMETER_AXES, ("fsdp",)]
        return [axes for axes in self.spec(*wanted) if axes] or [()]

    def _sharded_along(self, axes: Mapping[int, Axes], dimensions: int) -> Spec:
        return self.spec(*(axes.get(d, ()) for d in range(dimensions)))


def replicas(sharding: ShardingConfig) -> int:
    """Return ``--mesh_dcn``. Raises UsageError if it is not known yet."""
    if isinstance(sharding.mesh_dcn, int):
        return sharding.mesh_dcn
    raise UsageError(
        f"--mesh_dcn {sharding.mesh_dcn} requires --backend xla and attached TPU slices: use a "
        "number instead"
    )


def make_mesh(sharding: ShardingConfig, devices: int, what: str = "device(s) of this run") -> Mesh:
    """Return the mesh of the ``--mesh_*`` flags; ``--mesh_fsdp`` defaults to the remaining devices.
    Raises UsageError if the product of the sizes is not ``devices``; ``what`` describes them in the
    message."""
    dcn, domain, tensor = replicas(sharding), sharding.mesh_domain, sharding.mesh_tensor
    fsdp = sharding.mesh_fsdp or max(1, devices // (dcn * domain * tensor))
    mesh = Mesh(dcn=dcn, fsdp=fsdp, domain=domain, tensor=tensor)
    if mesh.devices != devices:
        between = f" x --mesh_domain {domain}" if domain > 1 else ""
        raise UsageError(
            f"--mesh_dcn {dcn} x --mesh_fsdp {fsdp}{between} x --mesh_tensor {tensor} is "
            f"{mesh.devices}, not the {devices} {what}"
        )
    return mesh
