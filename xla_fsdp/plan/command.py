"""``--plan`` for TPUs: search, ask the compiler, print the plans."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from models.spec import ModelSpec
from training.errors import UsageError
from training.options.config import RunConfig
from training.options.resolve import resolve_common, resolve_model
from training.plan.choices import check_prices
from training.plan.command_lines import ALWAYS, typed, words_of
from training.plan.outcome import Outcome, tell
from training.plan.plans import Plan
from training.plan.prices import Price, read_prices
from training.plan.shape import shape_of
from training.plan.work import Work, find_work
from xla_fsdp.compile_only.compiler import check_installed
from xla_fsdp.compile_only.topologies import CHIPS
from xla_fsdp.config import XlaConfig
from xla_fsdp.plan.compilations import Compilations, compile_words
from xla_fsdp.plan.model import estimate
from xla_fsdp.plan.search import Found, Option, Search
from xla_fsdp.plan.space import CHOICES, Candidate, candidates
from xla_fsdp.resolve_xla import resolve_for_slice

_ALL = 10**9
_PROGRAM = "python3 run_vit_training.py"


@dataclass(frozen=True)
class Planner:
    """What is asked, for the parts of a search."""

    config: RunConfig
    own: XlaConfig
    model: ModelSpec
    work: Work
    prices: dict[str, Price]

    def options(self, choices: Mapping[str, tuple[Any, ...]] = CHOICES) -> list[Option]:
        """Return all that the flags leave open of these choices, with what the arithmetic says."""
        shape = shape_of(self.model)
        return [
            Option(
                each,
                estimate(shape, each.layout(self.config), each.topology.chip),
                self.prices[each.kind].per_hour if each.kind in self.prices else 0.0,
            )
            for each in candidates(self.config, self.own, choices)
        ]

    def refusal(self, candidate: Candidate) -> str | None:
        """Return why the program does not take a candidate; None if it does."""
        config, own = candidate.flags(self.config, self.own)
        try:
            resolve_for_slice(config, own, candidate.topology, self.model)
        except UsageError as error:
            return str(error)
        return None

    def takes(self, candidate: Candidate) -> bool:
        """Tell whether the program takes a candidate."""
        return self.refusal(candidate) is None

    def plan(self, option: Option, step_s: float, peak_bytes: float, compiled: bool) -> Plan:
        candidate, topology = option.candidate, option.candidate.topology
        config, own = candidate.flags(self.config, self.own)
        train = words_of(config, own, always=ALWAYS)
        at_peak_s = self.model.train_flops_per_image * self.work.batch_size
        at_peak_s /= topology.devices * topology.chip.peak_flops
        several = f"{topology.slices} x " if topology.slices > 1 else ""
        return Plan(
            hardware=several + topology.name,
            kind=candidate.kind,
            chips=topology.chips,
            settings=candidate.settings,
            peak_bytes=peak_bytes,
            capacity_bytes=topology.chip.hbm_bytes,
            step_s=step_s,
            mfu=at_peak_s / step_s,
            compiled=compiled,
            commands={
                "train": f"{_PROGRAM} {typed(train)}",
                "check": f"{_PROGRAM} {typed(compile_words(self.config, self.own, candidate))}",
            },
            work=self.work,
            price=self.prices.get(candidate.kind),
        )


def plan_slices(config: RunConfig, own: XlaConfig) -> int:
    """Print the plans for TPUs, or with ``--json`` their figures, and return the exit code.

    Raises UsageError.
    """
    prices = read_prices(config.planning.price)
    check_installed()
    asked = config.planning
    resolve_common(config)  # for its checks
    config, model = resolve_model(config)
    check_prices(prices, tuple(CHIPS), asked)
    planner = Planner(config, own, model, find_work(config, model), prices)
    hours = asked.hours or math.inf
    options = planner.options()
    if not options:
        raise UsageError(
            f"--batch_size {config.data.batch_size} cannot be divided over the devices of "
            "any slice by these flags: change it, or --tpu_topology"
        )
    search = Search(options, step_at_most_s=hours * 3600 / planner.work.steps)
    compilations = Compilations(Path(asked.plan_dir) / "compiled")
    ask_compiler(planner, search, compilations, compiled=asked.plan_compilations)
    outcome = Outcome(
        config=config,
        what=f"{model.name}, {model.parameter_count:,} parameters",
        work=planner.work,
        prices=prices,
        plans=_plans(planner, search),
        notes=_notes(search, compilations),
        picture=Path(asked.plan_dir) / "tpu.png",
    )
    return tell(outcome)


def ask_compiler(
    planner: Planner,
    search: Search,
    compilations: Compilations,
    *,
    compiled: int = _ALL,
    asked: int = _ALL,
) -> None:
    """Let the compiler answer what the search asks, with so many new compilations at most.

    ``asked``: how many answers are taken at most, those that are kept among them.
    """
    with tqdm(total=min(compiled, asked), desc="compile", unit="step", file=sys.stderr) as bar:
        while len(search.found) < asked and (option := search.next(planner.takes)) is not None:
            candidate = option.candidate
            words = compile_words(planner.config, planner.own, candidate)
            if compilations.known(words) is None and compilations.asked >= compiled:
                break
            bar.set_postfix_str(f"{candidate.topology.name}, {candidate.settings}")
            before = compilations.asked
            search.learn(candidate, found_in(compilations.ask(words)))
            bar.update(compilations.asked - before)


def found_in(answer: dict[str, Any]) -> Found | None:
    """Return what an answer of the compiler says of a step; None if it refuses the step."""
    if "refused" in answer:
        return None
    step_s = answer["expected_step_s"]
    if step_s is None:
        return Found(False, answer["peak_hbm_bytes"], math.inf)
    return Found(answer["fits"], answer["peak_hbm_bytes"], step_s)


def _plans(planner: Planner, search: Search) -> list[Plan]:
    """Return what was compiled and fits; of slices of which nothing was, the best by arithmetic."""
    compiled = []
    for option in search.useful():
        found = search.found[option.candidate]
        compiled.append(planner.plan(option, found.step_s, found.peak_bytes, True))
    seen = {candidate.topology for candidate in search.found}
    computed = []
    for guess in sorted(search.guesses(), key=lambda guess: guess.step_s):
        topology = guess.option.candidate.topology
        late = planner.work.hours(guess.step_s) > (planner.config.planning.hours or math.inf)
        if topology in seen or late or not guess.may_fit(0.0):
            continue
        if planner.takes(guess.option.candidate):
            seen.add(topology)
            computed.append(planner.plan(guess.option, guess.step_s, guess.peak_bytes, False))
    return compiled + computed


def _notes(search: Search, compilations: Compilations) -> list[str]:
    fit = sum(found.fits for found in search.found.values())
    return [
        f"{len(search.options):,} candidates fit by arithmetic or nearly, {len(search.found)} were "
        f"compiled ({compilations.asked} now, the others before), {fit} of them fit",
        "seconds are the TPU compiler's expectation, no measurement (docs/tpu.md)",
    ]
