"""Faults of files: damaged checkpoints, a full disk."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.reliability.faults.kills import (
    IN_TRAINING,
    host,
    kill_hosts,
    losses,
    stop_after,
    wait_in_training,
)
from tests.reliability.faults.program import SAVE_INTERVAL, STEPS, last_step, newest_step, running
from tests.reliability.faults.tries import Loss, NotSurvived, Skipped, Survived, Try, last_words
from training.checkpoints.format import MANIFEST
from training.checkpoints.inventory import complete_checkpoints

_DISK_BYTES, _LEFT_BYTES = 12_000_000, 30_000
"""The bytes of the small disk, and those left there when it is full: less than a checkpoint."""


# -- checkpoints ----------------------------------------------------------------------


def damaged(damage: Callable[[Try, Path], str]) -> Callable[[Try], Survived]:
    """Kill the run and damage its newest checkpoint: the one before it has to be resumed."""

    def attempt_it(attempt: Try) -> Survived:
        with running(attempt.command(), attempt.log("first")) as program:
            step = stop_after(attempt, program, attempt.rng.randrange(8, STEPS - 4))
        *_, before, newest = complete_checkpoints(attempt.run)
        what, attempt.damaged = damage(attempt, newest), newest.name
        attempt.moment = f"{what} of {newest.name}, after step {step}"
        end = attempt.resume_after(step)
        output = attempt.log("restart_1").read_text()
        if f"resuming {before} at " not in output:
            raise NotSurvived(f"{before.name} was not resumed after damage to {newest.name}")
        messages = (f"{newest} is damaged (", f"cannot read the checkpoint {newest}: ")
        if what != f"{MANIFEST} lost" and not any(message in output for message in messages):
            raise NotSurvived(f"{newest.name} is damaged, and no message names it")
        return end

    return attempt_it


def _file(attempt: Try, folder: Path) -> Path:
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    return attempt.rng.choice(files)


def flip_byte(attempt: Try, folder: Path) -> str:
    path = _file(attempt, folder)
    at = attempt.rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << attempt.rng.randrange(8)]))
    return f"byte {at} of {path.name} flipped"


def truncate(attempt: Try, folder: Path) -> str:
    path = attempt.rng.choice([_file(attempt, folder), folder / MANIFEST])
    size = attempt.rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} truncated to {size} bytes"


def lose_file(attempt: Try, folder: Path) -> str:
    path = _file(attempt, folder)
    path.unlink()
    return f"{path.name} lost"


def lose_manifest(attempt: Try, folder: Path) -> str:
    (folder / MANIFEST).unlink()
    return f"{MANIFEST} lost"


# -- disks ----------------------------------------------------------------------------


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        raise Skipped("no right to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(filler: Path) -> None:
    """Let a file grow until there is no room for a checkpoint on its disk."""
    free = shutil.disk_usage(filler.parent).free - _LEFT_BYTES
    # A checkpoint may take it in the same moment.
    with contextlib.suppress(OSError), filler.open("ab") as file:
        file.write(bytes(max(0, free)))


def disk_full(attempt: Try) -> Survived:
    """Fill the disk from some step on; the run ends, and resumes when there is space again."""
    with _small_disk(attempt.run):
        filler = attempt.run / "filler"
        full_from = attempt.rng.randrange(5, STEPS - 12)
        with running(attempt.command(), attempt.log("first")) as program:
            program.wait_until(lambda: last_step(attempt.run) >= full_from)
            _fill(filler)
            newest = newest_step(attempt.run)
            attempt.moment = f"disk full after step {last_step(attempt.run)}"
            if not program.wait():
                raise NotSurvived("it hangs on a full disk")
            output = program.output()
        if not re.search("^run_vit_training.py: error: .* could not be written", output, re.M):
            raise NotSurvived(f"the end was not reported in one line: {last_words(output)}")
        if newest_step(attempt.run) < newest:
            raise NotSurvived(f"step_{newest} was complete, and is not there any more")
        step = last_step(attempt.run)
        filler.unlink()
        return attempt.resume_after(step)


def storage_away(attempt: Try) -> list[Survived]:
    """Let saves to --ckpt_dir fail from some step on, and lose a host while they do: its peer, or
    another replica, has a newer step."""
    flags = ["--max_failed_saves", "99"]
    filler, stored = attempt.run / "filler", list[int]()

    def lose(number: int) -> Loss | None:
        with attempt.running(f"start_{number}", *flags) as program:
            if not wait_in_training(attempt, program, IN_TRAINING - 3 * SAVE_INTERVAL / STEPS):
                return None
            away = last_step(attempt.run)
            killed = away + attempt.rng.randrange(2 * SAVE_INTERVAL, 3 * SAVE_INTERVAL)

            def reached() -> bool:
                _fill(filler)  # again: an old checkpoint that is removed makes room
                return last_step(attempt.run) >= killed

            reached()
            newest = newest_step(attempt.run)
            program.wait_until(reached)
            loss = kill_hosts(attempt, program, host(attempt.setup, number))
        filler.unlink()
        if not loss:
            return None
        stored.append(newest_step(attempt.run))
        if stored[-1] > newest + SAVE_INTERVAL:
            raise NotSurvived("storage was not away")
        return replace(loss, moment=f"{loss.moment}, storage away since step {away}")

    with _small_disk(attempt.run):
        ends = losses(attempt, lose, *flags)
    for end, newest in zip(ends, stored, strict=False):
        if (end.step or 0) - (end.steps_lost or 0) <= newest:
            raise NotSurvived(f"step {newest} was resumed, of storage")
    return ends
