"""``--plan`` for TPUs: search by arithmetic, compile a few candidates, print the plans."""

import functools
import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from config_fields import is_of
from data.config import DataConfig
from data.files import make_folder, parse_object, replace_file
from tools.compile_only.command import DOES_NOT_FIT
from tools.plan import plans
from tools.plan.config import PlanConfig
from tools.plan.plans import HardwarePlan, Request
from tools.plan.stacks import PROGRAM, Stack
from tools.plan.tpu_search import ComputedCandidate, Found, Search, TpuCandidate, candidates
from training.checkpoints.config import CheckpointConfig
from training.config import EmaConfig, OptimizerConfig, RunConfig, flags_of_model
from training.errors import UsageError
from training.feature import Feature
from training.feature_table import features
from training.objectives.config import flags_of_weights
from training.step_sizes import step_sizes, summed
from xla_fsdp.tpu import CHIPS

# -- the compiler's answers: ``--compile_only`` in a process of its own, and saved ---------------
#
# A file of a folder holds one answer. Its name follows from all that the answer depends on: the
# flags, the environment that libtpu reads, the packages' versions, and the program's sources.

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = (
    *(PROGRAM, "config_fields.py", "tpu_machines.py"),
    *("features", "training", "models", "data", "tpu_attention", "tools"),
    *("xla_fsdp", "torch_fsdp", "gpu_fsdp"),
)
_PACKAGES = ("torch", "torch_xla", "torch_tpu", "libtpu", "jax", "jaxlib", "timm")
_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
_USAGE = 2
"""The exit code of what the program, or the compiler, refuses."""


def compile_words(config: RunConfig, stack: Stack, candidate: TpuCandidate) -> list[str]:
    """Return the flags of ``--compile_only`` for a candidate.

    Only those that the step depends on are there, so that other data, epochs or folders are
    answered from what is saved.
    """
    config = candidate.config(config)
    data, optimizer = config.data, config.optimizer
    step = RunConfig(
        data=DataConfig(batch_size=data.batch_size, grad_accum_steps=data.grad_accum_steps),
        model=config.model,
        objective=config.objective,
        optimizer=OptimizerConfig(
            optimizer=optimizer.optimizer,
            clip_grad_norm=optimizer.clip_grad_norm,
            optimizer_dtype=optimizer.optimizer_dtype,
        ),
        ema=EmaConfig(model_ema=config.ema.model_ema),
        sharding=config.sharding,
        extension=config.extension,
    )
    # What a batch holds depends on those that arrange images.
    arranging = (each for each in features() if type(each).arranged is not Feature.arranged)
    of_step = {*flags_of_model(), *flags_of_weights(), *(each.flags for each in arranging)}
    step = step.with_flags(*(flags for flags in config.feature_flags if type(flags) in of_step))
    configs = stack.configs_to_compile(step, candidate.topology)
    return plans.words_of(*configs, without=("cpu_devices",), always=plans.ALWAYS)


_TYPES = {"fits": bool, "peak_hbm_bytes": float, "expected_step_s": float | None}
"""The types of what is used of a report of ``--compile_only``."""


