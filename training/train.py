"""A whole training: what is checked before any device starts, and what happens on a backend."""

from __future__ import annotations

import functools
import json
import os
import platform
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from data.source import DataSource, open_data
from training.backend import Backend, train_loader, val_loader
from training.batches import TrainBatches
from training.checkpoints.choose import RUN_FILE, Candidates, Resumable, find_resumable
from training.checkpoints.format import Position, SavedRun
from training.checkpoints.saver import CheckpointSaver, Saves
from training.checkpoints.state import load_state
from training.config import CheckpointConfig
from training.errors import BAD_IMAGES, NO_BATCH, NOT_FINITE, RunFailed, StoppedBySignal, UsageError
from training.evaluate import Evaluations
from training.files import FolderLock, is_url, replace_file
from training.initial_weights import InitialWeights, find_source, fit
from training.logs.bad_images import FILE as BAD_IMAGES_FILE
from training.logs.bad_images import BadImages
from training.logs.records import METRICS_FILE, decisive, evaluations, process_start, read_metrics
from training.logs.reports import (
    PROFILE_DIR,
    Reports,
    Session,
    StepLog,
    StepProfiler,
    read_expectation,
)
from training.loop import Trainer
from training.losses import Objective
from training.optimizers import note_of_resume
from training.processes import exchange
from training.processes.exchange import check_alike, failing_together, versions
from training.processes.start import (
    Start,
    choose_checkpoint,
    enter_folder,
    leave_later_ones,
    take_logs,
)
from training.processes.stopping import BAD_IMAGES as STOPPED_BAD_IMAGES
from training.processes.stopping import NO_BATCH as STOPPED_NO_BATCH
from training.processes.stopping import NOT_FINITE as STOPPED_NOT_FINITE
from training.processes.stopping import StopRequest, Watchdog
from training.resolve import Run
from training.schedule import Schedule, make_schedule
from training.step import shard_and_optimize
from training.validation import (
    bad_data_is_the_users,
    check_goes_on,
    check_same_classes,
    check_same_order,
    check_same_training,
    other_order,
    wanted_images,
)
from training.weights import with_preprocessing, with_preprocessing_of


@dataclass
class Plan:
    """What was found to be possible before any device starts."""

    data: DataSource
    candidates: Candidates
    """Checkpoints to resume, as this process sees them."""
    expected_s: float | None
    """What a step is expected to take, if that was told."""
    process_started: float
    """In seconds since 1970."""
    initial: InitialWeights | None = None
    """Trained weights that a new training begins with."""


def prepare(resumable: Resumable, run: Run) -> tuple[Run, Plan]:
    """Check everything that can be checked without a device; returns the run with its data.

    Raises UsageError.
    """
    expected_s = read_expectation(run)
    resume, candidates = resumable.saved, resumable.candidates
    source = find_source(run.config)
    if resume or source is None:
        run = with_preprocessing(run, resume)
    else:
        source, run = with_preprocessing_of(source, run)
    with bad_data_is_the_users():
        data = open_data(wanted_images(run))
    if resume:
        _check_resume(resume, run, data)
    steps_per_epoch = data.train_length // run.config.data.batch_size
    _schedule(run, *_positions(_place_of(resume, run, data), run, steps_per_epoch), steps_per_epoch)
    initial = fit(source, run, data) if source else None
    return run, Plan(data, candidates, expected_s, process_start(), initial)


def _check_resume(resume: SavedRun, run: Run, data: DataSource) -> None:
    check_goes_on(resume)
    check_same_training(resume, run.model, run.config.optimizer)
    check_same_classes(resume.classes, resume.path, data)
    check_same_order(resume, run, data)


def train(plan: Plan, run: Run, backend: Backend) -> None:
    """Train, or resume and train, on ``backend``; the body of every process."""
    shared = run.config.checkpoints.shared_ckpt_dir
    lock = FolderLock(run.ckpt_dir, inside=run.log_dir, shared=shared)
    try:
        _train(plan, run, backend, lock)
    finally:
        lock.release()


