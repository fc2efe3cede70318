"""A whole run: what is checked before any device starts, and what happens on a backend."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import signal
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from data.build import DataSource, build_loaders, open_data
from data.image_folder import DataFolderError
from models.config import VitConfig
from models.vit import build_vit, fsdp_units, initialize_module, train_flops_per_image
from training.arguments import model_config
from training.backend import Backend
from training.checkpoint import Position, SavedRun, find_resume
from training.errors import StoppedBySignal, UsageError
from training.loop import Trainer
from training.metrics import METRICS_FILE, evaluations
from training.profiling import PROFILE_DIR, StepProfiler
from training.reports import Reports
from training.schedule import WarmupCosine
from training.stopping import StopRequest
from training.validation import check_model, check_run, check_same_model

RUN_FILE = "run.json"
_PACKAGES = (
    "torch", "torch_xla", "megatron-fsdp", "transformer-engine", "timm", "torchvision", "numpy"
)  # fmt: skip


@dataclass
class Plan:
    """A run that was found to be possible."""

    config: VitConfig
    data: DataSource
    resume: SavedRun | None
    best: tuple[float, int]
    """Highest top-1 in percent of what is resumed, and its step."""


def prepare(args: argparse.Namespace, device_count: int) -> Plan:
    """Check everything that can be checked without a device. Raises UsageError."""
    config = model_config(args)
    check_model(config)
    check_run(args, device_count)
    try:
        data = open_data(args, config)
    except DataFolderError as error:
        raise UsageError(str(error)) from None
    resume = find_resume(Path(args.ckpt_dir), args.resume, args.resume_epoch)
    if resume:
        check_same_model(resume, config)
    return Plan(config, data, resume, _best_so_far(Path(args.ckpt_dir), resume))


def run(plan: Plan, args: argparse.Namespace, backend: Backend) -> None:
    """Train, or resume and train, on ``backend``; the body of every process."""
    check_run(args, backend.device_count)  # as many as were expected?
    config = plan.config
    train_loader, val_loader = build_loaders(
        plan.data, args, config, backend.rank, backend.world_size
    )
    steps_per_epoch = len(train_loader)
    total_steps = steps_per_epoch * args.num_epochs
    start = _start_position(plan.resume, args, steps_per_epoch)
    last_step = min(total_steps, args.max_steps or total_steps)
    reports = Reports(
        Path(args.ckpt_dir),
        backend,
        first_step=start.step,
        total_steps=last_step,
        batch_size=args.batch_size,
        flops_per_image=train_flops_per_image(config),
        wandb_project=args.wandb,
        arguments=vars(args),
    )
    stop = StopRequest(backend)
    try:
        reports.say(f"data: {plan.data}")
        plain = build_vit(config)
        count = sum(parameter.numel() for parameter in plain.parameters())
        reports.say(f"model: {args.model}, {count:,} parameters")
        model = shard_and_optimize(plain, args, config, backend)
        if plan.resume:
            backend.load(plan.resume.path)
        _say_plan(reports, args, backend, plan, start, last_step)
        schedule = WarmupCosine(args.lr, args.warmup_steps, total_steps)
        profiler = StepProfiler(args.profile, Path(args.ckpt_dir) / PROFILE_DIR, backend.rank)
        trainer = Trainer(
            args, model, train_loader, val_loader, backend, schedule, reports, last_step,
            profiler, stop, plan.data.classes, plan.best,
        )  # fmt: skip
        with stop:
            saved = trainer.train(start)
        profiler.close()
        if args.profile:
            _say_profile(reports, args, profiler)
        if saved is None:  # resumed at the end: nothing to train, but say how good it is
            trainer.evaluate_only(start)
    except DataFolderError as error:  # a broken image; from a loader process with a traceback
        raise UsageError(str(error).strip().splitlines()[-1]) from None
    finally:
        curves = reports.close()
    if stop.number:
        if backend.is_main:
            _say_stopped(args, stop, saved)
        backend.barrier()  # torchrun ends all when one has ended
        raise StoppedBySignal(stop.number)
    if backend.is_main:
        _say_summary(args, plan, reports, last_step, saved, curves)


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


def _best_so_far(ckpt_dir: Path, resume: SavedRun | None) -> tuple[float, int]:
    done = evaluations(ckpt_dir, resume.position.step) if resume else {}
    return max(((record["val_top1"], at) for at, record in done.items()), default=(-1.0, 0))


def _start_position(
    resume: SavedRun | None, args: argparse.Namespace, steps_per_epoch: int
) -> Position:
    """Where to begin. A changed batch size keeps the place in the data and the schedule."""
    if resume is None:
        return Position()
    position = resume.position
    if resume.arguments.get("batch_size") == args.batch_size:
        return position
    batches = position.images_in_epoch // args.batch_size
    step = position.epoch * steps_per_epoch + batches
    return Position(step, position.epoch, batches * args.batch_size)


def _say_plan(
    reports: Reports, args: argparse.Namespace, backend: Backend, plan: Plan, start: Position,
    last_step: int,
) -> None:  # fmt: skip
    size = backend.state_bytes()
    reports.say(backend.describe())
    reports.say(
        f"state a device: {size['parameters'] / 2**20:,.2f} MiB of parameters, "
        f"{size['optimizer'] / 2**20:,.2f} MiB of optimizer state"
    )
    if plan.resume:
        where = f"step {start.step}, epoch {start.epoch + 1}"
        if start.step != plan.resume.position.step:
            where += f" (step {plan.resume.position.step} at its batch size)"
        reports.say(f"resuming {plan.resume.path} at {where}")
    reports.say(f"training to step {last_step:,}, global batch {args.batch_size}")
    if not backend.is_main:
        return
    content = {
        "arguments": vars(args),
        "model": asdict(plan.config),
        "backend": backend.describe(),
        "devices": backend.device_count,
        "state_bytes_per_device": size,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    (Path(args.ckpt_dir) / RUN_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _say_profile(reports: Reports, args: argparse.Namespace, profiler: StepProfiler) -> None:
    first, last = args.profile
    if profiler.finished:
        reports.say(f"profile of steps {first} to {last}: {Path(args.ckpt_dir) / PROFILE_DIR}")
    else:
        reports.say(f"no profile: this run had none of the steps {first} to {last}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _say_stopped(args: argparse.Namespace, stop: StopRequest, saved: Path | None) -> None:
    assert saved is not None  # a stop saves
    again = "the same command"
    if args.resume != "auto" or args.resume_epoch:
        again += " with --resume auto"
    print(
        f"training stopped by {signal.Signals(stop.number).name}: step {saved.name[5:]}, "
        f"checkpoint {saved}; {again} resumes there",
        flush=True,
    )


def _say_summary(
    args: argparse.Namespace, plan: Plan, reports: Reports, last_step: int,
    saved: Path | None, curves: Path | None,
) -> None:  # fmt: skip
    newest = saved or (plan.resume.path if plan.resume else None)
    top1 = "" if reports.last_top1 is None else f"val top-1 {reports.last_top1:.2f} %, "
    print(
        f"training completed: step {last_step}, {top1}checkpoint {newest}, "
        f"log {Path(args.ckpt_dir) / METRICS_FILE}, plot {curves}",
        flush=True,
    )
