"""A whole run: what is checked before any device starts, and what happens on a backend."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from data.build import DataSource, build_loaders, open_data
from models.config import VitConfig
from models.vit import build_vit, fsdp_units, initialize_module, train_flops_per_image
from training.arguments import model_config
from training.backend import Backend
from training.bad_images import BadImages
from training.checkpoints.choose import RUN_FILE, Candidates, find_resume, first_readable
from training.checkpoints.content import Position, SavedRun
from training.checkpoints.lock import FolderLock
from training.checkpoints.manifest import replace_file
from training.checkpoints.saver import CheckpointSaver
from training.errors import NOT_FINITE, RunFailed, StoppedBySignal
from training.fingerprint import check_alike, versions
from training.loop import Trainer
from training.metrics import METRICS_FILE, evaluations, read_metrics
from training.preprocessing import take_preprocessing
from training.processes import failing_together
from training.profiling import PROFILE_DIR, StepProfiler
from training.reports import Reports
from training.schedule import WarmupCosine
from training.start import (
    Start,
    check_folder_writable,
    choose_checkpoint,
    enter_folder,
    leave_later_ones,
)
from training.stopping import NOT_FINITE as STOPPED_NOT_FINITE
from training.stopping import StopRequest
from training.validation import (
    bad_data_is_the_users,
    check_model,
    check_run,
    check_same_classes,
    check_same_model,
)
from training.watchdog import Watchdog


@dataclass
class Plan:
    """A run that was found to be possible."""

    config: VitConfig
    data: DataSource
    candidates: Candidates
    """Of checkpoints to resume, as this process sees them."""


def prepare(args: argparse.Namespace, device_count: int) -> Plan:
    """Check everything that can be checked without a device. Raises UsageError."""
    config = model_config(args)
    check_model(config)
    check_run(args, device_count)
    check_folder_writable(args)
    resume, candidates = _candidates(args)
    take_preprocessing(args, resume)
    with bad_data_is_the_users():
        data = open_data(args, config)
    if resume:
        _check_resume(resume, config, data)
    return Plan(config, data, candidates)


def _candidates(args: argparse.Namespace) -> tuple[SavedRun | None, Candidates]:
    return first_readable(find_resume(Path(args.ckpt_dir), args.resume, args.resume_epoch))


def _check_resume(resume: SavedRun, config: VitConfig, data: DataSource) -> None:
    check_same_model(resume, config)
    check_same_classes(resume.classes, resume.path, data)


def run(plan: Plan, args: argparse.Namespace, backend: Backend) -> None:
    """Train, or resume and train, on ``backend``; the body of every process."""
    lock = FolderLock(Path(args.ckpt_dir))
    try:
        _run(plan, args, backend, lock)
    finally:
        lock.release()


def _run(plan: Plan, args: argparse.Namespace, backend: Backend, lock: FolderLock) -> None:
    start = _begin(plan, args, backend, lock)
    config, ckpt_dir = plan.config, Path(args.ckpt_dir)
    train_loader, val_loader = build_loaders(
        plan.data, args, config, backend.rank, backend.world_size
    )
    position, last_step = _positions(start.resume, args, len(train_loader))
    goes_on = start.resume is not None and start.resume.path.parent.resolve() == ckpt_dir.resolve()
    reports = Reports(
        ckpt_dir,
        backend,
        first_step=position.step,
        total_steps=last_step,
        batch_size=args.batch_size,
        flops_per_image=train_flops_per_image(config),
        keep_records=goes_on,
        wandb_project=args.wandb,
        arguments=vars(args),
    )
    stop, watchdog = StopRequest(backend), Watchdog(args.step_timeout_s)
    saver = CheckpointSaver(
        ckpt_dir, backend, reports.say, vars(args), plan.data.classes, args.keep_checkpoints,
        args.max_failed_saves, newest=start.resume.path if start.resume else None,
    )  # fmt: skip
    try:
        with bad_data_is_the_users():
            for note in start.notes:
                reports.say(note)
            model = _place(plan, args, backend, reports, start, position, last_step)
            done = _evaluations_so_far(ckpt_dir, position, goes_on)
            trainer = Trainer(
                args, model, train_loader, val_loader, backend,
                WarmupCosine(args.lr, args.warmup_steps, len(train_loader) * args.num_epochs),
                reports, saver, last_step,
                StepProfiler(args.profile, ckpt_dir / PROFILE_DIR, backend.rank), stop,
                BadImages(ckpt_dir, args.max_bad_images, is_main=backend.is_main, say=reports.say),
                watchdog, **done,
            )  # fmt: skip
            with stop:
                trainer.train(position)
            trainer.profiler.close()
            if args.profile:
                _say_profile(reports, args, trainer.profiler)
    finally:
        watchdog.rest()
        curves = reports.close()
    if reports.last_top1 is None and last_step in done["evaluated"]:  # by an earlier start
        reports.last_top1 = evaluations(ckpt_dir).get(last_step, {}).get("val_top1")
    _end(args, backend, stop, saver, reports, last_step, curves)


def _begin(plan: Plan, args: argparse.Namespace, backend: Backend, lock: FolderLock) -> Start:
    """Until here each process was for itself: now all agree, or all end."""
    with failing_together():
        check_run(args, backend.device_count)  # as many as were expected?
    check_alike(args, plan.data)
    enter_folder(Path(args.ckpt_dir), lock, is_main=backend.is_main)
    candidates = plan.candidates
    with failing_together():
        if backend.is_main:  # who had the lock until now may have written and removed some
            candidates = _candidates(args)[1]
    start = choose_checkpoint(
        candidates,
        functools.partial(_check_resume, config=plan.config, data=plan.data),
        verify=args.verify_checkpoint,
    )
    start.notes += leave_later_ones(Path(args.ckpt_dir), start.resume, is_main=backend.is_main)
    return start


def _place(
    plan: Plan, args: argparse.Namespace, backend: Backend, reports: Reports, start: Start,
    position: Position, last_step: int,
) -> nn.Module:  # fmt: skip
    """The model on the devices, with the values of what is resumed."""
    reports.say(f"data: {plan.data}")
    plain = build_vit(plan.config)
    count = sum(parameter.numel() for parameter in plain.parameters())
    reports.say(f"model: {args.model}, {count:,} parameters")
    model = shard_and_optimize(plain, args, plan.config, backend)
    if start.resume:
        backend.load(start.resume.path)
    _say_plan(reports, args, backend, plan, start.resume, position, last_step)
    return model


def shard_and_optimize(
    model: VisionTransformer, args: argparse.Namespace, config: VitConfig, backend: Backend
) -> nn.Module:
    """The model filled and sharded on the backend, with its optimizer there, to be trained."""
    initialize = functools.partial(
        initialize_module,
        seed=args.seed, num_classes=config.num_classes, weight_init=config.weight_init,
    )  # fmt: skip
    sharded = backend.shard(model, list(fsdp_units(model)), initialize)
    betas = (args.betas[0], args.betas[1])
    backend.build_optimizer(betas=betas, eps=args.eps, weight_decay=args.weight_decay)
    return sharded


def _positions(
    resume: SavedRun | None, args: argparse.Namespace, steps_per_epoch: int
) -> tuple[Position, int]:
    """Where to begin, and the step to end at.

    A step is an update, counted over the whole run. With another batch size the run goes on at the
    same place in the data, and so in the schedule, with as many more steps as are left there.
    """
    at = resume.position if resume else Position()
    batches = at.images_in_epoch // args.batch_size
    if batches >= steps_per_epoch:
        at, batches = Position(at.step, at.epoch + 1, 0), 0
    at = Position(at.step, at.epoch, batches * args.batch_size)
    left = max(0, args.num_epochs * steps_per_epoch - (at.epoch * steps_per_epoch + batches))
    end = at.step + left
    return at, max(at.step, min(end, args.max_steps or end))


def _evaluations_so_far(ckpt_dir: Path, start: Position, goes_on: bool) -> dict:
    """For Trainer: the best evaluation up to here, and of which steps there is one.

    ``goes_on``: the folder's records are of this run. In another one's place nothing is owed.
    """
    if not goes_on:
        return {"evaluated": {start.step} if start.step else set()}
    done = evaluations(ckpt_dir, start.step)
    best = max(((record["val_top1"], at) for at, record in done.items()), default=(-1.0, 0))
    records = read_metrics(ckpt_dir)
    return {"best": best, "evaluated": {r["step"] for r in records if "val_images" in r}}


# -- what is said ---------------------------------------------------------------------


def _say_plan(
    reports: Reports, args: argparse.Namespace, backend: Backend, plan: Plan,
    resume: SavedRun | None, start: Position, last_step: int,
) -> None:  # fmt: skip
    size = backend.state_bytes()
    reports.say(backend.describe())
    reports.say(
        f"state a device: {size['parameters'] / 2**20:,.2f} MiB of parameters, "
        f"{size['optimizer'] / 2**20:,.2f} MiB of optimizer state"
    )
    if resume:
        reports.say(f"resuming {resume.path} at step {start.step}, epoch {start.epoch + 1}")
        before = resume.arguments.get("batch_size")
        if before != args.batch_size:
            reports.say(
                f"note: --batch_size was {before} before: the run goes on at the same place in "
                "the data and in the schedule, steps are counted on"
            )
    if last_step <= start.step:
        reports.say(f"nothing is left to train: step {start.step} is reached")
    else:
        reports.say(f"training to step {last_step:,}, global batch {args.batch_size}")
    if not backend.is_main:
        return
    content = {
        "job": os.environ.get("RUN_JOB_ID"),
        "arguments": vars(args),
        "model": asdict(plan.config),
        "backend": backend.describe(),
        "devices": backend.device_count,
        "state_bytes_per_device": size,
        "python": platform.python_version(),
        "versions": versions(),
    }
    try:
        replace_file(Path(args.ckpt_dir) / RUN_FILE, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        reports.say(f"note: {RUN_FILE} cannot be written ({error.strerror})")


def _say_profile(reports: Reports, args: argparse.Namespace, profiler: StepProfiler) -> None:
    first, last = args.profile
    if profiler.finished:
        reports.say(f"profile of steps {first} to {last}: {Path(args.ckpt_dir) / PROFILE_DIR}")
    else:
        reports.say(f"no profile: this run had none of the steps {first} to {last}")


def _end(
    args: argparse.Namespace, backend: Backend, stop: StopRequest, saver: CheckpointSaver,
    reports: Reports, last_step: int, curves: Path | None,
) -> None:  # fmt: skip
    """Say how it ended. Raises StoppedBySignal or RunFailed if it was not at the last step."""
    newest = saver.newest
    if stop.number == STOPPED_NOT_FINITE:
        raise RunFailed(
            f"{reports.longest_row_skipped} steps in a row had a loss or gradient norm that is not "
            f"finite: the last good checkpoint is {newest or 'none'}; try a lower --lr, more "
            "--warmup_steps or another --precision",
            NOT_FINITE,
        )
    if stop.number:
        if backend.is_main:
            print(
                f"training stopped by {signal.Signals(stop.number).name}: "
                f"step {newest.name[5:] if newest else 0}, checkpoint {newest}; "
                f"{_again(args)} resumes there",
                flush=True,
            )
        backend.barrier()  # torchrun ends all when one has ended
        raise StoppedBySignal(stop.number)
    if backend.is_main:
        top1 = "" if reports.last_top1 is None else f"val top-1 {reports.last_top1:.2f} %, "
        print(
            f"training completed: step {last_step}, {top1}checkpoint {newest}, "
            f"log {Path(args.ckpt_dir) / METRICS_FILE}, plot {curves}",
            flush=True,
        )


def _again(args: argparse.Namespace) -> str:
    """The command that goes on from the newest checkpoint."""
    if args.resume_epoch:
        return f"the same command without --resume_epoch {args.resume_epoch}"
    return "the same command" if args.resume == "auto" else "the same command with --resume auto"
