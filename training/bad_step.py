"""``--save_bad_step``: save the inputs of the first non-finite step in a folder.

``bad_step_N`` in ``--ckpt_dir`` is a weights-only checkpoint with the position before step N, and
``bad_step.json``. ``tools/replay_step.py`` replays the step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from config_fields import is_of
from training.checkpoints.choose import complete_checkpoints, step_of
from training.checkpoints.format import is_complete, training_tensors, tree
from training.checkpoints.saver import CheckpointSaver, attempt, write_checkpoint
from training.errors import UsageError
from training.files import read_object, replace_file
from training.loop import Hook, Session, StepDone
from training.mesh import Mesh
from training.resolve import Run
from training.schedule import Position, Schedule, StepRates
from training.step import TrainBatches

FILE = "bad_step.json"
_NAME = re.compile(r"bad_step_\d+")


@dataclass(frozen=True)
class BadStep:
    """The first step of a start whose loss or gradient norm was not finite."""

    step: int
    """The number of the step, from 1."""
    epoch: int
    """The epoch of its batch, from 0."""
    images_in_epoch: int
    """The number of images before it in the epoch."""
    passes: list[int]
    """The numbers of its passes since the start of training; with the seed, they determine dropout,
    masks and mixing."""
    rates: dict[str, Any]
    """Its ``StepRates``."""
    steps: int
    """The number of batches of the whole training, on which their sizes may depend."""
    batch_shards: int
    """The number of parts that the batch was divided into, each of which is divided into passes."""
    mesh: dict[str, int]
    saved_after: int
    """The step after which the weights were saved."""
    good_steps_since: int
    """How many steps from ``step`` to ``saved_after`` were finite and changed the weights."""
    checkpoint_before: str | None
    """The name of the newest checkpoint before the step; None if there was none."""
    logged: dict[str, Any]
    """The record of the log step that revealed it: loss, gradient norm, parts of the loss."""

    @property
    def is_exact(self) -> bool:
        """Whether the weights are exactly those that the step was computed with."""
        return not self.good_steps_since

    @property
    def step_rates(self) -> StepRates:
        factors = self.rates["rope_factors"]
        return StepRates(**{**self.rates, "rope_factors": factors and tuple(factors)})


def read_bad_step(folder: Path) -> BadStep:
    """Return the content of ``bad_step.json`` in a folder. Raises UsageError if there is none."""
    remedy = "pass a folder bad_step_N that --save_bad_step has written"
    try:
        values = read_object(folder / FILE)
        # An earlier version recorded the size of the images of --image_size_schedule.
        if values["rates"].pop("image_side", None) is None:
            values.setdefault("steps", 0)
        bad_step = BadStep(**{f.name: values[f.name] for f in dataclasses.fields(BadStep)})
        Mesh(**bad_step.mesh)
        for record in (bad_step, bad_step.step_rates):
            for name, hint in get_type_hints(type(record)).items():
                if not is_of(getattr(record, name), hint):
                    raise ValueError
        numbers = [bad_step.step, bad_step.epoch, bad_step.images_in_epoch, *bad_step.passes]
        numbers += [bad_step.batch_shards, *bad_step.mesh.values()]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError
    except OSError as error:
        raise UsageError(f"{folder / FILE} cannot be read ({error.strerror}): {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{folder / FILE} is damaged: {remedy}") from None
    return bad_step


class SaveBadStep(Hook):
    """Writes the folder once, in all processes together, at the log step that reveals a bad step.

    Log steps wait for their values, so that all processes know the same; with ``--log_step_interval
    1``, the weights are always exactly those of the bad step.
    """

    def __init__(
        self,
        run: Run,
        session: Session,
        saver: CheckpointSaver,
        batches: TrainBatches,
        schedule: Schedule,
        start: Position,
    ) -> None:
        """``start``: the position that this start continues from."""
        self._run, self._session, self._saver = run, session, saver
        self._batches, self._schedule, self._start = batches, schedule, start
        self._is_done = False

    def after_step(self, done: StepDone) -> None:
        reports = self._session.reports
        reports.flush()
        if reports.first_skipped and not self._is_done:
            self._is_done = True
            self._save(done.at.step)

    def _save(self, step: int) -> None:
        """Write the folder, after ``step``, unless the run has one; a failure is a warning."""
        session, run_folder = self._session, self._run.ckpt_dir
        say, is_main = session.reports.say, session.backend.is_main
        found, problems = attempt(lambda: self._look_into(run_folder) if is_main else None)
        if any(problems):
            say(f"warning: the bad step cannot be saved: {_first(problems)}")
            return
        there, newest = found[0]
        if there:
            say(f"note: {run_folder / there} exists: a run saves only its first bad step")
            return
        bad_step = self._describe(step, newest)
        folder = run_folder / f"bad_step_{bad_step.step}"
        self._saver.finish()
        session.watchdog.alive()
        with session.reports.events.span("save"):
            problems = self._write(folder, bad_step)
        session.timer.restart()
        if any(problems):
            say(f"warning: {folder} cannot be written ({_first(problems)}): training continues")
            return
        first = (
            f"copy {folder.name} from all hosts into one folder, then " if self._saver.hosts else ""
        )
        say(
            f"bad step: step {bad_step.step} is the first whose loss or gradient norm is not "
            f"finite; to find the module, {first}run python3 -m tools.replay_step {folder}"
        )

    def _look_into(self, run_folder: Path) -> tuple[str | None, str | None]:
        """Return the name of a bad step that the run has already saved, and of its newest
        checkpoint before this step. Raises OSError."""
        first = self._session.reports.first_skipped
        names = (path for path in run_folder.iterdir() if _NAME.fullmatch(path.name))
        there = next((path.name for path in names if is_complete(path)), None)
        older = [path for path in complete_checkpoints(run_folder) if step_of(path) < first]
        return there, older[-1].name if older else None

    def _describe(self, step: int, newest: str | None) -> BadStep:
        reports, batches, config = self._session.reports, self._batches, self._run.config.data
        number = reports.first_skipped
        before = number - 1
        batch = batches.number(self._start) + before - self._start.step
        epoch, in_epoch = divmod(batch, len(batches.loader))
        count = config.grad_accum_steps
        return BadStep(
            step=number,
            epoch=epoch,
            images_in_epoch=in_epoch * config.batch_size,
            passes=[before * count + index for index in range(count)],
            rates=asdict(self._schedule.at(batch)),
            steps=self._schedule.steps,
            batch_shards=self._session.backend.batch_shards,
            mesh=asdict(self._run.mesh),
            saved_after=step,
            good_steps_since=step - before - reports.skipped_steps,
            checkpoint_before=newest,
            logged=reports.newest,
        )

    def _write(self, folder: Path, bad_step: BadStep) -> list[str | None]:
        """Write weights and description; return each process's problem, None if it has none."""
        backend, saver = self._session.backend, self._saver
        at = Position(bad_step.step - 1, bad_step.epoch, bad_step.images_in_epoch)
        training = training_tensors(at, saver.arguments, saver.classes, saver.order)
        content: dict[str, Any] = {}

        def read_state() -> None:
            # A teacher is the EMA of the weights, which comes with the optimizer state.
            with_average = self._run.config.objective.has_teacher
            state = backend.state(with_optimizer=with_average)
            content.update(tree(replace(state, optimizer=None), training))

        _, problems = attempt(read_state)
        if any(problems):
            return problems
        text = json.dumps(_as_texts(asdict(bad_step)), indent=1) + "\n"
        return write_checkpoint(
            folder,
            content,
            is_main=backend.is_main,
            hosts=saver.hosts,
            written=lambda: None,
            store_logs=lambda: replace_file(folder / FILE, text),
            must_be_finite=False,
        ).problems


def _first(problems: list[str | None]) -> str | None:
    return next(filter(None, problems), None)


def _as_texts(value: Any) -> Any:
    """Return JSON values with non-finite numbers, which JSON lacks, as strings."""
    if isinstance(value, Mapping):
        return {name: _as_texts(inner) for name, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
