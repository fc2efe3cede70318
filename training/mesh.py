"""The device mesh: its axes, and the layout (spec) of each kind of tensor on it.

Glossary: an *axis* belongs to the mesh ("fsdp"), a *dimension* to a tensor. A *logical axis* names
what a dimension counts ("tokens", "heads"). A *spec* lists, for each dimension of a tensor, the
mesh axes that shard it. A *factor* of an axis is a prime factor of its size, used as an axis of its
own to shard parameters that the whole axis does not divide. All backends and the data loader use
this module; it needs no device.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from training.config import ShardingConfig
from training.errors import UsageError

AXES = ("dcn", "fsdp", "domain", "tensor")
Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
"""The mesh axes, or factors of them, that shard each dimension, the outermost first; () for a
replicated dimension."""

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


def tensor_dims(dimensions: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return, for each of a block's parameters that "tensor" shards, the sharded dimension.

    ``dimensions``: the logical axes of each parameter, what a layer folds together unfolded, as of
    ``models.blocks.logical_axes``.
    """
    return {
        name: index
        for name, kinds in dimensions.items()
        for index, kind in enumerate(kinds)
        if "tensor" in LOGICAL_AXIS_RULES[kind]
    }


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

    @functools.cached_property
    def factors(self) -> dict[str, dict[str, int]]:
        """Return the prime factors of each axis by name, the outermost first: those of fsdp=6 are
        {"fsdp/0": 2, "fsdp/1": 3}."""
        return {
            axis: {f"{axis}/{i}": prime for i, prime in enumerate(_primes(size))} or {axis: 1}
            for axis, size in self.axis_sizes.items()
        }

    @functools.cached_property
    def factor_sizes(self) -> dict[str, int]:
        """Return the sizes of all factors, in the order of the axes."""
        return {name: size for sizes in self.factors.values() for name, size in sizes.items()}

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
        return tuple(tuple(a for a in axes if a in self._sizes) for axes in dimensions)

    def logical_spec(self, *logical_axes: str) -> Spec:
        """Return the spec of a tensor with these logical axes, by ``LOGICAL_AXIS_RULES``."""
        return self.spec(*(LOGICAL_AXIS_RULES[name] for name in logical_axes))

    def shard_count(self, spec: Sequence[Axes]) -> int:
        """Return the number of different shards that a tensor with this spec is divided into."""
        return math.prod(self._sizes[axis] for axes in spec for axis in axes)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return self.factor_sizes | self.axis_sizes

    def in_factors(self, spec: Spec) -> Spec:
        """Return the same spec with the factors of each axis in its place."""
        return tuple(
            tuple(name for axis in axes for name in self.factors.get(axis, (axis,)))
            for axes in spec
        )

    def uses_factors(self, spec: Spec) -> bool:
        """Return whether only some factors of an axis shard a dimension."""
        return any(axis not in self.axis_sizes for axes in spec for axis in axes)

    def parts_of_axes(self, spec: Spec) -> list[Axes]:
        """Return all axes, in order; one of which the spec names factors in parts: the factors that
        shard a dimension, and those that shard none."""
        parts: list[Axes] = []
        for axis, factors in self.factors.items():
            shared = [tuple(a for a in axes if a in factors) for axes in spec]
            if not any(shared) or axis in factors:
                parts.append((axis,))
                continue
            unused = tuple(f for f in factors if not any(f in axes for axes in shared))
            parts += [axes for axes in (*shared, unused) if axes]
        return parts

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
        sharded over all axes, or else over "fsdp" alone. If there is none, a matrix is sharded
        over as many factors of the axes as divide one of its dimensions, and replicated over the
        others; a vector is replicated. If "tensor" shards a dimension, "fsdp" and "domain" shard
        another one, or the shards of the same one, so that gathering over these two leaves the
        "tensor" shards.
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
                break
        else:
            if sum(size > 1 for size in shape) > 1:
                before = [along.get(d, ()) for d in range(len(shape))]
                chosen = [
                    self._dividing(size // self.shard_count([axes]), candidates[0])
                    for size, axes in zip(shape, before, strict=True)
                ]
                dim = max(
                    range(len(shape)), key=lambda d: (self.shard_count([chosen[d]]), shape[d])
                )
                along[dim] = (*before[dim], *chosen[dim])
        return self._sharded_along(along, len(shape))

    def _dividing(self, size: int, axes: Axes) -> Axes:
        """Return as many factors of these axes as divide ``size`` together: of equal ones the
        innermost, whose devices are neighbors."""
        chosen: Axes = ()
        for name in reversed(self.in_factors((axes,))[0]):
            if size % self.shard_count([(name, *chosen)]) == 0:
                chosen = (name, *chosen)
        return chosen

    def position_embedding_spec(self, shape: Sequence[int]) -> Spec:
        """Return the spec of a parameter (1, tokens, width), sharded like the tokens and along
        "fsdp". The number of tokens is a multiple of "domain"."""
        width_axes: Axes = ("fsdp",)
        if shape[2] % self.fsdp:
            width_axes = self._dividing(shape[2], width_axes)
        return self._sharded_along({1: ("domain",), 2: width_axes}, len(shape))

    def unsharded_spec(self, shape: Sequence[int], tensor_dim: int | None = None) -> Spec:
        """Return the spec of a parameter while its block computes: only "tensor" shards it."""
        along = {} if tensor_dim is None else {tensor_dim: ("tensor",)}
        return self._sharded_along(along, len(shape))

    @property
    def min_shards(self) -> int:
        """Return the least number of shards of a parameter of which no two devices along "fsdp"
        have the same."""
        return self.shard_count([self._parameter_axes()[-1]])

    def _parameter_axes(self) -> list[Axes]:
        """Return the axes that may shard a parameter, in order of preference."""
        wanted: list[Axes] = [(*_PARAMETER_AXES, "tensor"), _PARAMETER_AXES, ("fsdp",)]
        return [axes for axes in self.spec(*wanted) if axes] or [()]

    def _sharded_along(self, axes: Mapping[int, Axes], dimensions: int) -> Spec:
        return self.spec(*(axes.get(d, ()) for d in range(dimensions)))


def _primes(number: int) -> list[int]:
    """Return the prime factors, in ascending order."""
    primes, prime = [], 2
    while number > 1:
        if number % prime:
            prime += 1
        else:
            primes.append(prime)
            number //= prime
    return primes


def replicas(sharding: ShardingConfig) -> int:
    """Return ``--mesh_dcn``. Raises UsageError if it is not known yet."""
    if isinstance(sharding.mesh_dcn, int):
        return sharding.mesh_dcn
    raise UsageError(
        f"--mesh_dcn {sharding.mesh_dcn} requires attached TPU slices: use a number instead"
    )


def on_slices(sharding: ShardingConfig, slices: int) -> ShardingConfig:
    """Resolve ``--mesh_dcn`` in a job with this number of TPU slices. Raises UsageError if a
    replica would be on several, or slices had no equal numbers of replicas."""
    if sharding.mesh_dcn == "slices":
        return replace(sharding, mesh_dcn=slices)
    if replicas(sharding) % slices:
        raise UsageError(
            f"--mesh_dcn {sharding.mesh_dcn} is not a multiple of {slices}, the number of slices "
            "(MEGASCALE_NUM_SLICES): use --mesh_dcn slices"
        )
    return sharding


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
