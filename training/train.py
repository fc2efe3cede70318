"""A training in every process, top to bottom: agree on the start, train, end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.initialize import allocate_uninitialized
from training import loop
from training.checkpoints import removal
from training.checkpoints.hooks import LocalSaves, Saves, StopCheck
from training.checkpoints.inventory import complete_checkpoints, folder_of
from training.checkpoints.saver import CheckpointSaver
from training.checkpoints.state import load_state
from training.errors import (
    BAD_IMAGES,
    NO_BATCH,
    NOT_FINITE,
    SIGNAL,
    RunFailed,
    StoppedBySignal,
    data_errors_as_usage_errors,
    not_finite_error,
)
from training.evaluation.hooks import Evaluations
from training.files import FolderLock
from training.logs.bad_images import FILE as BAD_IMAGES_FILE
from training.logs.bad_images import open_bad_images
from training.logs.history import (
    fetch_from_hosts,
    fetch_history,
    history_of_first,
    read_history,
)
from training.logs.hooks import EpochLog, StepLog
from training.logs.records import METRICS_FILE
from training.processes import exchange
from training.processes.stopping import StopRequest, Watchdog
from training.profiling import PROFILE_DIR, StepProfiler
from training.start import (
    confirm_start,
    enter_folder,
    hint_for_hosts,
    set_aside_newer_checkpoints,
)
from training.step import TrainBatches, shard_and_optimize, train_loader, val_loader

if TYPE_CHECKING:
    from torch import nn

    from data.source import DataSource
    from training.backend import Backend
    from training.checkpoints.choose import Start
    from training.checkpoints.compatible import Progress
    from training.checkpoints.format import SavedRun
    from training.checkpoints.local_tier import LocalTier
    from training.checkpoints.per_host import HostFolders
    from training.logs.events import StartParts
    from training.logs.reports import Reports
    from training.objectives.base import Objective
    from training.resolve import Run
    from training.schedule import Position
    from training.weights.adapt import Adapter


@dataclass(frozen=True)
class Prepared:
    """What a training has before its devices start (``training/prepare.py``)."""

    start: Start
    """What it is to start from."""
    progress: Progress
    """Where ``start`` begins."""
    check: Callable[[Start, Run, DataSource], Progress]
    """Returns where another start begins. Raises UsageError if the run cannot continue from it."""
    initial: Adapter | None
    """Trained weights that a new run starts from."""
    data: DataSource
    objective: type[Objective]
    opened: Mapping[type, Any]
    """What features have opened for their hooks (``Training.opened``)."""
    parts: StartParts
    """How long the parts of the startup took so far."""
    open_reports: Callable[..., Reports]
    open_hosts: Callable[..., HostFolders] | None
    """Opens the folders of all hosts, with ``--ckpt_dir_per_host``."""
    open_local: Callable[..., LocalTier] | None
    """Opens the hosts' local disks, with ``--local_ckpt_dir``."""