class Compilations:
    """The answers of the compiler, those of earlier runs among them: the reports of
    ``--compile_only`` as dictionaries, or {"refused": why}."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.compiled = 0
        """How many steps were compiled, and not found in the folder."""

    def saved(self, words: list[str]) -> dict[str, Any] | None:
        """Return the answer to these flags if it is saved."""
        try:
            answer = parse_object(self._path(words).read_bytes())["answer"]
        except (OSError, ValueError, KeyError):  # none, or an incomplete one
            return None
        is_answer = is_of(answer, dict[str, Any]) and (
            "refused" in answer
            or all(name in answer and is_of(answer[name], _TYPES[name]) for name in _TYPES)
        )
        return answer if is_answer else None

    def compile(self, words: list[str]) -> dict[str, Any]:
        """Return the compiler's answer to these flags, and save it.

        Raises UsageError if the program ends otherwise. Compiling continues in a child of the
        child, which takes gigabytes: whatever ends the waiting, such as Ctrl-C or SIGTERM, ends
        both.
        """
        self.compiled += 1
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        with subprocess.Popen(
            [sys.executable, str(ROOT / PROGRAM), *words, "--json"],
            encoding="utf-8",
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as child:
            try:
                stdout, stderr = child.communicate()
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise
        code = child.returncode
        last_line = (stderr.strip().splitlines() or ["no output"])[-1]
        if code in (0, DOES_NOT_FIT):
            answer = json.loads(stdout.splitlines()[-1])
        elif code == _USAGE:
            answer = {"refused": last_line.partition("error: ")[2]}
        else:
            raise UsageError(
                f"--plan: a compilation ended with exit code {code} ({last_line[:200]}): "
                f"{' '.join(words)}"
            )
        path = self._path(words)
        make_folder(path.parent)
        content = json.dumps({"flags": words, **_circumstances(), "answer": answer})
        replace_file(path, content.encode(), unfinished=str(os.getpid()))
        return answer

    def _path(self, words: list[str]) -> Path:
        question = json.dumps([words, _circumstances()])
        return self._folder / f"{hashlib.sha256(question.encode()).hexdigest()[:24]}.json"


@functools.cache
def _circumstances() -> dict[str, Any]:
    """Return what an answer depends on beside the flags.

    The sources are those that trace and compile a step: all but those of plans.
    """
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    sources = hashlib.sha256()
    for name in _SOURCES:
        paths = [ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.[cp]*")
        for path in sorted(each for each in paths if each.suffix in (".py", ".c")):
            if path.parent.name != "plan":
                sources.update(f"{path.relative_to(ROOT)}\0".encode())
                sources.update(path.read_bytes())
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    return {
        "versions": versions,
        "sources": sources.hexdigest()[:16],
        "environment": variables,
    }


# -- the search ------------------------------------------------------------------------------------


def computed_candidates(request: Request) -> list[ComputedCandidate]:
    """Return all that the flags leave open, with the arithmetic's estimates."""
    shapes, prices, stack = step_sizes(request.model), request.prices, request.stack
    return [
        ComputedCandidate(
            candidate,
            summed(
                functools.partial(candidate.estimate, config=request.config, fsdp=stack.fsdp),
                shapes,
            ),
            prices[candidate.kind].per_hour if candidate.kind in prices else 0.0,
        )
        for candidate in candidates(request.config, stack, request.plan.chips_at_most)
    ]


def refusal(request: Request, candidate: TpuCandidate) -> str | None:
    """Return why the program refuses a candidate; None if it accepts it."""
    try:
        request.stack.check(candidate.config(request.config), candidate.topology, request.model)
    except UsageError as error:
        return str(error)
    return None


def ask_compiler(request: Request, search: Search, compilations: Compilations) -> None:
    """Give the compiler's answers to the search, with ``--plan_compilations`` new ones at most."""
    most = request.plan.plan_compilations
    while option := search.next(lambda candidate: refusal(request, candidate) is None):
        candidate = option.candidate
        words = compile_words(request.config, request.stack, candidate)
        answer = compilations.saved(words)
        if answer is None:
            if compilations.compiled >= most:
                break
            what = f"{candidate.topology.name}, {candidate.settings}"
            print(
                f"compiling step {compilations.compiled + 1} of at most {most}, a minute or two: "
                f"{what}",
                file=sys.stderr,
                flush=True,
            )
            answer = compilations.compile(words)
        if "refused" in answer:
            search.dropped.add(candidate)
            continue
        step_s = answer["expected_step_s"]
        search.found[candidate] = Found(
            answer["fits"], answer["peak_hbm_bytes"], math.inf if step_s is None else step_s
        )


# -- plans -----------------------------------------------------------------------------------------


def plan_slices(config: RunConfig, stack: Stack, plan: PlanConfig) -> int:
    """Print the plans for TPUs, or with ``--json`` their figures, and return the exit code.
    Raises UsageError."""
    stack.check_installed()
    request = plans.read_request(config, stack, plan, tuple(CHIPS))
    options = computed_candidates(request)
    left_out: dict[str, str] = {}  # kinds of chips that no libtpu here compiles for, and why
    for option in options:
        kind = option.candidate.kind
        try:
            stack.check_compiler(option.candidate.topology)
        except UsageError as error:
            if stack.xla.tpu_topology or stack.xla.tpu_compiler not in ("auto", "installed"):
                raise
            left_out.setdefault(kind, f"without {kind}: {error}")
    options = [option for option in options if option.candidate.kind not in left_out]
    if not options:
        raise UsageError(
            f"--batch_size {config.data.batch_size} cannot be divided among the devices of any "
            "slice with these flags: change it, or --tpu_topology"
        )
    longest_s = (plan.hours or math.inf) * 3600 / request.work.steps
    search = Search(options, step_at_most_s=longest_s)
    compilations = Compilations(Path(plan.plan_dir) / "compiled")
    ask_compiler(request, search, compilations)

    # What was compiled and fits; of slices of which nothing was, the best by arithmetic.
    found_plans = []
    for option in search.useful():
        answer = search.found[option.candidate]
        found_plans.append(_plan(request, option.candidate, answer.step_s, answer.peak_bytes, True))
    seen = {candidate.topology for candidate in search.found}
    for guess in sorted(search.guesses(), key=lambda guess: guess.step_s):
        candidate = guess.option.candidate
        fits = guess.peak_bytes <= candidate.topology.chip.hbm_bytes
        if candidate.topology in seen or guess.step_s > longest_s or not fits:
            continue
        if refusal(request, candidate) is None:
            seen.add(candidate.topology)
            found_plans.append(_plan(request, candidate, guess.step_s, guess.peak_bytes, False))

    if search.options and not (found_plans or search.found):
        # What refuses the first, which has no more than the flags ask for, refuses all.
        reason = refusal(request, search.options[0].candidate)
        if reason:
            raise UsageError(reason)

    fit = sum(answer.fits for answer in search.found.values())
    compiled = "; none of them was compiled" if search.options else ""
    if search.found:
        compiled = (
            f"; {len(search.found)} of them were compiled ({compilations.compiled} now, the rest "
            f"earlier), and {fit} of these fit"
        )
    notes = [
        f"{len(search.options):,} candidates fit or nearly fit by arithmetic{compiled}",
        "step times are estimates, not measurements (docs/compile_only.md)",
        *left_out.values(),
    ]
    topologies = (option.candidate.topology for option in search.options)
    if any(stack.that_trains_on(topology) is not stack for topology in topologies):
        notes.append(
            "tpu7x: these figures are of PyTorch/XLA's program, which does not run there; for "
            "TorchTPU's, plan with --backend torchtpu in its environment"
        )
    return plans.print_plans(request, found_plans, notes)