def _train(plan: Plan, run: Run, backend: Backend, lock: FolderLock) -> None:
    start, bad_images = _begin(plan, run, backend, lock)
    data = run.config.data
    loader = train_loader(plan.data, backend, data.batch_size)
    position, last_step = _positions(_place_of(start.resume, run, plan.data), run, len(loader))
    with failing_together():
        so_far = _so_far(start.resume, run.ckpt_dir, position)
    session = _session(run, backend, bad_images, position.step, last_step, so_far)
    session.reports.expected_s = plan.expected_s
    session.reports.events.start(plan.process_started, position.step)
    saver = CheckpointSaver(
        run.ckpt_dir,
        backend,
        session.reports.say,
        run.values,
        plan.data.classes,
        run.config.checkpoints.keep_checkpoints,
        run.config.checkpoints.max_failed_saves,
        newest=start.resume.path if start.resume else None,
        beside_training=run.config.checkpoints.async_checkpoint,
        order=plan.data.order(),
    )
    try:
        with saver, bad_data_is_the_users():
            for note in start.notes:
                session.reports.say(note)
            model, objective = _place(plan, run, session, start, position)
            if loader.workers:
                session.reports.say(f"loader processes of each training process: {loader.workers}")
            batches = TrainBatches(loader, backend, data.batch_size, data.grad_accum_steps)
            images = val_loader(plan.data, backend, data.pass_size)
            log = run.config.log
            schedule, end = _schedule(run, position, last_step, len(loader))
            if position.step < last_step and (warning := schedule.warning(end)):
                session.reports.say(warning)
            trainer = Trainer(
                run,
                session,
                model,
                objective,
                batches,
                schedule,
                StepLog(log, session, batches),
                Saves(run.config.checkpoints, session, saver, so_far.best_step),
                Evaluations(
                    log,
                    session,
                    model,
                    objective,
                    images,
                    so_far.evaluated,
                    so_far.best_top1,
                    run.config.ema.model_ema,
                ),
                StepProfiler(log.profile, run.log_dir / PROFILE_DIR, exchange.rank()),
            )
            with session.stop, session.reports.events.training(last_step):
                trainer.train(position)
            trainer.profiler.close()
            _say_profile(session.reports, run, trainer.profiler)
    finally:
        session.watchdog.rest()
        curves = session.reports.close()
    _end(run, session, saver, curves)


def _session(
    run: Run,
    backend: Backend,
    bad_images: BadImages,
    first_step: int,
    last_step: int,
    so_far: _SoFar,
) -> Session:
    data = run.config.data
    reports = Reports(
        run.log_dir,
        backend,
        first_step=first_step,
        total_steps=last_step,
        batch_size=data.batch_size,
        flops_per_image=run.train_flops_per_image,
        keep_records=so_far.goes_on,
        wandb_project=run.config.log.wandb,
        arguments=run.values,
        url=run.ckpt_dir if is_url(run.ckpt_dir) else None,
    )
    if last_step in so_far.evaluated:  # by an earlier start
        reports.last_top1 = evaluations(run.ckpt_dir).get(last_step, {}).get("val_top1")
    return Session(
        backend,
        reports,
        StopRequest(backend),
        Watchdog(run.config.log.step_timeout_s),
        bad_images,
        last_step,
    )


def _begin(plan: Plan, run: Run, backend: Backend, lock: FolderLock) -> tuple[Start, BadImages]:
    """Make all processes agree, or end all: until here each was for itself."""
    ckpt_dir = run.ckpt_dir
    check_alike(run, plan.data)
    enter_folder(ckpt_dir, lock, is_main=backend.is_main)
    candidates = plan.candidates
    with failing_together():
        if backend.is_main:  # who had the lock until now may have written and removed some
            candidates = find_resumable(run.config.checkpoints).candidates
    start = choose_checkpoint(
        candidates,
        functools.partial(_check_resume, run=run, data=plan.data),
        verify=run.config.checkpoints.verify_checkpoint,
    )
    if start.resume and (difference := other_order(start.resume, run, plan.data)):
        epoch = start.resume.position.epoch + 1
        start.notes.append(f"note: {difference}: epoch {epoch} begins anew")
    if is_url(ckpt_dir):
        start.notes += take_logs(run.log_dir, ckpt_dir, is_main=backend.is_main)
    listed, limit = run.log_dir / BAD_IMAGES_FILE, run.config.data.max_bad_images
    bad_images = BadImages(limit, plan.data, listed, is_main=backend.is_main)
    if bad_images.excess:
        told = f"{bad_images.excess}; {ckpt_dir / BAD_IMAGES_FILE} lists them: remove it when they "
        raise UsageError(f"{told}are mended", agreed=True)
    start.notes += leave_later_ones(ckpt_dir, start.resume, is_main=backend.is_main)
    return start, bad_images


