"""A whole training, as one narrative: prepare before any device starts, then agree, train, end."""

import functools
import json
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from data.loader import BatchLoader, Share
from data.source import DataSource, open_data
from models.initialize import leave_room
from training import begin, loop
from training.backend import (
    Backend,
    data_errors_as_usage_errors,
    dataset_request,
    train_loader,
    val_loader,
)
from training.checkpoints import choose
from training.checkpoints.choose import RUN_FILE
from training.checkpoints.format import SavedRun
from training.checkpoints.saver import CheckpointSaver
from training.checkpoints.state import load_state
from training.errors import (
    BAD_IMAGES,
    NO_BATCH,
    NOT_FINITE,
    SIGNAL,
    RunFailed,
    StoppedBySignal,
    not_finite_error,
)
from training.features import Features, open_plainly
from training.files import FolderLock, replace_file
from training.frozen import FrozenEvaluations
from training.initial_weights import InitialWeights, fit, gram_teacher, weights_of_teacher
from training.logs.bad_images import FILE as BAD_IMAGES_FILE
from training.logs.records import METRICS_FILE, StartParts
from training.logs.reports import Reports, read_expectation
from training.objectives import open_objective
from training.processes import exchange
from training.processes.stopping import StopRequest, Watchdog
from training.resolve import Run
from training.step import TrainBatches, shard_and_optimize
from training.weights import Weights, with_preprocessing, with_preprocessing_of


@dataclass(frozen=True)
class Prepared:
    """What was found before any device starts; it is sent to every process."""

    saved: SavedRun | None
    """The checkpoint that this process has chosen to resume."""
    data: DataSource
    progress: begin.Progress
    initial: InitialWeights | None
    """Trained weights that a new training starts from."""
    expected_s: float | None
    """The seconds that a step is expected to take, if ``--expect`` names them."""
    parts: StartParts
    """How long the start has taken so far."""
    plain: DataSource | None = None
    """The same images, not augmented, for ``--knn_every`` and ``--probe_every``."""


