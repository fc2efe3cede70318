"""The order in which candidates are compiled, so that few compilations find the best plans.

Each candidate has estimated time and memory, corrected, with an uncertainty, by those compiled so
far. The search takes turns at the fastest, the cheapest and the smallest plan, and compiles the
candidate with the best optimistic estimate. It ends when no candidate can beat the compiled ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any, NamedTuple

import numpy as np

from tools.plan.config import PlanConfig
from tools.plan.stacks import Stack
from training.config import RunConfig, UseConfig
from training.errors import UsageError
from training.flags import by_field, flat
from training.mesh import Mesh, replicas
from training.step_sizes import StepSizes
from xla_fsdp.estimates import POLICIES, SPMD, Estimate, FsdpCost, estimate
from xla_fsdp.tpu import CHIPS, Topology, parse_topology

# -- candidates: slices, and the values of a few flags (``Stack.choices``) -------------------

_SIDES = {
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split(),
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8".split(),
}
USUAL = [f"{kind}:{sides}" for kind, chip in CHIPS.items() for sides in _SIDES[chip.dimensions]]
"""Slices that Google Cloud has, of each kind of chip, but for larger ones."""
LARGEST = [f"{kind}:{_SIDES[chip.dimensions][-1]}" for kind, chip in CHIPS.items()]
"""Of each kind of chip the slice with the most chips: more are several slices."""


@dataclass(frozen=True)
class TpuCandidate:
    """One way to train: a slice, its mesh of devices, and the values of the flags searched."""

    mesh: Mesh
    grad_ckpt: str
    grad_accum_steps: int
    attention: str
    topology: Topology

    @property
    def kind(self) -> str:
        """Return the kind of chip as ``--tpu_topology`` names it."""
        return self.topology.name.partition(":")[0]

    @property
    def settings(self) -> str:
        """Return what is chosen beside the hardware, in a few words."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.axis_sizes.items())
        passes = f"{self.grad_accum_steps} passes" if self.grad_accum_steps > 1 else None
        return ", ".join(filter(None, (axes, self.grad_ckpt, self.attention, passes)))

    def config(self, config: RunConfig) -> RunConfig:
        """Return the configuration of a training with this choice in it."""
        return replace(
            config,
            use=UseConfig(),
            plan=False,
            explicitly_set=config.explicitly_set - by_field(PlanConfig).keys(),
            data=replace(config.data, grad_accum_steps=self.grad_accum_steps),
            sharding=replace(
                config.sharding,
                mesh_dcn=self.mesh.dcn,
                mesh_domain=self.mesh.domain,
                mesh_tensor=self.mesh.tensor,
                grad_ckpt=self.grad_ckpt,  # type: ignore[arg-type]
                attention=self.attention,  # type: ignore[arg-type]
            ),
        )

    def estimate(self, shape: StepSizes, config: RunConfig, fsdp: FsdpCost = SPMD) -> Estimate:
        """Return what the arithmetic expects of it."""
        config = self.config(config)
        return estimate(shape, self.topology.chip, self.mesh, config, self.attention, fsdp)


def candidates(config: RunConfig, stack: Stack, chips_at_most: int) -> Iterator[TpuCandidate]:
    """Yield all that the flags leave open, whether the program accepts it or not.

    Slices have up to ``--chips_at_most`` chips, of each as many as ``--mesh_dcn`` says. Where
    neither that nor slices are given, of the largest several: where one slice has as many chips,
    several smaller are no better. What cannot divide the batch is left out.

    Raises UsageError for a slice that is unknown, if all are too large, and for a ``--grad_ckpt``
    of which no arithmetic is known.
    """
    dcn = replicas(config.sharding)
    asked = stack.xla.tpu_topology
    names = asked.split(",") if asked else USUAL
    several = not asked and "mesh_dcn" not in config.explicitly_set
    topologies = [
        topology
        for name in names
        for number in ([1, 2, 4, 8] if name in LARGEST and several else [dcn])
        if (topology := parse_topology(name, number)).chips <= chips_at_most
    ]
    if not topologies:
        fewest = min(parse_topology(name, dcn).chips for name in names)
        raise UsageError(
            f"--chips_at_most {chips_at_most} is too low: the smallest slice has {fewest} chips"
        )
    # A field whose flag was given stays as it is, unless it is "auto".
    flags = flat(config)
    tried = {
        name: (flags[name],) if name in config.explicitly_set and flags[name] != "auto" else values
        for name, values in stack.choices.items()
    }
    if tried["grad_ckpt"][0] not in POLICIES:
        raise UsageError(
            f"--plan supports --grad_ckpt {', '.join(POLICIES)}, not {flags['grad_ckpt']}"
        )
    for topology, *values in product(topologies, *tried.values()):
        chosen = dict(zip(tried, values, strict=True))
        domain, tensor = chosen.pop("mesh_domain"), chosen.pop("mesh_tensor")
        fsdp, rest = divmod(topology.slice_devices, domain * tensor)
        if rest or config.sharding.mesh_fsdp not in (None, fsdp):
            continue
        mesh = Mesh(topology.slices, fsdp, domain, tensor)
        if config.data.batch_size % (mesh.batch_shards * chosen["grad_accum_steps"]) == 0:
            yield TpuCandidate(mesh=mesh, topology=topology, **chosen)


