"""``python3 -m tools.explain_profile``: where the steps of a profile spent their time, beside what
``--compile_only --explain`` expects."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("tools.explain_profile")

from config_fields import local_path
from tools.compile_only.expected import ON_HOST
from tools.compile_only.explain import kind_of_work, scope_near
from tools.compile_only.hlo import Instruction, collectives_of, parse_module
from tools.xspace import Event, Line, Space
from training.command_line import OneLineParser
from training.errors import UsageError
from training.files import read_object
from training.logs.records import RUN_FILE
from training.processes.output import exit_quietly_on_broken_pipe
from training.profiling import HOOK, PROFILE_DIR
from xla_fsdp import jax_private
from xla_fsdp.scopes import STEP, UNKNOWN

_PROGRAM = "python3 -m tools.explain_profile"
_TPU, _TPU_LINE = "/device:TPU:", "XLA Ops"
"""The planes of TPUs, and the line with the instructions of each."""
_RUNS_OTHERS = {"while", "call", "conditional"}
"""Opcodes whose time is that of other instructions, which are in the trace too."""
_SMALL = 0.005
"""Share of the step, expected and measured: modules with less are shown together."""


@dataclass
class Measured:
    """Seconds of the devices, all steps together."""

    by_module: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hooks: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the first process's host, by hook."""
    steps: int = 0
    devices: int = 0
    is_tpu: bool = False


def measure(traces: Sequence[Path]) -> Measured:
    """Return what the traces of a profile contain, one of each process. Raises OSError, or
    ValueError for other files."""
    found = Measured()
    for number, path in enumerate(traces):
        space = Space(path)
        instructions = _instructions(space)
        lines = list(space.lines())
        seconds = defaultdict[str, float](float)
        for line in _device_lines(lines):
            found.devices += line.plane.startswith(_TPU)
            for event in line.events:
                seconds[_name_of(event)] += event.seconds
        for name, of_all in seconds.items():
            instruction = instructions.get(name)
            if instruction and instruction.opcode in _RUNS_OTHERS:
                continue
            module = scope_near(instruction).module if instruction else UNKNOWN.module
            found.by_module[module] += of_all
            found.by_kind[_kind_of(instruction, module)] += of_all
        if number == 0:
            events = [event for line in lines for event in line.events]
            found.steps = sum(event.name == STEP for event in events)
            for event in events:
                if event.name.startswith(HOOK):
                    found.hooks[event.name] += event.seconds
    found.is_tpu = found.devices > 0
    return found


def _instructions(space: Space) -> dict[str, Instruction]:
    """Return the instructions of all programs by name; the largest program, that of the step, has
    precedence."""
    found: dict[str, Instruction] = {}
    for hlo in sorted(space.programs(), key=len):
        computations, _ = parse_module(jax_private.text_of(hlo))
        for computation in computations.values():
            found |= {instruction.name: instruction for instruction in computation}
    return found