def _place(
    plan: Plan, run: Run, session: Session, start: Start, position: Position
) -> tuple[nn.Module, Objective]:
    """Put the model on the devices, with the values of what is resumed, and what it trains for."""
    say, backend = session.reports.say, session.backend
    say(f"data: {plan.data}")
    say(f"model: {run.model.name}, {run.model.parameter_count:,} parameters")
    fill = plan.initial.begin(run, start.resume, say) if plan.initial else None
    model = shard_and_optimize(run, backend, fill)
    if start.resume:
        has_ema = load_state(backend, start.resume.path)
        note = note_of_resume(keeps=run.config.ema.model_ema, has=has_ema)
        if note:
            session.reports.say(note)
    objective = Objective(run, backend, say)
    _say_plan(run, session, start.resume, position)
    return model, objective


def _schedule(run: Run, at: Position, last_step: int, steps_per_epoch: int) -> tuple[Schedule, int]:
    """Return the schedule of a run that begins at ``at``, and the step of it that the run ends at.

    Raises UsageError if it is too long.
    """
    config = run.config
    done = at.epoch * steps_per_epoch + at.images_in_epoch // config.data.batch_size
    end = done + last_step - at.step
    return make_schedule(config, steps_per_epoch, end), end


def _place_of(resume: SavedRun | None, run: Run, data: DataSource) -> Position:
    """Return where in the data to go on: at the start of the epoch, if its order is another one."""
    if resume is None:
        return Position()
    at = resume.position
    return Position(at.step, at.epoch) if other_order(resume, run, data) else at


def _positions(at: Position, run: Run, steps_per_epoch: int) -> tuple[Position, int]:
    """Return where to begin, going on from ``at``, and the step to end at.

    A step is an update, counted over the whole run. With another batch size the run goes on at the
    same place in the data, and so in the schedule, with as many more steps as are left there.
    """
    batch_size = run.config.data.batch_size
    batches = at.images_in_epoch // batch_size
    if batches >= steps_per_epoch:
        at, batches = Position(at.step, at.epoch + 1, 0), 0
    at = Position(at.step, at.epoch, batches * batch_size)
    total = run.config.num_epochs * steps_per_epoch
    end = at.step + max(0, total - (at.epoch * steps_per_epoch + batches))
    return at, max(at.step, min(end, run.config.max_steps or end))


@dataclass(frozen=True)
class _SoFar:
    """What the run has done in its folder before this start."""

    goes_on: bool
    """The folder's records are of this run. In another one's place no evaluation is owed."""
    evaluated: set[int]
    """The steps that have an evaluation."""
    best_step: int = 0
    best_top1: float = -1.0
    """In percent; the EMA's, where there is one."""


def _so_far(resume: SavedRun | None, ckpt_dir: Path, start: Position) -> _SoFar:
    if resume is None or resume.path.parent.resolve() != ckpt_dir.resolve():
        return _SoFar(False, {start.step} if start.step else set())
    done = evaluations(ckpt_dir, start.step)
    found = ((decisive(record, "val_top1"), at) for at, record in done.items())
    top1, best = max(found, default=(-1.0, 0))
    # Those beyond the start are dropped, and made again.
    evaluated = {
        r["step"] for r in read_metrics(ckpt_dir) if "val_images" in r and r["step"] <= start.step
    }
    return _SoFar(True, evaluated, best, top1)


_STATE = {"optimizer": "optimizer state", "ema": "EMA"}

# -- what is said ---------------------------------------------------------------------