# -- corrections: how far the arithmetic is off for what is not compiled, and how surely -------
#
# The logarithm of compiled over computed is modelled as a sum of effects: of the generation of
# chips, of each choice on that generation, and of the step itself. How large each usually is, is
# assumed (``EFFECTS``); that gives for any candidate a mean and a deviation (regression with
# Gaussian processes, whose kernel counts the effects that two candidates share).

EFFECTS: list[tuple[float, Callable[[TpuCandidate], Any]]] = [
    (0.15, lambda c: 0),
    (0.15, lambda c: c.kind),
    (0.12, lambda c: (c.kind, c.grad_ckpt)),
    (0.15, lambda c: (c.kind, c.attention)),
    (0.12, lambda c: (c.kind, c.mesh.tensor)),
    (0.12, lambda c: (c.kind, c.mesh.domain)),
    (0.15, lambda c: (c.kind, c.mesh.fsdp * c.grad_accum_steps)),  # images of a device in a pass
    (0.05, lambda c: c.topology),
    (0.03, lambda c: (c.topology, c.mesh, c.grad_ckpt, c.attention)),
]
"""Deviations of the logarithm, and what candidates that share the effect have in common."""
_OWN = 0.04
"""The deviation of a step that no other step explains."""


def corrections(
    compiled: Sequence[tuple[TpuCandidate, float]], asked: Sequence[TpuCandidate]
) -> tuple[np.ndarray, np.ndarray]:
    """Return what each computed figure asked for is to be multiplied by, from compiled over
    computed of others, and its relative uncertainty, a standard deviation."""

    def covariance(some: Sequence[TpuCandidate], others: Sequence[TpuCandidate]) -> np.ndarray:
        total = np.zeros((len(some), len(others)))
        for deviation, effect in EFFECTS:
            numbers: dict[Any, int] = {}
            rows = np.array([numbers.setdefault(effect(c), len(numbers)) for c in some])
            columns = np.array([numbers.setdefault(effect(c), len(numbers)) for c in others])
            total += deviation**2 * (rows[:, None] == columns[None, :])
        return total

    known = [candidate for candidate, _ in compiled]
    among = covariance(known, known) + _OWN**2 * np.eye(len(known))
    across = covariance(asked, known)
    weights = np.linalg.solve(among, across.T)
    means = weights.T @ np.log([ratio for _, ratio in compiled])
    alone = sum(deviation**2 for deviation, _ in EFFECTS) + _OWN**2
    variances = alone - np.einsum("ij,ji->i", across, weights)
    return np.exp(means), np.sqrt(np.maximum(variances, _OWN**2))


# -- the search ----------------------------------------------------------------------------------

_MARGIN = 1.3
"""How much more than a chip's memory the arithmetic may estimate of what is still asked about."""
_GAIN = 0.01
"""A plan that is better by no more than this share is not looked for."""
_HOPES = (1.0, 2.0)
"""Deviations by which a candidate may be better than expected: the second where no candidate is
promising by the first."""