def _device_lines(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the lines of what devices did, with the events that are instructions alone."""
    for line in lines:
        if line.plane.startswith(_TPU):
            if line.name == _TPU_LINE:
                yield line
        else:
            events = [event for event in line.events if "hlo_op" in event.stats]
            if events:
                yield Line(line.plane, line.name, events)


def _name_of(event: Event) -> str:
    """Return the name of an event's instruction. A TPU's events may have its text as their name."""
    op = event.stats.get("hlo_op")
    name = op.decode() if isinstance(op, bytes) else event.name
    return name.partition(" = ")[0].removeprefix("%")


def _kind_of(instruction: Instruction | None, module: str) -> str:
    """Return the kind of work, in the words of ``--explain``."""
    if instruction is None:
        return "unknown"
    if collectives_of(instruction.start):
        return "collective waited for"
    if instruction.opcode in ("send-done", "recv-done"):
        return "other slices waited for"
    if instruction.opcode.endswith("-done"):
        return "host's memory waited for" if ON_HOST in instruction.text else "DMA waited for"
    return kind_of_work(instruction, module)


# -- the report ----------------------------------------------------------------------------------


def report(found: Measured, expected: dict[str, Any] | None) -> str:
    """Return the tables; ``expected``: the output of ``--compile_only --explain --json``."""
    each = found.steps * found.devices
    steps = f"{found.steps} step(s), {found.devices} device(s)"
    total = sum(found.by_module.values()) / each
    lines = [f"measured: {1e3 * total:.4g} ms a step on each device; {steps}"]
    if expected:
        seconds = expected["expected_step_s"]
        lines.append(f"expected: {1e3 * seconds:.4g} ms a step, {expected['topology']}")
    if not found.is_tpu:
        lines.append(
            "note: measured on a CPU: compare the shares; its times, and what its compiler fuses, "
            "are not a TPU's"
        )
    explained = expected["explained"] if expected else {}
    for title, by, key in (
        ("module", found.by_module, "seconds_by_module"),
        ("kind of work", found.by_kind, "seconds_by_kind"),
    ):
        measured = {name: seconds / each for name, seconds in by.items()}
        lines += ["", *_table(title, measured, explained.get(key))]
    if found.hooks:
        lines += ["", "host time of the hooks, ms a step:"]
        for name, seconds in Counter(found.hooks).most_common():
            ms = 1e3 * seconds / found.steps
            lines.append(f"  {name.removeprefix(HOOK):<20} {ms:.3f}")
    return "\n".join(lines)


def _table(
    title: str, measured: dict[str, float], expected: dict[str, float] | None
) -> Iterator[str]:
    """Yield the lines of a table, those whose measured and expected times differ most first."""
    totals = [sum(seconds.values()) or 1.0 for seconds in (measured, expected or {})]
    rows = {
        name: (measured.get(name, 0.0), (expected or {}).get(name, 0.0))
        for name in {**measured, **(expected or {})}
    }
    small = [
        name
        for name, pair in rows.items()
        if all(seconds < _SMALL * total for seconds, total in zip(pair, totals, strict=True))
    ]
    if len(small) > 1:
        removed = [rows.pop(name) for name in small]
        rows[f"{len(small)} others"] = sum(m for m, _ in removed), sum(e for _, e in removed)
    head = ("measured ms", "share") + (("expected ms", "share", "ratio") if expected else ())
    width = max(len(title), *map(len, rows))
    yield "  ".join([title.ljust(width), *head])
    for name, (here, there) in sorted(rows.items(), key=lambda row: -abs(row[1][0] - row[1][1])):
        cells = [f"{1e3 * here:.3f}", f"{100 * here / totals[0]:.1f} %"]
        if expected:
            ratio = f"{here / there:.2f}" if there else ""
            cells += [f"{1e3 * there:.3f}", f"{100 * there / totals[1]:.1f} %", ratio]
        texts = (cell.rjust(max(len(column), 6)) for cell, column in zip(cells, head, strict=True))
        yield "  ".join([name.ljust(width), *texts]).rstrip()


def read_expected(path: Path) -> dict[str, Any]:
    """Return the output of ``--compile_only --explain --json``. Raises UsageError."""
    try:
        expected = read_object(path)
        if not isinstance(expected["explained"]["seconds_by_module"], dict):
            raise ValueError
        float(expected["expected_step_s"]), expected["topology"], expected["batch_size"]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not the output of --compile_only --explain --json") from None
    return expected


def find_traces(run: Path) -> list[Path]:
    """Return the traces of a run's newest profile, one of each process. Raises UsageError."""
    folder = run / PROFILE_DIR
    runs: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("plugins/profile/*/*.xplane.pb")):
        runs[path.parent].append(path)
    if not runs:
        also = ": see operators_0.txt there" if (folder / "operators_0.txt").exists() else ""
        raise UsageError(f"{folder} has no trace of XLA's profiler (--profile on a TPU){also}")
    return runs[max(runs, key=lambda each: each.stat().st_mtime)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        _PROGRAM,
        "Print where the steps of --profile on XLA spent their time, by module of the model and "
        "kind of work, beside what --compile_only --explain expects.",
    )
    parser.add_argument("run", metavar="RUN_DIR", type=local_path, help="the --ckpt_dir of a run")
    parser.add_argument(
        "--expect",
        type=local_path,
        metavar="FILE",
        help="output of --compile_only --explain --json for the same flags",
    )
    options = parser.parse_args(argv)
    try:
        expected = read_expected(options.expect) if options.expect else None
        traces = find_traces(options.run)
        try:
            found, run = measure(traces), read_object(options.run / RUN_FILE)
            found.devices = found.devices or int(run["devices"])
            batch_size = run["arguments"]["batch_size"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{traces[0].parent} cannot be read: {error}") from None
        if not found.steps or not found.by_module:
            raise UsageError(f"{traces[0].parent} has no steps of --backend xla")
        if expected and expected["batch_size"] != batch_size:
            raise UsageError(
                f"--expect {options.expect} is for another run: batch_size is "
                f"{expected['batch_size']} there, {batch_size} here"
            )
    except UsageError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    print(report(found, expected))
    return 0


if __name__ == "__main__":
    with exit_quietly_on_broken_pipe(_PROGRAM):
        sys.exit(main())