def _plan(
    request: Request, candidate: TpuCandidate, step_s: float, peak_bytes: float, compiled: bool
) -> HardwarePlan:
    topology, work = candidate.topology, request.work
    several = f"{topology.slices} x " if topology.slices > 1 else ""
    images_per_s, hours = work.batch_size / step_s, work.steps * step_s / 3600
    price = request.prices.get(candidate.kind)
    peak_flops = topology.devices * topology.chip.peak_flops
    return HardwarePlan(
        hardware=several + topology.name,
        kind=candidate.kind,
        chips=topology.chips,
        settings=candidate.settings,
        peak_bytes=peak_bytes,
        capacity_bytes=topology.chip.hbm_bytes,
        expected_step_s=step_s,
        expected_images_per_s=images_per_s,
        expected_mfu=request.model.train_flops_per_image * images_per_s / peak_flops,
        compiled=compiled,
        hours=hours,
        cost_usd=hours * topology.chips * price.per_hour if price else None,
        commands=_commands(request, candidate),
    )


_QUEUED = {"v4": ("v4", "tpu-ubuntu2204-base"), "v5e": ("v5litepod", "v2-alpha-tpuv5-lite")}
"""What ``launch/queued_resource.sh`` calls chips that Compute Engine has not, and their image."""
_LAUNCH_FLAGS = ("--delete", "--max_restarts=3")
_BUCKET = "gs://BUCKET/runs/vit"
"""The ``--ckpt_dir`` of a "launch" line: the launchers refuse it until a bucket is named."""


def _commands(request: Request, candidate: TpuCandidate) -> dict[str, str]:
    """Return the command lines of a plan: "train" runs on every host of the slice, "launch" gets
    the slice and trains there, and "check" compiles the step."""
    topology, kind = candidate.topology, candidate.kind
    stack = request.stack.that_trains_on(topology)
    configs = stack.configs(candidate.config(request.config))
    flags = plans.words_of(*configs, always=plans.ALWAYS)
    commands = {"train": shlex.join([*stack.program, *flags])}
    on_host, options = [*stack.program_of_launchers, *flags], stack.launcher_flags
    if request.config.checkpoints.ckpt_dir == CheckpointConfig.ckpt_dir:
        on_host += ["--ckpt_dir", _BUCKET]  # the slice's disks are deleted with it
    if kind not in _QUEUED:
        several = [f"--slices={topology.slices}"] if topology.slices > 1 else []
        get = ["python3", "-m", "launch.compute_engine", "--tpu=vit", *several]
        get.append(f"--topology={topology.name}")
        commands["launch"] = shlex.join([*get, *_LAUNCH_FLAGS, *options, "--", *on_host])
    elif topology.slices == 1:
        name, image = _QUEUED[kind]
        count = topology.chips * (2 if kind == "v4" else 1)  # of cores on v4
        get = ["launch/queued_resource.sh", "--tpu=vit", f"--type={name}-{count}"]
        commands["launch"] = shlex.join(
            [*get, f"--version={image}", *_LAUNCH_FLAGS, *options, "--", *on_host]
        )
    check = compile_words(request.config, request.stack, candidate)
    return commands | {"check": shlex.join(["python3", PROGRAM, *check])}
