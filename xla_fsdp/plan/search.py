"""In which order the compiler is asked, so that few questions find the best plans.

Each candidate has computed figures, and a correction with an uncertainty from those compiled so
far. By turns the fastest, the cheapest and the smallest plan is looked for: the candidate is
compiled that would be it if it were as good as it may be. When none may beat what is compiled, the
search is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_fsdp.plan.calibration import Correction, corrections
from xla_fsdp.plan.model import Estimate
from xla_fsdp.plan.space import Candidate

_MARGIN = 1.3
"""How much more than a chip's memory the arithmetic may say of what is still asked about."""
_GAIN = 0.01
"""A plan that is better by no more than this share is not looked for."""
_HOPES = (1.0, 2.0)
"""Deviations by which a candidate may be better than expected: the second where no candidate is
promising by the first."""


@dataclass(frozen=True)
class Option:
    """A candidate with what the arithmetic says of it."""

    candidate: Candidate
    computed: Estimate
    dollars: float
    """Of a chip for an hour; 0 where no price is known."""

    def cost(self, step_s: float) -> float:
        return step_s * self.candidate.topology.chips * self.dollars


@dataclass(frozen=True)
class Found:
    """What the compiler says of a candidate."""

    fits: bool
    peak_bytes: float
    step_s: float
    """Infinite where it does not fit."""


@dataclass(frozen=True)
class Guess:
    """Computed figures with the correction: as expected, and as good as they may be."""

    option: Option
    step_s: float
    peak_bytes: float
    step_deviation: float
    peak_deviation: float

    def best_step_s(self, hope: float) -> float:
        return self.step_s * math.exp(-hope * self.step_deviation)

    def may_fit(self, by: float) -> bool:
        """Tell whether it fits if it needs less than expected by so many deviations."""
        capacity = self.option.candidate.topology.chip.hbm_bytes
        return self.peak_bytes * math.exp(-by * self.peak_deviation) <= capacity


Goal = Callable[[Option, float], Any]
GOALS: dict[str, Goal] = {
    "fastest": lambda option, step_s: step_s,
    "cheapest": lambda option, step_s: option.cost(step_s),
    "smallest": lambda option, step_s: (option.candidate.topology.chips, option.cost(step_s)),
}
"""What each kind of plan has as little as possible of, by a candidate and the seconds of a step."""


class Search:
    """The options of a plan, and what is known of them."""

    def __init__(self, options: Sequence[Option], step_at_most_s: float = math.inf) -> None:
        """``step_at_most_s``: plans whose step takes longer are of no use."""
        self.options = [
            option
            for option in options
            if option.computed.peak_bytes <= _MARGIN * option.candidate.topology.chip.hbm_bytes
        ]
        self.found: dict[Candidate, Found] = {}
        self.dropped: set[Candidate] = set()
        self._at_most_s = step_at_most_s
        self._turn = 0

    def learn(self, candidate: Candidate, found: Found | None) -> None:
        """Take what the compiler, or the program, says of a candidate; None: it is refused."""
        if found is None:
            self.dropped.add(candidate)
        else:
            self.found[candidate] = found

    def useful(self) -> list[Option]:
        """Return the options that are known to fit, in the time that there is."""
        return [
            option
            for option in self.options
            if (found := self.found.get(option.candidate))
            and found.fits
            and found.step_s <= self._at_most_s
        ]

    def next(self, takes: Callable[[Candidate], bool] = lambda candidate: True) -> Option | None:
        """Return what to ask the compiler about, None if nothing better is to be expected.

        ``takes`` tells whether the program takes a candidate; one that it does not is dropped.
        """
        guesses = self.guesses()
        for hope in _HOPES:
            for _ in GOALS:
                goal = list(GOALS.values())[self._turn % len(GOALS)]
                self._turn += 1
                option = self._best(goal, guesses, hope, takes)
                if option is not None:
                    return option
        return None

    def _best(
        self,
        goal: Goal,
        guesses: Sequence[Guess],
        hope: float,
        takes: Callable[[Candidate], bool],
    ) -> Option | None:
        """Return what may be best for a goal, if it may be better than what is known."""
        known = [goal(o, self.found[o.candidate].step_s) for o in self.useful()]
        better = [
            guess
            for guess in guesses
            if (best_s := guess.best_step_s(hope)) <= self._at_most_s
            and (not known or goal(guess.option, best_s * (1 + _GAIN)) < min(known))
        ]
        for by in (0.0, 1.0, 2.0):  # what surely fits is asked about first
            fitting = [guess for guess in better if guess.may_fit(by)]
            for guess in sorted(
                fitting, key=lambda guess: goal(guess.option, guess.best_step_s(hope))
            ):
                candidate = guess.option.candidate
                if candidate in self.dropped:
                    continue
                if takes(candidate):
                    return guess.option
                self.dropped.add(candidate)
        return None

    def guesses(self) -> list[Guess]:
        """Return the corrected figures of all that is not compiled."""
        by_candidate = {option.candidate: option.computed for option in self.options}
        asked = [
            option
            for option in self.options
            if option.candidate not in self.found and option.candidate not in self.dropped
        ]
        candidates = [option.candidate for option in asked]
        times = corrections(
            [
                (each, found.step_s / by_candidate[each].step_s)
                for each, found in self.found.items()
                if found.fits
            ],
            candidates,
        )
        peaks = corrections(
            [
                (each, found.peak_bytes / by_candidate[each].peak_bytes)
                for each, found in self.found.items()
            ],
            candidates,
        )
        return [_guess(*each) for each in zip(asked, times, peaks, strict=True)]


def _guess(option: Option, time: Correction, peak: Correction) -> Guess:
    return Guess(
        option,
        option.computed.step_s * time.factor,
        option.computed.peak_bytes * peak.factor,
        time.deviation,
        peak.deviation,
    )
