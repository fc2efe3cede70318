"""TPU slices by the names that libtpu gives them, and what their chips can do.

Sources: Google Cloud's page of each generation (bf16 FLOP/s: ``xla_fsdp.tpu_chips``; HBM bandwidth;
interconnect bandwidth a chip, of which the figure here is one direction; data center network, DCN,
a chip: v5p 50 Gbit/s, v5e and v6e by pod, 6.4 and 25.6 Tbit/s for 256 chips; v4's page gives none,
v5p's is taken). PCIe: 16 to 32 GB/s, by notes on "How to Scale Your Model"
(jax-ml.github.io/scaling-book); v6e is given the more, its page names PCIe Gen5. Matrix units: 4 of
128 x 128 in each core, of which v4 and v5p have two; on v6e 4 of 256 x 256. The clocks that follow
are 1.05 GHz for v4, 1.5 for v5e, 1.75 for v5p and v6e.
``hbm_bytes`` is what the compiler itself says it can use (libtpu 0.0.21), less than the chip has.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from training.errors import UsageError
from xla_fsdp.torch_xla_private import tpu_type
from xla_fsdp.tpu_chips import peak_of


@dataclass(frozen=True)
class Chip:
    """One generation of chips; bandwidths are in bytes/s."""

    kind: str
    """Its name in ``xla_fsdp.tpu_chips``."""
    dimensions: int
    hbm_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float
    host_bandwidth: float
    """Of PCIe, in one direction, to the memory of the host."""
    products_a_cycle: int
    """Multiply-adds that all of its matrix units begin in a cycle."""
    int8_pace: int = 2
    """How many multiply-adds of int8 numbers it does in the time of one of bf16 numbers."""

    @property
    def peak_flops(self) -> float:
        peak = peak_of(self.kind)
        assert peak is not None
        return peak

    @property
    def links(self) -> int:
        """Return to how many neighbours it has links: two along each side of the torus."""
        return 2 * self.dimensions

    @property
    def link_bandwidth(self) -> float:
        """Return the bytes/s to one neighbour."""
        return self.ici_bandwidth / self.links

    @property
    def clock_hz(self) -> float:
        """Return the cycles a second at which the matrix units, all at work, reach the peak."""
        return self.peak_flops / (2 * self.products_a_cycle)


_GIB = 2**30
CHIPS = {
    "v4": Chip("v4", 3, int(31.75 * _GIB), 1228e9, 300e9, 6.25e9, 16e9, 8 * 128**2, int8_pace=1),
    "v5e": Chip("v5litepod", 2, int(15.75 * _GIB), 819e9, 200e9, 3.125e9, 16e9, 4 * 128**2),
    "v5p": Chip("v5p", 3, int(95.74 * _GIB), 2765e9, 600e9, 6.25e9, 16e9, 8 * 128**2),
    "v6e": Chip("v6e", 2, int(31.25 * _GIB), 1640e9, 400e9, 12.5e9, 32e9, 4 * 256**2),
}


def this_chip() -> Chip | None:
    """Return what this host's TPU chips can do; None where nothing tells their kind."""
    try:
        kind = tpu_type()
    except (OSError, KeyError):  # no metadata server, or none that names the slice
        return None
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)


_EXAMPLES = {
    "v4": "2x2x1 (4 chips), 2x2x4 (16), 4x4x4 (64), 4x4x8 (128), 4x8x8 (256)",
    "v5e": "1x1 (1 chip), 2x2 (4), 2x4 (8), 4x4 (16), 8x8 (64), 8x16 (128), 16x16 (256)",
    "v5p": "2x2x1 (4 chips), 2x2x4 (16), 4x4x4 (64), 4x4x8 (128), 8x8x8 (512)",
    "v6e": "1x1 (1 chip), 2x2 (4), 2x4 (8), 4x4 (16), 8x8 (64), 8x16 (128), 16x16 (256)",
}
KNOWN = "; ".join(f"{name}: {shapes}" for name, shapes in _EXAMPLES.items())

_LARGEST = {"v4": (16, 16, 16), "v5e": (16, 16), "v5p": (16, 16, 24), "v6e": (16, 16)}
"""The slices with the most chips that Google Cloud has; of v4 a pod."""
_SMALL: set[tuple[int, ...]] = {(2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)}
_SMALL |= {(1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4)}
"""Sides, in order, of all slices in a plane, and of those with less than one cube of 4 x 4 x 4
chips; larger ones are made of whole cubes."""
_OF_A_HOST = {"1x1", "1x2", "1x1x1", "1x2x1"}
"""Parts of a host's 2 x 2 chips that libtpu compiles for."""


@dataclass(frozen=True)
class Topology:
    name: str
    """The name that libtpu gives one slice."""
    chip: Chip
    sides: tuple[int, ...]
    """Chips along each side of one slice."""
    slices: int

    @property
    def slice_chips(self) -> int:
        return math.prod(self.sides)

    @property
    def chips(self) -> int:
        return self.slices * self.slice_chips

    @property
    def devices(self) -> int:
        """Devices of all slices, a chip each: on v4, torch_xla has libtpu join the two cores."""
        return self.chips

    @property
    def generation(self) -> int:
        """The generation as torch_xla counts it: 5 for v5e and v5p."""
        return int(self.name[1])


def parse_topology(name: str, slices: int = 1) -> Topology:
    """Parse a name such as "v5p:4x4x8". Raises UsageError, with the known ones, for any other."""
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise UsageError(f"--tpu_topology {name} is unknown. Known, for example: {KNOWN}")
    chip, is_shape = CHIPS[kind], re.fullmatch(r"[1-9][0-9]{0,99}(x[1-9][0-9]{0,99})*", shape)
    sides = tuple(map(int, shape.split("x"))) if is_shape else ()
    there_are = f"{kind} has, for example, {_EXAMPLES[kind]}"
    if len(sides) != chip.dimensions:
        axes = "AxBxC"[: 2 * chip.dimensions - 1]
        raise UsageError(f"--tpu_topology {name} is not {kind}:{axes}, chips a side: {there_are}")
    if any(side > most for side, most in zip(sorted(sides), _LARGEST[kind], strict=True)):
        largest = "x".join(map(str, _LARGEST[kind]))
        raise UsageError(
            f"--tpu_topology {name} is larger than the largest slice, {kind}:{largest}: give "
            "that or a smaller one; --mesh_dcn N stands for several slices"
        )
    if not _exists(shape, sides):
        raise UsageError(f"--tpu_topology {name}: there is no such slice: {there_are}")
    return Topology(name, chip, sides, slices)


def _exists(shape: str, sides: tuple[int, ...]) -> bool:
    """Tell whether there are slices of this shape, whichever way round; a host has 2 x 2 chips."""
    if sides[0] % 2 or sides[1] % 2:
        return shape in _OF_A_HOST
    whole_cubes = len(sides) == 3 and not any(side % 4 for side in sides)
    return whole_cubes or tuple(sorted(sides)) in _SMALL