def _say_plan(run: Run, session: Session, resume: SavedRun | None, start: Position) -> None:
    backend, say, batch_size = session.backend, session.reports.say, run.config.data.batch_size
    size = backend.state_bytes()
    say(backend.describe())
    told = [f"{count / 2**20:,.2f} MiB of {_STATE.get(kind, kind)}" for kind, count in size.items()]
    say(f"state a device: {', '.join(told)}")
    if resume:
        say(f"resuming {resume.path} at step {start.step}, epoch {start.epoch + 1}")
        before = resume.arguments.get("batch_size")
        if before != batch_size:
            say(
                f"note: --batch_size was {before} before: the run goes on at the same place in "
                "the data and in the schedule, steps are counted on"
            )
    if session.last_step <= start.step:
        say(f"nothing is left to train: step {start.step} is reached")
    else:
        say(f"training to step {session.last_step:,}, global batch {batch_size}")
    if backend.is_main:
        try:
            _write_run_file(run, backend)
        except OSError as error:
            say(f"note: {RUN_FILE} cannot be written ({error.strerror})")
        session.reports.upload()


def _write_run_file(run: Run, backend: Backend) -> None:
    """Keep in the run's folder what was resolved and what it runs on. Raises OSError."""
    content = {
        "job": os.environ.get("RUN_JOB_ID"),
        "arguments": run.values,
        "model": run.model.settings,
        "backend": backend.describe(),
        "devices": backend.device_count,
        "mesh": asdict(run.mesh),
        "state_bytes_per_device": backend.state_bytes(),
        "python": platform.python_version(),
        "versions": versions(),
    }
    replace_file(run.log_dir / RUN_FILE, json.dumps(content, indent=2) + "\n")


def _say_profile(reports: Reports, run: Run, profiler: StepProfiler) -> None:
    if run.config.log.profile is None:
        return
    first, last = run.config.log.profile
    if profiler.finished:
        reports.say(f"profile of steps {first} to {last}: {run.log_dir / PROFILE_DIR}")
    else:
        reports.say(f"no profile: this run had none of the steps {first} to {last}")


def _end(run: Run, session: Session, saver: CheckpointSaver, curves: Path | None) -> None:
    """Say how it ended. Raises StoppedBySignal or RunFailed if it was not at the last step."""
    reports, stop, is_main = session.reports, session.stop, session.backend.is_main
    newest = saver.newest
    if stop.number == STOPPED_NOT_FINITE:
        raise RunFailed(
            f"{reports.longest_row_skipped} steps in a row had a loss or gradient norm that is not "
            f"finite: the last good checkpoint is {newest or 'none'}; try a lower --lr, more "
            "--warmup_steps or another --precision",
            NOT_FINITE,
        )
    if stop.number == STOPPED_NO_BATCH:
        raise RunFailed(
            "the training images cannot be read any more (the warning says why): "
            f"{_again(run.config.checkpoints)} resumes {newest}",
            NO_BATCH,
        )
    if stop.number == STOPPED_BAD_IMAGES:
        raise RunFailed(
            f"{session.bad_images.excess}; {run.ckpt_dir / BAD_IMAGES_FILE} lists them: remove it "
            f"when they are mended; {_again(run.config.checkpoints)} then resumes {newest}",
            BAD_IMAGES,
        )
    if stop.number:
        if is_main:
            print(
                f"training stopped by {signal.Signals(stop.number).name}: "
                f"step {newest.name[5:] if newest else 0}, checkpoint {newest}; "
                f"{_again(run.config.checkpoints)} resumes there",
                flush=True,
            )
        session.backend.barrier()  # torchrun ends all when one has ended
        raise StoppedBySignal(stop.number)
    if is_main:
        top1 = "" if reports.last_top1 is None else f"val top-1 {reports.last_top1:.2f} %, "
        plot = curves and run.ckpt_dir / curves.name
        print(
            f"training completed: step {session.last_step}, {top1}checkpoint {newest}, "
            f"log {run.ckpt_dir / METRICS_FILE}, plot {plot}",
            flush=True,
        )


def _again(config: CheckpointConfig) -> str:
    """Return the command that goes on from the newest checkpoint."""
    if config.resume_epoch:
        return f"the same command without --resume_epoch {config.resume_epoch}"
    return "the same command" if config.resume == "auto" else "the same command with --resume auto"
