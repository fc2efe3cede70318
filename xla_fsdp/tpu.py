"""Facts about TPUs that need no TPU: the specifications of each kind of chip, the slices that
``--tpu_topology`` names, and ``LIBTPU_INIT_ARGS``, which libtpu reads when it starts.
"""

import itertools
import math
import os
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tpu_machines import LIBTPU_VARIABLE, MACHINE_TYPES, libtpu_flags
from training.errors import UsageError
from xla_fsdp import torch_xla_private

# -- chips ----------------------------------------------------------------------------
#
# Sources: Google Cloud's page of each generation (dense bf16 FLOP/s; HBM bandwidth; interconnect
# bandwidth a chip, of which the figure here is one direction; data center network, DCN, a chip: v5p
# 50 Gbit/s, v5e and v6e by pod, 6.4 and 25.6 Tbit/s for 256 chips; v4's page gives none, v5p's is
# used). PCIe: 16 to 32 GB/s, by notes on "How to Scale Your Model"
# (jax-ml.github.io/scaling-book); v6e is given the more, its page names PCIe Gen5. Matrix units: 4
# of 128 x 128 in each core, of which v4 and v5p have two; on v6e 4 of 256 x 256. The clocks that
# follow are 1.05 GHz for v4, 1.5 for v5e, 1.75 for v5p and v6e. ``hbm_bytes`` is what the compiler
# itself reports as usable (libtpu 0.0.21; tpu7x: 0.0.52), less than there is.
#
# tpu7x: docs.cloud.google.com/tpu/docs/tpu7x has, of a chip, 2,307 bf16 and 4,614 fp8 TFLOP/s, 192
# GiB of HBM at 7,380 GB/s, 1,200 GB/s of interconnect in both directions, 100 Gbit/s of DCN; its
# two cores are a device each, joined by a link of six times the bandwidth of one to a neighbour.
# Not on that page: PCIe, assumed as v6e's, and the matrix units, assumed as v6e's in each core (the
# products that the compiler schedules there take as many cycles); 2.2 GHz follows.

_PEAKS = {
    "v2": (45e12, 2),
    "v3": (123e12, 2),
    "v4": (275e12, 1),
    "v5litepod": (197e12, 1),
    "v5p": (459e12, 1),
    "v6e": (918e12, 1),
    "tpu7x": (2307e12, 2),
}
"""By the name in the slice's accelerator type ("v5p" of "v5p-128"): bf16 FLOP/s of a chip, and its
devices, as a program sees them."""


def peak_of(kind: str) -> float | None:
    """Return the bf16 FLOP/s of one device of a kind of TPU; None if it is not in the table."""
    flops, devices = _PEAKS.get(kind, (None, 1))
    return flops and flops / devices


@dataclass(unsafe_hash=True)
class Chip:
    """One generation of chips: the figures of a device, which is a chip but on tpu7x.

    Bandwidths are in bytes/s.
    """

    kind: str
    """Its name in accelerator types."""
    dimensions: int
    hbm_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    """Of all links of a chip, which its devices share."""
    dcn_bandwidth: float
    host_bandwidth: float
    """Of PCIe, in one direction, to the memory of the host."""
    products_a_cycle: int
    """Multiply-adds that all of its matrix units start in a cycle."""
    int8_speedup: int = 2
    """How many multiply-adds of int8 numbers it does in the time of one of bf16 numbers."""
    between_devices: float = 0.0
    """From one device of a chip to the other."""

    def __post_init__(self) -> None:
        chip_flops, self.devices = _PEAKS[self.kind]
        self.peak_flops = chip_flops / self.devices
        self.links = 2 * self.dimensions  # a neighbour in both directions along each side
        self.link_bandwidth = self.ici_bandwidth / self.links
        # Cycles a second at which the matrix units, all at work, reach the peak.
        self.clock_hz = self.peak_flops / (2 * self.products_a_cycle)


_GIB = 2**30
CHIPS = {
    "v4": Chip("v4", 3, int(31.75 * _GIB), 1228e9, 300e9, 6.25e9, 16e9, 8 * 128**2, int8_speedup=1),
    "v5e": Chip("v5litepod", 2, int(15.75 * _GIB), 819e9, 200e9, 3.125e9, 16e9, 4 * 128**2),
    "v5p": Chip("v5p", 3, int(95.74 * _GIB), 2765e9, 600e9, 6.25e9, 16e9, 8 * 128**2),
    "v6e": Chip("v6e", 2, int(31.25 * _GIB), 1640e9, 400e9, 12.5e9, 32e9, 4 * 256**2),
    "tpu7x": Chip(
        *("tpu7x", 3, int(94.74 * _GIB), 3690e9, 600e9, 6.25e9, 16e9, 4 * 256**2),
        int8_speedup=1,
        between_devices=6 * 100e9,
    ),
}
"""By the name in ``--tpu_topology``."""
CHIPS_BY_KIND = {chip.kind: chip for chip in CHIPS.values()}
"""By the name in accelerator types."""