def train(prepared: Prepared, run: Run, backend: Backend) -> None:
    """Train on ``backend``, or resume and train; the body of every process.

    Raises UsageError in all processes if training cannot start; StoppedBySignal or RunFailed if it
    ends before its last step.
    """
    config, is_main = run.config, backend.is_main
    planned, progress, data, parts = (
        prepared.start,
        prepared.progress,
        prepared.data,
        prepared.parts,
    )
    parts.done("devices")
    shared = config.checkpoints.allow_other_owners
    # ``enter_folder`` locks it.
    with FolderLock(run.ckpt_dir, inside=run.log_dir, shared=shared) as lock:
        # -- agree on what all processes start from, and where in the data
        notes, hosts = [f"extension: {name}" for name in config.extension or ()], None
        if prepared.open_hosts:
            exchange.check_alike(run, data, hint_for_hosts(planned))
            hosts = prepared.open_hosts(run.ckpt_dir, shared=shared)
        else:
            exchange.check_alike(run, data)
        restart = planned.found.is_restart
        enter_folder(run.ckpt_dir, lock, is_restart=restart, is_main=is_main, hosts=hosts)
        if hosts:
            notes += [*hosts.complete(), *fetch_from_hosts(hosts)]
        start, local = confirm_start(planned, run, backend, hosts, prepared.open_local)
        with exchange.raise_on_all_ranks():
            if start.saved != planned.saved:
                progress = prepared.check(start, run, data)
        at, schedule, last_step = progress.at, progress.schedule, progress.last_step
        notes += [*start.notes, *([local.description] if local else []), *progress.notes]
        notes += fetch_history(run, is_main=is_main)
        bad_images = open_bad_images(run, data, is_main=is_main)
        loader = train_loader(data, backend, config.data.batch_size, schedule.steps)
        with exchange.raise_on_all_ranks():
            continues = start.kind in ("local", "here")
            history = read_history(
                run.ckpt_dir, at.step, continues=continues, best_by=config.checkpoints.ckpt_best
            )
        if hosts:
            history = history_of_first(history)
        # Last: nothing refuses after it.
        notes += set_aside_newer_checkpoints(start, local, run, is_main=is_main, hosts=hosts)
        parts.done("agreed")

        # -- shared by the loop and its hooks
        reports = prepared.open_reports(
            run,
            backend,
            first_step=at.step,
            last_step=last_step,
            keep_records=history.continues,
            last_evaluation=history.evaluated.get(last_step),
        )
        say = reports.say
        reports.events.start(parts, at.step, run.mesh.devices)
        stop, watchdog = StopRequest(backend), Watchdog(config.log.step_timeout_s)
        session = loop.Session(config, backend, reports, stop, watchdog, bad_images, last_step)
        saver = CheckpointSaver(
            run.ckpt_dir,
            backend,
            say,
            run.values,
            data.classes,
            config.checkpoints.keep_checkpoints,
            config.checkpoints.max_failed_saves,
            newest=start.continues_from,
            asynchronous=config.checkpoints.async_checkpoint,
            protected=history.best if config.checkpoints.ckpt_best else None,
            order=data.order(),
            store_logs=reports.store,
            hosts=hosts,
        )
        with session, saver, data_errors_as_usage_errors():
            # -- model: on the devices, with resumed or loaded values
            for line in (*notes, f"data: {data}"):
                say(line)
            if history.left_out:
                say(f"note: {METRICS_FILE}: {history.left_out} left out")
            model = _place_model(run, session, start, prepared.initial)
            objective = prepared.objective(run, backend, say)
            parts.done("model")
            if start.saved:
                _load(start, start.saved, run, session)
                parts.done("loaded")
            if hosts:
                hosts.close()
            _describe(run, session, start, at)
            if loader.workers:
                say(f"loader processes per training process: {loader.workers}")
            for note in schedule.notes if at.step < last_step else ():
                say(note)

            # -- hooks: called around each step, in this order
            batches = TrainBatches(
                loader,
                backend,
                config.data.batch_size,
                config.data.grad_accum_steps,
                positions=objective.takes_positions,
            )
            saves = Saves(session, saver)
            hooks: list[loop.Hook] = [
                StepLog(session, batches),
                EpochLog(session, batches),
            ]
            training = loop.Training(
                run,
                session,
                model,
                objective,
                saver,
                batches,
                schedule,
                at,
                prepared.opened,
                history.frozen,
            )
            for feature in config.active_features:
                hooks += feature.hooks(training)
            hooks += [StopCheck(session, batches, saver), saves]
            if local:
                hooks.append(LocalSaves(session, saver, local))
            if objective.measured and data.val_length:
                hooks.append(
                    Evaluations(
                        session,
                        model,
                        objective,
                        val_loader(data, backend, config.data.global_micro_batch_size),
                        data.val_length,
                        saves,
                        set(history.evaluated),
                        history.best_score,
                    )
                )
            elif objective.measured:
                say("no validation images: skipping evaluations")
            for feature in config.active_features:
                hooks += feature.evaluations(training)
            profiled = None
            if steps := config.log.profile:
                profiled = StepProfiler(steps, backend.profiler(run.log_dir / PROFILE_DIR))
                hooks = [profiled, *profiled.naming(hooks)]

            # -- train
            with stop, reports.events.training(last_step):
                if at.step >= last_step:
                    saver.tidy()  # if an earlier start was killed after its last checkpoint
                at = loop.train_loop(session, model, objective, hooks, batches, schedule, at)
                if stop.exit_code == NOT_FINITE:
                    raise _not_finite(run, session, saver, at.step)
                if stop.exit_code:
                    saves.save(at, must=True)
                elif bad_images.excess:  # found in the last step
                    stop.exit_code = BAD_IMAGES
            if local and not stop.exit_code:
                local.remove_all()
            if profiled:
                profiled.finish(say)

        # -- end: report how training ended, and exit with the matching code
        _end(run, session, saver)


def _place_model(
    run: Run,
    session: loop.Session,
    start: Start,
    initial: Adapter | None,
) -> nn.Module:
    """Return the sharded model on the devices, with new or loaded values. If a checkpoint is loaded
    afterwards, do not spend time on initial values."""
    say = session.reports.say
    initialize = allocate_uninitialized if start.saved else None
    say(f"model: {run.model_line}")
    if initial and not start.saved:
        initial.check_files(verify=run.config.checkpoints.verify_checkpoint)
        for note in initial.notes:
            say(note)
        initialize = initial.initialize
    return shard_and_optimize(run, session.backend, initialize)


