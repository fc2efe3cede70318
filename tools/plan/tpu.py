"""``--plan`` for TPUs: search, ask the compiler, print the plans."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from data.config import DataConfig
from data.files import make_folder, replace_file
from models.spec import ModelSpec
from tools.compile_only.command import DOES_NOT_FIT
from tools.compile_only.compiler import check_installed
from tools.plan.plans import (
    ALWAYS,
    Outcome,
    Plan,
    Price,
    Work,
    check_prices,
    find_work,
    read_prices,
    tell,
    typed,
    words_of,
)
from tools.plan.tpu_search import CHOICES, Candidate, Found, Option, Search, candidates
from training.config import EmaConfig, OptimizerConfig, RunConfig
from training.errors import UsageError
from training.resolve import resolve_common, resolve_model
from training.step_sizes import step_sizes
from xla_fsdp.config import XlaConfig
from xla_fsdp.estimates import estimate
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import CHIPS

# ------------------------------------------------------------------------------------------------
# What the TPU compiler says of a step: ``--compile_only`` in a process of its own, and kept.
#
# A file of a folder holds one answer. Its name follows from all that the answer depends on: the
# flags, what libtpu is told by the environment, the packages' versions, and the program's sources.


ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "run_vit_training.py"
_SOURCES = (
    "run_vit_training.py",
    "config_fields.py",
    "training",
    "models",
    "data",
    "xla_fsdp",
    "tools",
)
_PACKAGES = ("torch", "torch_xla", "libtpu", "jax", "jaxlib", "timm")
_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
_USAGE = 2
"""The exit code of what the program, or the compiler, refuses."""


def compile_words(config: RunConfig, own: XlaConfig, candidate: Candidate) -> list[str]:
    """Return the flags of ``--compile_only`` for a candidate.

    Only those that the step depends on are there, so that other data, epochs or folders are
    answered from what is kept.
    """
    config, own = candidate.flags(config, own)
    data = DataConfig(
        batch_size=config.data.batch_size, grad_accum_steps=config.data.grad_accum_steps
    )
    given = config.optimizer
    optimizer = replace(
        OptimizerConfig(),
        optimizer=given.optimizer,
        clip_grad_norm=given.clip_grad_norm,
        optimizer_dtype=given.optimizer_dtype,
    )
    step = replace(
        RunConfig(),
        data=data,
        model=config.model,
        optimizer=optimizer,
        ema=replace(EmaConfig(), model_ema=config.ema.model_ema),
        sharding=config.sharding,
    )
    own = replace(own, compile_only=True, tpu_topology=candidate.topology.name)
    return words_of(step, own, without=("cpu_devices", "compile_cache_dir"), always=ALWAYS)


class Compilations:
    """The answers of the compiler, those of earlier runs among them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = 0
        """How many steps were compiled, and not found in the folder."""

    def known(self, words: list[str]) -> dict[str, Any] | None:
        """Return the answer to these flags if it is kept."""
        path = self._path(words)
        try:
            return json.loads(path.read_text())["answer"]
        except (OSError, ValueError, KeyError, TypeError):  # none, or not written to its end
            return None

    def ask(self, words: list[str]) -> dict[str, Any]:
        """Return the report of ``--compile_only`` as a dictionary, or {"refused": why}.

        Raises UsageError if the program ends otherwise.
        """
        found = self.known(words)
        if found is not None:
            return found
        self.asked += 1
        code, printed, said = _run(words)
        if code in (0, DOES_NOT_FIT):
            answer = json.loads(printed.splitlines()[-1])
        elif code == _USAGE:
            answer = {"refused": said.strip().splitlines()[-1].partition("error: ")[2]}
        else:
            last = (said.strip().splitlines() or ["no word"])[-1]
            raise UsageError(
                f"--plan: a compilation ended with code {code} ({last[:200]}): {' '.join(words)}"
            )
        self._keep(words, answer)
        return answer

    def _keep(self, words: list[str], answer: dict[str, Any]) -> None:
        path = self._path(words)
        make_folder(path.parent)
        content = json.dumps({"flags": words, **_circumstances(), "answer": answer})
        replace_file(path, content.encode(), unfinished=str(os.getpid()))

    def _path(self, words: list[str]) -> Path:
        told = json.dumps([words, _circumstances()])
        return self.folder / f"{hashlib.sha256(told.encode()).hexdigest()[:24]}.json"


def _run(words: list[str]) -> tuple[int, str, str]:
    """Run ``--compile_only``; return its exit code and what it printed. It ends with this process.

    Compiling goes on in a child of the child, which takes gigabytes: whatever ends the waiting,
    such as Ctrl-C or SIGTERM, ends both.
    """
    signal.signal(signal.SIGTERM, _end)
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *words, "--json"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as started:
        try:
            printed, said = started.communicate()
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)
            raise
    return started.returncode, printed, said


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _circumstances() -> dict[str, Any]:
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    return {"versions": _versions(), "sources": _hash_of_sources(), "environment": variables}


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


@functools.cache
def _hash_of_sources() -> str:
    """Return a hash of what traces and compiles a step; what plans has no part in that."""
    files = sorted(
        path
        for name in _SOURCES
        for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
        if path.parent.name != "plan"
    )
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(ROOT)}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------


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
        shape = step_sizes(self.model)
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