def kind_here() -> str:
    """Return the accelerator type of this host's chips, "v5p" say; "" where nothing names it."""
    try:
        return torch_xla_private.host_tpu().get_tpu_type()
    except (OSError, KeyError):  # no metadata server, or none that names the slice
        return ""


# -- slices ---------------------------------------------------------------------------

_EXAMPLES = {
    "v4": "2x2x1 (4 chips), 2x2x4 (16), 4x4x4 (64), 4x4x8 (128), 4x8x8 (256)",
    "v5e": "1x1 (1 chip), 2x2 (4), 2x4 (8), 4x4 (16), 8x8 (64), 8x16 (128), 16x16 (256)",
    "v5p": "2x2x1 (4 chips), 2x2x4 (16), 4x4x4 (64), 4x4x8 (128), 8x8x8 (512)",
    "v6e": "1x1 (1 chip), 2x2 (4), 2x4 (8), 4x4 (16), 8x8 (64), 8x16 (128), 16x16 (256)",
    "tpu7x": "2x2x1 (4 chips), 2x2x2 (8), 4x4x4 (64), 4x4x8 (128), 4x8x8 (256)",
}
KNOWN = "; ".join(f"{name}: {shapes}" for name, shapes in _EXAMPLES.items())

_LARGEST = {
    "v4": (16, 16, 16),
    "v5e": (16, 16),
    "v5p": (16, 16, 24),
    "v6e": (16, 16),
    "tpu7x": (16, 24, 24),
}
"""The slices with the most chips that Google Cloud has; of v4 and tpu7x a pod."""
_SMALL: set[tuple[int, ...]] = {(2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)}
_SMALL |= {(1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4)}
"""Sides, in order, of all slices in a plane, and of those with less than one cube of 4 x 4 x 4
chips; larger ones are made of whole cubes."""
_OF_A_HOST = {"1x1", "1x2", "1x1x1", "1x2x1"}
"""Parts of a host's 2 x 2 chips that libtpu compiles for."""

_OTHER_NAMES = {
    "v5litepod": "v5e",  # in accelerator types
    "tpu-v4-podslice": "v4",  # on GKE, also the next four
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5-lite-device": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
}
_COUNTED_IN_CORES = ("v4", "v5p", "tpu7x")
"""Kinds whose accelerator types count cores, of which a chip has two: v5p-128 has 64 chips."""


@dataclass(unsafe_hash=True)
class Topology:
    name: str
    """The name that libtpu gives one slice."""
    chip: Chip
    sides: tuple[int, ...]
    """Chips along each side of one slice."""
    slices: int

    def __post_init__(self) -> None:
        self.slice_chips = math.prod(self.sides)
        self.chips = self.slices * self.slice_chips
        # On v4, torch_xla has libtpu join the two cores of a chip.
        self.slice_devices = self.slice_chips * self.chip.devices
        self.devices = self.slices * self.slice_devices
        # As torch_xla counts it: 5 for v5e and v5p.
        self.generation = next(int(letter) for letter in self.name if letter.isdigit())


def parse_topology(name: str, slices: int = 1) -> Topology:
    """Parse "v5p:4x4x8" or another name of Google's for a slice: an accelerator type (v5p-256), a
    machine type (ct5p-hightpu-4t) or GKE's name of the chip (tpu-v5p-slice:4x4x8). Raises
    UsageError, with the known ones, for any other."""
    typed = name
    name = MACHINE_TYPES.get(name.lower(), name)
    if split := re.fullmatch(r"(.+)[:-]([x\d]*)", name.lower()):
        kind = _OTHER_NAMES.get(split[1], split[1])
        is_type = kind in CHIPS and re.search(r"-\d{1,9}$", name)
        name = f"{kind}:{_shape_of(kind, int(split[2]), typed) if is_type else split[2]}"
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise UsageError(f"--tpu_topology {typed}: unknown kind of TPU; shapes by kind: {KNOWN}")
    chip, is_shape = CHIPS[kind], re.fullmatch(r"[1-9][0-9]{0,99}(x[1-9][0-9]{0,99})*", shape)
    sides = tuple(map(int, shape.split("x"))) if is_shape else ()
    examples = f"use for example {_EXAMPLES[kind]}"
    if len(sides) != chip.dimensions:
        axes = "AxBxC"[: 2 * chip.dimensions - 1]
        raise UsageError(
            f"--tpu_topology {typed} must be {kind}:{axes}, the number of chips along each side: "
            f"{examples}"
        )
    if not _exists(kind, sides):
        raise UsageError(
            f"--tpu_topology {typed} does not exist (for several slices set --mesh_dcn N): "
            f"{examples}"
        )
    return Topology(name, chip, sides, slices)


def _exists(kind: str, sides: tuple[int, ...]) -> bool:
    """Return True if there is a slice with so many chips along each side."""
    if sides[0] % 2 or sides[1] % 2:  # a host has 2 x 2 chips
        exists = "x".join(map(str, sides)) in _OF_A_HOST
    else:  # whichever way round
        whole_cubes = len(sides) == 3 and not any(side % 4 for side in sides)
        exists = whole_cubes or tuple(sorted(sides)) in _SMALL
    pairs = zip(sorted(sides), _LARGEST[kind], strict=True)
    return exists and all(side <= most for side, most in pairs)