@dataclass(frozen=True)
class ComputedCandidate:
    """A candidate with the estimate of the arithmetic."""

    candidate: TpuCandidate
    computed: Estimate
    dollars: float
    """Of a chip for an hour; 0 where no price is known."""

    def cost(self, step_s: float) -> float:
        return step_s * self.candidate.topology.chips * self.dollars


@dataclass(frozen=True)
class Found:
    """The compiler's figures of a candidate."""

    fits: bool
    peak_bytes: float
    step_s: float
    """Infinite where it does not fit."""


class Guess(NamedTuple):
    """Corrected figures of a candidate that is not compiled, and their relative uncertainty."""

    option: ComputedCandidate
    step_s: float
    step_deviation: float
    peak_bytes: float
    peak_deviation: float


GOALS: tuple[Callable[[ComputedCandidate, float], Any], ...] = (
    lambda option, step_s: step_s,
    lambda option, step_s: option.cost(step_s),
    lambda option, step_s: (option.candidate.topology.chips, option.cost(step_s)),
)
"""What the fastest, cheapest and smallest plan have as little as possible of, by a candidate
and the seconds of a step."""


class Search:
    """The options of a plan, and what is known of them."""

    def __init__(
        self, options: Sequence[ComputedCandidate], step_at_most_s: float = math.inf
    ) -> None:
        """``step_at_most_s``: plans whose step takes longer are of no use."""
        self.options = [
            option
            for option in options
            if option.computed.peak_bytes <= _MARGIN * option.candidate.topology.chip.hbm_bytes
        ]
        self.found: dict[TpuCandidate, Found] = {}
        """The compiler's figures."""
        self.dropped: set[TpuCandidate] = set()
        """What the program or the compiler refuses."""
        self._at_most_s = step_at_most_s
        self._goals = cycle(GOALS)

    def useful(self) -> list[ComputedCandidate]:
        """Return the options that are known to fit, in the time that there is."""
        return [
            option
            for option in self.options
            if (found := self.found.get(option.candidate))
            and found.fits
            and found.step_s <= self._at_most_s
        ]

    def next(
        self, accepts: Callable[[TpuCandidate], bool] = lambda candidate: True
    ) -> ComputedCandidate | None:
        """Return what to ask the compiler about, None if nothing better is to be expected.

        A candidate for which ``accepts`` returns False, as the program refuses it, is dropped.
        """
        guesses, useful = self.guesses(), self.useful()
        for hope, _ in product(_HOPES, GOALS):
            goal = next(self._goals)
            known = (goal(option, self.found[option.candidate].step_s) for option in useful)
            least = min(known, default=None)
            better = [
                (goal(guess.option, best_s), guess)
                for guess in guesses
                if (best_s := guess.step_s * math.exp(-hope * guess.step_deviation))
                <= self._at_most_s
                and (least is None or goal(guess.option, best_s * (1 + _GAIN)) < least)
            ]
            better.sort(key=lambda pair: pair[0])
            for deviations, (_, guess) in product((0.0, 1.0, 2.0), better):
                candidate = guess.option.candidate  # first what surely fits
                peak_bytes = guess.peak_bytes * math.exp(-deviations * guess.peak_deviation)
                if candidate in self.dropped or peak_bytes > candidate.topology.chip.hbm_bytes:
                    continue
                if accepts(candidate):
                    return guess.option
                self.dropped.add(candidate)
        return None

    def guesses(self) -> list[Guess]:
        """Return the corrected figures of all that is not compiled."""
        computed = {option.candidate: option.computed for option in self.options}
        known = self.found.keys() | self.dropped
        asked = [option for option in self.options if option.candidate not in known]
        candidates = [option.candidate for option in asked]
        step_ratios, peak_ratios = [], []
        for candidate, found in self.found.items():
            peak_ratios.append((candidate, found.peak_bytes / computed[candidate].peak_bytes))
            if found.fits:
                step_ratios.append((candidate, found.step_s / computed[candidate].step_s))
        step_factors, step_deviations = corrections(step_ratios, candidates)
        peak_factors, peak_deviations = corrections(peak_ratios, candidates)
        steps = step_factors * [option.computed.step_s for option in asked]
        peaks = peak_factors * [option.computed.peak_bytes for option in asked]
        columns = (column.tolist() for column in (steps, step_deviations, peaks, peak_deviations))
        return [*map(Guess, asked, *columns)]
