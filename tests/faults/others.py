"""Faults of steps and of processes: NaN, hangs, two jobs, processes that do not match."""

import contextlib
import math
import signal
import socket
from pathlib import Path

from tests.faults.program import (
    FAULTY,
    LIMIT_S,
    STEPS,
    Running,
    last_step,
    last_step_printed,
    resumed_step,
    running,
)
from tests.faults.tries import NotSurvived, Survived, Try, last_words
from training.files import LOCK_FILE
from training.logs.records import read_metrics

_STEP_TIMEOUT_S = 15
_ENDS_WITHIN_S = 120.0


def not_finite(attempt: Try) -> Survived:
    """Make one step's loss NaN: the step is skipped, and it is the only one that is lost."""
    step = attempt.rng.randrange(2, STEPS)
    attempt.moment = f"loss NaN in step {step}"
    with running(
        attempt.command(module=FAULTY), attempt.log("first"), FAULT_AT=f"loss {step} {step}"
    ) as program:
        program.wait()
        if program.root.returncode:
            raise NotSurvived(last_words(program.output()))
    expected = [r["loss"] for r in read_metrics(attempt.reference.ckpt_dir) if "loss" in r]
    records = [r for r in read_metrics(attempt.run) if "loss" in r]
    losses = [r["loss"] for r in records]
    if losses[: step - 1] != expected[: step - 1]:
        raise NotSurvived("the steps before are not those of the uninterrupted run")
    if losses[step - 1] is not None or records[-1]["skipped_steps"] != 1:
        raise NotSurvived(
            f"step {step}: loss {losses[step - 1]}, {records[-1]['skipped_steps']} skipped"
        )
    if len(losses) != STEPS or not all(math.isfinite(x) for x in losses[step:]):
        raise NotSurvived(f"later losses are not finite: {losses[step:]}")
    return Survived(1, attempt.moment, step)


def hang(attempt: Try) -> Survived:
    """Let a step hang, in all processes or in the last: --step_timeout_s ends it."""
    step = attempt.rng.randrange(5, STEPS - 1)
    several = attempt.setup.processes > 1
    ranks = "1" if several and attempt.number % 2 else ""
    attempt.moment = f"step {step} hangs in {f'rank {ranks}' if ranks else 'all processes'}"
    flags = ["--step_timeout_s", str(_STEP_TIMEOUT_S)]
    command = attempt.command(*flags, module=FAULTY, restarts=int(several))
    fault = {"FAULT_AT": f"hang {step} {step}", "FAULT_RANKS": ranks}
    with running(command, attempt.log("first"), **fault) as program:
        if not program.wait():
            raise NotSurvived(f"it hangs for ever: no end after {LIMIT_S:.0f} s")
        output = program.output()
    if f"Timeout (0:00:{_STEP_TIMEOUT_S})!" not in output:
        raise NotSurvived(f"no process printed its stacks: {last_words(output)}")
    if not several:
        return attempt.resume_after(step - 1, *flags)
    if program.root.returncode or "training completed" not in output:
        raise NotSurvived(f"not completed by torchrun --max-restarts 1: {last_words(output)}")
    attempt.compare()
    return Survived(step - 1 - resumed_step(output), attempt.moment, step)


def second_job(attempt: Try) -> Survived:
    """Start another job in the same folder, later or at once. One trains, one is refused."""
    if attempt.number % 2:
        attempt.moment = "two jobs start at the same time"
        _at_the_same_time(attempt)
    else:
        _later(attempt)
    attempt.compare()
    return Survived(0, attempt.moment)


def _later(attempt: Try) -> None:
    """Start the second job while the first one stands still, so that it does not end before."""
    with running(attempt.command(), attempt.log("first")) as first:
        at = attempt.rng.randrange(2, STEPS - 5)
        if not first.wait_until(lambda: last_step(attempt.run) >= at):
            raise NotSurvived(last_words(first.output()))
        attempt.moment = f"a second job after step {last_step(attempt.run)} of the first"
        first.members()
        first.signal(signal.SIGSTOP)
        try:
            with running(attempt.command(), attempt.log("second")) as second:
                second.wait()
                _check_refused(second)
        finally:
            first.signal(signal.SIGCONT)
        first.wait()
        if first.root.returncode:
            raise NotSurvived(f"the first job did not complete: {last_words(first.output())}")


