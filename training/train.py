"""A whole training, as one narrative: prepare before any device starts, then start, train, end."""

import functools
import json
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from data.loader import Share
from data.source import DataSource, open_data
from training import begin, loop
from training.backend import (
    Backend,
    bad_data_is_the_users,
    dataset_request,
    train_loader,
    val_loader,
)
from training.checkpoints.choose import RUN_FILE
from training.checkpoints.format import SavedRun
from training.checkpoints.saver import CheckpointSaver
from training.checkpoints.state import load_state
from training.errors import BAD_IMAGES, NO_BATCH, NOT_FINITE, SIGNAL, RunFailed, StoppedBySignal
from training.features import Features, open_plainly
from training.files import FolderLock, replace_file
from training.frozen import FrozenEvaluations
from training.initial_weights import InitialWeights, fit, gram_teacher
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
    with bad_data_is_the_users():
        data = open_data(dataset_request(run, labels=run.config.objective.uses_labels))
    if saved:
        begin.check_resume(saved, run, data)
    epoch_steps = len(data.train_loader(run.config.data.batch_size, Share(loads=False)))
    progress = begin.progress_of(saved, run, data, epoch_steps)
    initial = fit(weights, run, data.classes) if weights else None
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
    prepared.parts.done("devices")
    config, ckpt_dir, data = run.config, run.ckpt_dir, prepared.data
    shared = config.checkpoints.shared_ckpt_dir
    with FolderLock(ckpt_dir, inside=run.log_dir, shared=shared) as lock:  # released at the end
        # Begin: agree on what is resumed, and where in the data that is.
        saved, newest, local, bad_images, notes = begin.agree(
            prepared.saved, run, data, lock, is_main=backend.is_main
        )
        loader = train_loader(data, backend, config.data.batch_size)
        progress = prepared.progress
        if saved != prepared.saved:  # that one is damaged, or there is a newer one by now
            progress = begin.progress_of(saved, run, data, len(loader))
        at, last_step = progress.at, progress.last_step
        with exchange.failing_together():
            history = begin.history_of(saved, ckpt_dir, at.step)
        reports = Reports(
            run,
            backend,
            first_step=at.step,
            last_step=last_step,
            keep_records=history.continues,
            expected_s=prepared.expected_s,
            last_evaluation=history.evaluated.get(last_step),
        )
        prepared.parts.done("agreed")
        reports.events.start(prepared.parts, at.step, run.mesh.devices)
        stop, watchdog = StopRequest(backend), Watchdog(config.log.step_timeout_s)
        session = loop.Session(config, backend, reports, stop, watchdog, bad_images, last_step)
        saver = CheckpointSaver(
            ckpt_dir,
            backend,
            reports.say,
            run.values,
            data.classes,
            config.checkpoints.keep_checkpoints,
            config.checkpoints.max_failed_saves,
            newest=newest,
            asynchronous=config.checkpoints.async_checkpoint,
            spared=history.best if config.checkpoints.ckpt_best else None,
            order=data.order(),
        )
        try:
            with saver, bad_data_is_the_users():
                for line in (*notes, f"data: {data}"):
                    reports.say(line)

                # Place: the model on the devices, with the values of what is resumed or loaded.
                reports.say(f"model: {run.model.name}, {run.model.parameter_count:,} parameters")
                initialize, initial = None, prepared.initial
                if initial and not saved:
                    begin.check_weights(
                        initial.weights, verify=config.checkpoints.verify_checkpoint
                    )
                    reports.say(initial.note)
                    initialize = initial.initialize
                model = shard_and_optimize(run, backend, initialize)
                prepared.parts.done("model")
                if saved:
                    has_ema = load_state(backend, saved.path, is_part=saved.is_part)
                    prepared.parts.done("loaded")
                    if config.averages and not has_ema:
                        reports.say(
                            "note: the checkpoint has no EMA of the weights: it starts with these "
                            "weights"
                        )
                    if has_ema and not config.averages:
                        reports.say(
                            "note: the checkpoint's EMA of the weights is dropped: --model_ema is "
                            "not given"
                        )
                objective = open_objective(run, backend, reports.say)
                _describe(run, session, saved, progress)
                if loader.workers:
                    reports.say(f"loader processes of each training process: {loader.workers}")
                if progress.warning:
                    reports.say(progress.warning)

                # Train: the loop, and what is done after each step, in this order.
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
                saves, evaluated = loop.Saves(session, saver), set(history.evaluated)
                hooks: list[loop.Hook] = [
                    profiler,
                    loop.StepLog(session, batches),
                    loop.StopCheck(session, batches, saver),
                    saves,
                ]
                if local:
                    hooks.append(loop.LocalSaves(session, saver, local))
                if data.val_length and objective.measured:
                    hooks.append(
                        loop.Evaluations(
                            session,
                            model,
                            objective,
                            val_loader(data, backend, config.data.pass_size),
                            data.val_length,
                            saves,
                            evaluated,
                            history.best_score,
                        )
                    )
                elif objective.measured:
                    reports.say("there are no validation images: nothing is evaluated")
                if prepared.plain:
                    features = Features(model, run, backend, prepared.plain)
                    hooks.append(FrozenEvaluations(session, features, history.frozen))
                with stop, reports.events.training(last_step):
                    if at.step >= last_step:
                        saver.tidy()  # after a start that was killed after its last checkpoint
                    at = loop.train_loop(
                        session, model, objective, batches, progress.schedule, hooks, at
                    )
                    if stop.exit_code == NOT_FINITE:
                        pass  # its weights are no good
                    elif stop.exit_code:
                        saves.save(at, must=True)
                    elif bad_images.excess:  # found with the last step
                        stop.exit_code = BAD_IMAGES
                if local and not stop.exit_code:
                    local.complete()
                profiler.finish(reports.say)
        finally:
            watchdog.pause()
            curves = reports.close()

        # End: say how, and exit with the code of that.
        _end(run, session, saver.newest, curves)


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


def _end(run: Run, session: loop.Session, newest: Path | None, curves: Path | None) -> None:
    """Say how training ended; ``newest``: its newest checkpoint.

    Raises StoppedBySignal or RunFailed if it was not at the last step.
    """
    reports, exit_code, is_main = session.reports, session.stop.exit_code, session.backend.is_main
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
    if exit_code == NOT_FINITE:
        raise RunFailed(
            f"{reports.longest_row_skipped} steps in a row had a loss or gradient norm that is not "
            f"finite: the last good checkpoint is {newest or 'none'}; try a lower --lr, more "
            "--warmup_steps or another --precision",
            NOT_FINITE,
        )
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
        figure = "" if reports.last_evaluation is None else f"{reports.last_evaluation}, "
        print(
            f"training completed: step {session.last_step}, {figure}checkpoint {newest}, "
            f"log {run.ckpt_dir / METRICS_FILE}, plot {curves and run.ckpt_dir / curves.name}",
            flush=True,
        )