def _load(start: Start, saved: SavedRun, run: Run, session: loop.Session) -> None:
    """Load the state of a checkpoint, or of this process's part of a local one."""
    is_part = start.kind == "local"
    has_ema = load_state(session.backend, saved.path, is_part=is_part, elsewhere=start.elsewhere)
    if run.config.averages and not has_ema:
        session.reports.say(
            "note: the checkpoint has no EMA of the weights: the EMA starts from the current "
            "weights"
        )
    if has_ema and not run.config.averages:
        session.reports.say(
            "note: dropping the checkpoint's EMA of the weights: --model_ema is not set"
        )


def _describe(run: Run, session: loop.Session, start: Start, at: Position) -> None:
    """Log what runs on which devices, and from which step to which."""
    say, batch_size = session.reports.say, run.config.data.batch_size
    session.reports.describe(run)
    if saved := start.saved:
        say(f"resuming {saved.path} at step {at.step}, epoch {at.epoch + 1}")
        before = saved.arguments.get("batch_size")
        if before != batch_size:
            say(
                f"note: --batch_size was {before} before: training continues at the same position "
                "in the data and the schedule, with consecutive step numbers"
            )
    if session.last_step <= at.step:
        say(f"nothing left to train: step {at.step} is reached")
    else:
        say(f"training to step {session.last_step:,}, {run.global_batch_line}")


def _not_finite(run: Run, session: loop.Session, saver: CheckpointSaver, step: int) -> RunFailed:
    """Return the error of a run that ends after ``step`` because its values are not finite.

    If that is the last step, set its checkpoint aside: otherwise it would be resumed as a good one.
    """
    limit, skipped = session.config.log.max_bad_steps, session.reports.longest_row_skipped
    if limit and skipped >= limit:
        what = f"{skipped} consecutive steps had a loss or gradient norm that is not finite"
        return not_finite_error(what, saver.newest)
    what, is_first = "", saver.hosts.is_first if saver.hosts else session.backend.is_main
    number = max(exchange.all_gather_object(removal.free_number(run.ckpt_dir) if is_first else 0))
    with exchange.raise_on_all_ranks():
        if is_first:
            last = folder_of(run.ckpt_dir, step)
            what = f"the {session.reports.not_finite} of the last step is not finite"
            if last.exists():
                aside = removal.set_aside(run.ckpt_dir, [last], number)
                what += f", so {last.name} was set aside in {aside}"
    what = exchange.broadcast_object(what)  # all processes wait until the checkpoint is moved
    newest = next(reversed(complete_checkpoints(run.ckpt_dir)), None)
    return not_finite_error(what, newest)


def _end(run: Run, session: loop.Session, saver: CheckpointSaver) -> None:
    """Report how training ended.

    Raises StoppedBySignal or RunFailed if it did not reach the last step.
    """
    newest, exit_code, is_main = saver.newest, session.stop.exit_code, session.backend.is_main
    checkpoints = run.config.checkpoints
    again = "the same command"
    if checkpoints.resume_epoch:
        again += f" without --resume_epoch {checkpoints.resume_epoch}"
    elif checkpoints.resume != "auto":
        again += " with --resume auto"

    if exit_code > SIGNAL:
        if is_main:
            print(
                f"training stopped by {signal.Signals(exit_code - SIGNAL).name}: "
                f"step {newest.name[5:] if newest else 0}, checkpoint {newest}; "
                f"{again} resumes there",
                flush=True,
            )
        session.backend.barrier()  # torchrun terminates all processes when one exits
        raise StoppedBySignal(exit_code)
    if exit_code == NO_BATCH:
        raise RunFailed(
            f"the training images can no longer be read (see the warning above): {again} resumes "
            f"{newest}",
            NO_BATCH,
        )
    if exit_code == BAD_IMAGES:
        raise RunFailed(
            f"{session.bad_images.excess}; {run.ckpt_dir / BAD_IMAGES_FILE} lists them: delete "
            "that file when they are fixed (if you remove images, use a new --ckpt_dir); "
            f"{again} then resumes {newest}",
            BAD_IMAGES,
        )
    assert not exit_code  # NOT_FINITE and NOT_SAVED were raised where they were found
    if is_main:
        evaluation, plot = session.reports.last_evaluation, session.reports.plot
        figure = "" if evaluation is None else f"{evaluation}, "
        print(
            f"training completed: step {session.last_step}, {figure}checkpoint {newest}, "
            f"log {run.ckpt_dir / METRICS_FILE}, plot {plot and run.ckpt_dir / plot.name}",
            flush=True,
        )