def _at_the_same_time(attempt: Try) -> None:
    with (
        running(attempt.command(), attempt.log("first")) as first,
        running(attempt.command(), attempt.log("second")) as second,
    ):
        for job in (first, second):
            job.wait()
        completed = [job for job in (first, second) if "training completed" in job.output()]
        if not completed:
            raise NotSurvived(f"none of the two trained: {last_words(first.output())}")
        for job in (first, second):
            if job not in completed:
                _check_refused(job)


def _check_refused(job: Running) -> None:
    output = job.output()
    if not job.root.returncode or "is in use by process" not in output:
        raise NotSurvived(f"a second job was not refused: {last_words(output)}")


def restart_while_ending(attempt: Try) -> Survived:
    """Start the job again while its first start is still about to write its last checkpoint."""
    job = {"RUN_JOB_ID": "faults"}  # as launchers set it: a restart waits for the lock for longer
    with running(attempt.command(), attempt.log("first"), **job) as first:
        at = attempt.rng.randrange(2, STEPS - 5)
        if not first.wait_until(lambda: last_step(attempt.run) >= at):
            raise NotSurvived(last_words(first.output()))
        first.members()
        first.signal(signal.SIGSTOP)  # as if it took long
        with running(attempt.command(), attempt.log("second"), **job) as second:
            waits = second.wait_until(lambda: _has_open(second, attempt.run / LOCK_FILE), 0.05)
            first.signal(signal.SIGTERM)
            first.signal(signal.SIGCONT)
            first.wait_for_all(_ENDS_WITHIN_S)
            step = last_step_printed(first.output())  # metrics.jsonl is the second one's by now
            attempt.moment = f"restarted while the first start ends after step {step}"
            second.wait()
            output = second.output()
    if not waits or second.root.returncode or "training completed" not in output:
        raise NotSurvived(f"the restart did not complete: {last_words(output)}")
    attempt.compare()
    return Survived(step - resumed_step(output), attempt.moment, step)


def _has_open(program: Running, path: Path) -> bool:
    """Return True if a process of the program has this file open."""
    for member in program.members():
        with contextlib.suppress(OSError):
            if any(link.resolve() == path for link in Path(f"/proc/{member.pid}/fd").iterdir()):
                return True
    return False


# -- processes that do not match ------------------------------------------------------


def differing_flags(attempt: Try) -> Survived:
    """Start two processes of which one has another --lr."""
    attempt.moment = "process 1 with another --lr"
    return _refused_together(attempt, "differ in --lr: ", ("1e-2", "2e-2"), (".", "."))


def folder_not_shared(attempt: Try) -> Survived:
    """Let --ckpt_dir be on each node's own disk: the same name, two folders."""
    attempt.moment = "the same --ckpt_dir in two working directories"
    message = "is not the folder that the first process sees"
    return _refused_together(attempt, message, ("1e-2", "1e-2"), ("node_0", "node_1"))


def _refused_together(
    attempt: Try, message: str, lr: tuple[str, str], folders: tuple[str, str]
) -> Survived:
    """Start two processes, as on two nodes: both end with 2, one prints why, none writes."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = str(listener.getsockname()[1])
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }
    with contextlib.ExitStack() as stack:
        nodes = []
        for rank in range(2):
            where = attempt.folder / folders[rank]
            where.mkdir(parents=True, exist_ok=True)
            command = attempt.setup.of_one_process("run", "--lr", lr[rank])
            log = attempt.log(f"process_{rank}")
            how = running(command, log, cwd=where, RANK=str(rank), **meeting)
            nodes.append(stack.enter_context(how))
        hung = [node for node in nodes if not node.wait(_ENDS_WITHIN_S)]
        outputs = [node.output() for node in nodes]
    if hung:
        raise NotSurvived(f"{len(hung)} of 2 processes had not ended {_ENDS_WITHIN_S:.0f} s later")
    codes = [node.root.returncode for node in nodes]
    lines = [line for output in outputs for line in output.splitlines() if "error:" in line]
    if codes != [2, 2] or len(lines) != 1 or message not in lines[0]:
        raise NotSurvived(f"exit codes {codes}, printed: {lines}")
    if written := list(attempt.folder.rglob("step_*")):
        raise NotSurvived(f"{written[0]} was written")
    return Survived(None, attempt.moment)