def prepare_training(
    saved: SavedRun | None, weights: Weights | None, run: Run
) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Check everything that can be checked without a device, for what ``begin.choose_start`` chose.

    Returns the run with its preprocessing, and the body of every process. Raises UsageError.
    """
    parts = StartParts()
    parts.done("imports")
    expected_s = read_expectation(run)
    if weights:
        weights, run = with_preprocessing_of(weights, run)
    else:
        run = with_preprocessing(run, saved)
    with data_errors_as_usage_errors():
        data = open_data(dataset_request(run, labels=run.config.objective.uses_labels))
    if saved:
        begin.check_resume(saved, run, data)
    epoch_steps = len(data.train_loader(run.config.data.batch_size, Share(loads=False)))
    progress = begin.progress_of(saved, run, data, epoch_steps)
    initial = None
    if weights:
        initial = fit(weights, run, data.classes)
        if data.classes and initial.keeps_head and not weights.classes:
            begin.check_unnamed_classes(data.classes, weights.path, run.config.data, run.model)
    if run.teacher and run.config.loss.teacher_weights and data.classes:
        teacher = weights_of_teacher(run.config.loss.teacher_weights, "--teacher_weights")
        begin.check_same_classes(teacher.classes, teacher.path, data, run)
    if run.config.objective.gram_weights:
        gram_teacher(run)  # raises UsageError
    plain = open_plainly(run) if run.config.log.knn_every or run.config.log.probe_every else None
    parts.done("data")
    prepared = Prepared(saved, data, progress, initial, expected_s, parts, plain)
    return run, functools.partial(train, prepared)


def train(prepared: Prepared, run: Run, backend: Backend) -> None:
    """Train on ``backend``, or resume and train; the body of every process.

    Raises UsageError in all processes if they cannot start; StoppedBySignal or RunFailed if
    training ends before its last step.
    """
    parts, data, config = prepared.parts, prepared.data, run.config
    parts.done("devices")
    shared = config.checkpoints.shared_ckpt_dir
    with FolderLock(run.ckpt_dir, inside=run.log_dir, shared=shared) as lock:
        # Agree on what is resumed, and where in the data that is.
        begun = begin.agree(prepared.saved, run, data, lock, backend)
        loader = train_loader(data, backend, config.data.batch_size)
        progress = prepared.progress
        if begun.saved != prepared.saved:  # it is damaged, or there is a newer one by now
            progress = begin.progress_of(begun.saved, run, data, len(loader))
        step, last_step = progress.at.step, progress.last_step
        with exchange.failing_together():
            history = begin.history_of(begun.saved, run.ckpt_dir, step)
        parts.done("agreed")

        # Open what the loop and its hooks share.
        reports = Reports(
            run,
            backend,
            first_step=step,
            last_step=last_step,
            keep_records=history.continues,
            expected_s=prepared.expected_s,
            last_evaluation=history.evaluated.get(last_step),
        )
        reports.events.start(parts, step, run.mesh.devices)
        stop, watchdog = StopRequest(backend), Watchdog(config.log.step_timeout_s)
        session = loop.Session(
            config, backend, reports, stop, watchdog, begun.bad_images, last_step
        )
        saver = CheckpointSaver(
            run.ckpt_dir,
            backend,
            reports.say,
            run.values,
            data.classes,
            config.checkpoints.keep_checkpoints,
            config.checkpoints.max_failed_saves,
            newest=begun.newest,
            asynchronous=config.checkpoints.async_checkpoint,
            spared=history.best if config.checkpoints.ckpt_best else None,
            order=data.order(),
            store_logs=reports.store,
        )
        try:
            with saver, data_errors_as_usage_errors():
                _train(prepared, run, session, saver, loader, progress, begun, history)
        finally:
            watchdog.pause()
            plot = reports.close()

        # End: say how, and exit with the code of that.
        _end(run, session, saver, plot)


def _train(
    prepared: Prepared,
    run: Run,
    session: loop.Session,
    saver: CheckpointSaver,
    loader: BatchLoader,
    progress: begin.Progress,
    begun: begin.Agreed,
    history: begin.History,
) -> None:
    """Put the model on the devices, and train it."""
    config, data, backend = run.config, prepared.data, session.backend
    say, stop = session.reports.say, session.stop

    # The model on the devices, with the values of what is resumed or loaded.
    for line in (*begun.notes, f"data: {data}"):
        say(line)
    if history.left_out:
        say(f"note: {METRICS_FILE}: {history.left_out} left out")
    model = _place(run, session, begun.saved, prepared)
    objective = open_objective(run, backend, say)
    _describe(run, session, begun.saved, progress)
    if loader.workers:
        say(f"loader processes of each training process: {loader.workers}")
    if progress.warning:
        say(progress.warning)

    # What is done around each step, in this order.
    batches = TrainBatches(
        loader,
        backend,
        config.data.batch_size,
        config.data.grad_accum_steps,
        numbered=objective.numbered,
    )
    profiler = loop.StepProfiler(
        config.log.profile, run.log_dir / loop.PROFILE_DIR, exchange.rank()
    )
    saves = loop.Saves(session, saver)
    log, stop_check = loop.StepLog(session, batches), loop.StopCheck(session, batches, saver)
    hooks: list[loop.Hook] = [profiler, log, stop_check, saves]
    if begun.local:
        hooks.append(loop.LocalSaves(session, saver, begun.local))
    if objective.measured and data.val_length:
        evaluations = loop.Evaluations(
            session,
            model,
            objective,
            val_loader(data, backend, config.data.pass_size),
            data.val_length,
            saves,
            set(history.evaluated),
            history.best_score,
        )
        hooks.append(evaluations)
    elif objective.measured:
        say("there are no validation images: nothing is evaluated")
    if prepared.plain:
        features = Features(model, run, backend, prepared.plain)
        hooks.append(FrozenEvaluations(session, features, history.frozen))

    # Train.
    at = progress.at
    with stop, session.reports.events.training(session.last_step):
        if at.step >= session.last_step:
            saver.tidy()  # after a start that was killed after its last checkpoint
        at = loop.train_loop(session, model, objective, hooks, batches, progress.schedule, at)
        if stop.exit_code == NOT_FINITE:
            raise _not_finite(run, session, saver, at.step)
        if stop.exit_code:
            saves.save(at, must=True)
        elif session.bad_images.excess:  # found with the last step
            stop.exit_code = BAD_IMAGES
    if begun.local and not stop.exit_code:
        begun.local.complete()
    profiler.finish(say)


def _not_finite(run: Run, session: loop.Session, saver: CheckpointSaver, step: int) -> RunFailed:
    """Return the error of a run that ends after ``step`` because its numbers are not finite.

    If that is the last step its checkpoint is set aside: resumed, it would be taken for a good one.
    """
    limit, skipped = session.config.log.max_bad_steps, session.reports.longest_row_skipped
    if limit and skipped >= limit:
        what = f"{skipped} steps in a row had a loss or gradient norm that is not finite"
        return not_finite_error(what, saver.newest)
    what = ""
    with exchange.failing_together():
        if session.backend.is_main:
            last = choose.folder_of(run.ckpt_dir, step)
            what = f"the {session.reports.not_finite} of the last step is not finite"
            if last.exists():
                aside = choose.set_aside(run.ckpt_dir, [last])
                what += f", so {last.name} was set aside in {aside}"
    what = exchange.gather(what)[0]  # all wait for what was moved
    newest = next(reversed(choose.complete_checkpoints(run.ckpt_dir)), None)
    return not_finite_error(what, newest)


def _place(
    run: Run, session: loop.Session, saved: SavedRun | None, prepared: Prepared
) -> nn.Module:
    """Return the sharded model on the devices, with the values of what is resumed or loaded."""
    say, backend, initial = session.reports.say, session.backend, prepared.initial
    initialize = leave_room if saved else None
    say(f"model: {run.model.name}, {run.model.parameter_count:,} parameters")
    if initial and not saved:
        begin.check_weights(initial.weights, verify=run.config.checkpoints.verify_checkpoint)
        say(initial.note)
        initialize = initial.initialize
    model = shard_and_optimize(run, backend, initialize)
    prepared.parts.done("model")
    if saved:
        has_ema = load_state(backend, saved.path, is_part=saved.is_part)
        prepared.parts.done("loaded")
        if run.config.averages and not has_ema:
            say("note: the checkpoint has no EMA of the weights: it starts with these weights")
        if has_ema and not run.config.averages:
            say("note: the checkpoint's EMA of the weights is dropped: --model_ema is not given")
    return model


_STATE = {"optimizer": "optimizer state", "ema": "EMA"}


def _describe(
    run: Run, session: loop.Session, saved: SavedRun | None, progress: begin.Progress
) -> None:
    """Say what runs on which devices, and from where to where; write that to run.json."""
    backend, say, batch_size = session.backend, session.reports.say, run.config.data.batch_size
    start, last_step = progress.at, progress.last_step
    devices, state_bytes = backend.describe(), backend.state_bytes()
    say(devices)
    sizes = [f"{n / 2**20:,.2f} MiB of {_STATE.get(kind, kind)}" for kind, n in state_bytes.items()]
    say(f"state a device: {', '.join(sizes)}")
    if saved:
        say(f"resuming {saved.path} at step {start.step}, epoch {start.epoch + 1}")
        before = saved.arguments.get("batch_size")
        if before != batch_size:
            say(
                f"note: --batch_size was {before} before: the run continues at the same place in "
                "the data and in the schedule, steps are counted on"
            )
    if last_step <= start.step:
        say(f"nothing is left to train: step {start.step} is reached")
    else:
        say(f"training to step {last_step:,}, global batch {batch_size}")
    if backend.is_main:
        content = {
            "job": os.environ.get("RUN_JOB_ID"),
            "arguments": run.values,
            "model": run.model.settings,
            "backend": devices,
            "devices": backend.device_count,
            "mesh": asdict(run.mesh),
            "state_bytes_per_device": state_bytes,
            "python": platform.python_version(),
            "versions": exchange.versions(),
        }
        try:
            replace_file(run.log_dir / RUN_FILE, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            say(f"warning: {RUN_FILE} cannot be written ({error.strerror})")
        session.reports.upload()


def _end(run: Run, session: loop.Session, saver: CheckpointSaver, plot: Path | None) -> None:
    """Say how training ended.

    Raises StoppedBySignal or RunFailed if it was not at the last step.
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
        session.backend.barrier()  # torchrun ends all when one has ended
        raise StoppedBySignal(exit_code)
    if exit_code == NO_BATCH:
        raise RunFailed(
            "the training images cannot be read any more (the warning says why): "
            f"{again} resumes {newest}",
            NO_BATCH,
        )
    if exit_code == BAD_IMAGES:
        raise RunFailed(
            f"{session.bad_images.excess}; {run.ckpt_dir / BAD_IMAGES_FILE} lists them: remove it "
            f"when they are mended; {again} then resumes {newest}",
            BAD_IMAGES,
        )
    if is_main:
        evaluation = session.reports.last_evaluation
        figure = "" if evaluation is None else f"{evaluation}, "
        print(
            f"training completed: step {session.last_step}, {figure}checkpoint {newest}, "
            f"log {run.ckpt_dir / METRICS_FILE}, plot {plot and run.ckpt_dir / plot.name}",
            flush=True,
        )