def _shape_of(kind: str, count: int, typed: str) -> str:
    """Return the shape that an accelerator type has: of all slices with as many chips the one with
    the shortest sides. Raises UsageError if there is none."""
    shapes: dict[int, tuple[int, ...]] = {}
    edges = [(1, 2, *range(4, most + 1, 4)) for most in _LARGEST[kind]]
    for sides in itertools.product(*edges):
        chips, shape = math.prod(sides), tuple(sorted(sides))
        if len(shape) == 3 and shape[0] == 1:  # as Google writes them: 2x2x1
            shape = (*shape[1:], 1)
        is_type = _exists(kind, shape) and (chips >= 4 or shape == (1, 1))
        if is_type and sum(shape) < sum(shapes.get(chips, (math.inf,))):
            shapes[chips] = shape
    per_chip = 2 if kind in _COUNTED_IN_CORES else 1
    types = {per_chip * chips: "x".join(map(str, shapes[chips])) for chips in sorted(shapes)}
    if count not in types:
        below = [each for each in types if each < count][-1:]
        above = [each for each in types if each > count][:1]
        near = " or ".join(f"{kind}-{each} ({kind}:{types[each]})" for each in [*below, *above])
        unit = "chips" if per_chip == 1 else "cores, two a chip"
        raise UsageError(
            f"--tpu_topology {typed} does not exist: {kind}-N has N {unit}: use {near}"
        )
    return types[count]


# -- libtpu: its versions, and its flags: the user's, torch_xla's, and our own ---------

NEWER_LIBTPU = "0.0.52"
"""The version that --compile_only may use beside the one that torch_xla requires."""
NEWER_LIBRARY = Path(__file__).parents[1] / ".libtpu" / NEWER_LIBTPU / "libtpu" / "libtpu.so"
"""Where `make tpu-compiler` puts it: installed, it would replace torch_xla's."""


def takes_newer_libtpu(asked: str, topology: Topology) -> bool:
    """Return True if the newer libtpu compiles for a slice; ``asked`` is --tpu_compiler. Raises
    UsageError if the one that does is not here, or does not know the chip."""
    is_new_chip = topology.chip is CHIPS["tpu7x"]
    what = f"--tpu_topology {topology.name}" if is_new_chip else f"--tpu_compiler {asked}"
    if asked == "installed" and is_new_chip:
        raise UsageError(
            f"{what} requires --tpu_compiler {NEWER_LIBTPU}: the installed libtpu "
            f"{version('libtpu')} does not support it"
        )
    if asked == "installed" or (asked == "auto" and not is_new_chip):
        return False
    if not NEWER_LIBRARY.exists():
        folder = NEWER_LIBRARY.parents[1]
        raise UsageError(
            f"{what} requires libtpu {NEWER_LIBTPU} in {folder}: run `make tpu-compiler`"
        )
    return True


def set_libtpu_flags(kind: str | None = None) -> None:
    """Add our own flags, for a chip of this kind (default: this host's), where neither the user
    nor torch_xla has set them; call it after torch_xla's import and before libtpu starts."""
    set_before = os.environ.get(LIBTPU_VARIABLE, "")
    os.environ[LIBTPU_VARIABLE] = libtpu_flags(set_before, kind or kind_here())


def libtpu_environment(topology: Topology, user_flags: str, *, newer: bool) -> dict[str, str]:
    """Return the variables of the environment that a run on such a slice sets for libtpu.

    First torch_xla's own, then ours. ``user_flags``: those that the user has set. ``newer``: for a
    process that compiles with the newer libtpu, with which torch_xla does not run.
    """
    if newer:
        joined = {"TPU_MEGACORE": "megacore_dense"} if topology.generation == 4 else {}
        flags = libtpu_flags(user_flags, topology.chip.kind)
        return {LIBTPU_VARIABLE: flags, "TPU_LIBRARY_PATH": str(NEWER_LIBRARY), **joined}
    import torch_xla  # noqa: F401 - sets its own when it is imported, too

    before = dict(os.environ)
    try:
        os.environ[LIBTPU_VARIABLE] = user_flags
        torch_xla_private.set_libtpu_defaults(topology.generation)
        set_libtpu_flags(topology.chip.kind)
        return {key: value for key, value in os.environ.items() if before.get(key) != value}
    finally:
        os.environ.clear()
        os.environ.update(before)


def raise_if_refused(stderr: str) -> None:
    """Raise UsageError if libtpu has ended a process because of the variable."""
    refused = re.findall(
        r"^ERROR: ((?:Unknown command line flag|Illegal value|Missing value).*)", stderr, re.M
    )
    if refused:
        reasons = "; ".join(line.strip().rstrip(".;") for line in refused)
        raise UsageError(f"libtpu refuses {LIBTPU_VARIABLE} ({reasons}): correct or unset it")
