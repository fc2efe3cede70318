"""The self-check: runs a small model with the user's flags and devices, and checks the results.

``prepare_self_check`` makes the small run (``small_run.py``). Every process then trains it on the
devices and prints a table: it is compared with plain PyTorch (``reference.py``), the processes
exchange values, and a checkpoint is written and read back.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from data.batch import Batch, Fields
from data.files import without_secrets
from data.source import DataSource
from tools.self_check import reference
from tools.self_check.reference import MOMENTS, TEACHER, Settings, Tensors, Tolerances
from tools.self_check.small_run import UPDATES, batches, fields_of, first_weights, shrink
from training.backend import Backend, State
from training.checkpoints.format import damage, load_into, reason_of, tree
from training.checkpoints.inventory import folder_of, is_restart
from training.checkpoints.saver import CheckpointSaver
from training.checkpoints.state import load_state
from training.data import open_images
from training.errors import RunFailed, SelfCheckFailed, UsageError
from training.files import FolderLock, remove_tree
from training.objectives.registry import open_objective
from training.optimizers import all_by_adamw, updates_of
from training.processes import exchange
from training.processes.stopping import Watchdog
from training.resolve import Run
from training.schedule import Position
from training.start import enter_folder
from training.step import put_micro_batches, shard, train_step

_SILENT_S = 600.0
"""The longest that a line of the table may take, without ``--step_timeout_s``."""
_TRIES = 24
"""In fp16: a loss scale that is too large is halved, and its update not made."""
_ROW = 0.01
"""The largest error of the sum of rows, in typical weights of a row."""
EQUAL = 1e-5
"""For what should be the same number, but for the order of sums on a GPU."""


@dataclass
class CheckTable:
    """The printed lines; ``silent`` in all processes but the first, which alone knows all."""

    silent: bool
    failed: int = 0
    passed: int = 0

    def say(self, text: str) -> None:
        if not self.silent:
            print(without_secrets(text), flush=True)

    def line(self, good: bool | None, name: str, text: str) -> None:
        """Print a line; ``good`` is None if the check was not possible."""
        verdict = "skip" if good is None else "pass" if good else "FAIL"
        self.failed += verdict == "FAIL"
        self.passed += verdict == "pass"
        self.say(f"{verdict}  {name:20} {text}")

    def within(self, name: str, error: float, allowed: float, text: str) -> None:
        """Print a line for a figure that should be 0; ``text`` says what it is of."""
        good = error <= allowed  # False for NaN
        relation = "at most" if good else "more than"
        self.line(good, name, f"{error:.1e} ({relation} {allowed:.1e}) {text}")


def prepare_self_check(run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the small run instead of ``run``, and the body of every process.

    Checks what needs no device, as for training. Raises UsageError.
    """
    data = open_images(run)
    return shrink(run), functools.partial(_self_check, run, data)


def _self_check(asked: Run, data: DataSource, run: Run, backend: Backend) -> None:
    """Check ``run``, the small one, on the devices; ``asked`` is the user's."""
    exchange.check_alike(asked, data)
    table, began = CheckTable(silent=not backend.is_main), time.perf_counter()
    watchdog = Watchdog(asked.config.log.step_timeout_s or _SILENT_S)
    watchdog.alive()
    try:
        _check_devices(asked, run, backend, table, watchdog)
    except UsageError:
        raise
    except Exception as error:
        table.line(False, "crashed", f"in the next check: {reason_of(error)}")
        raise
    finally:
        watchdog.stop()
    checks = f"{table.passed + table.failed} checks, {time.perf_counter() - began:.0f} s"
    if table.failed:
        table.say(f"self check FAILED: {table.failed} of {checks}")
    else:
        table.say(f"self check passed: {checks}")
    if any(exchange.all_gather_object(table.failed)):
        raise SelfCheckFailed


def _check_devices(
    asked: Run, run: Run, backend: Backend, table: CheckTable, watchdog: Watchdog
) -> None:
    # The first process computes the reference, and how all of them update.
    allowed = None
    numbers: list[float] = []
    if backend.is_main:
        settings, plain, rounded = reference.compute(run, backend.batch_shards)
        allowed = Tolerances(backend.unit_roundoff(), plain, rounded)
        numbers = [settings.lr, settings.eps, settings.max_norm]
    settings = Settings(*exchange.broadcast_object(numbers))

    # The small model on the devices.
    optimizer = run.config.optimizer
    assert optimizer.betas is not None  # resolved
    updates = all_by_adamw(run.model, optimizer.weight_decay)
    weights = functools.partial(first_weights, run.config.seed)
    sharded = shard(run, backend, weights, updates)
    backend.build_optimizer(updates, betas=optimizer.betas, eps=settings.eps)
    sharded.train()

    table.say(backend.describe())
    real, sizes, config = asked.model, run.model.sizes, asked.config
    passes = run.config.data.grad_accum_steps
    drops = any(value for name, value in real.settings.items() if name.endswith("_rate"))
    other_updates = updates_of(config.optimizer, real) != all_by_adamw(
        real, config.optimizer.weight_decay
    )
    table.say(
        f"model: {asked.model_line}, shrunk to "
        f"{run.model.parameter_count:,}: {sizes.depth} blocks, {sizes.embed_dim} wide, "
        f"{sizes.num_heads} head(s), {sizes.num_tokens} tokens; "
        f"{run.config.data.batch_size} images per step"
        + (f" in {passes} passes" if passes > 1 else "")
        + ("; dropout off, as its masks would differ" if drops else "")
        + ("; AdamW with the same settings for all parameters" if other_updates else "")
    )
    table.say(
        "numbers: relative difference from plain PyTorch on the CPU, with the tolerance in brackets"
    )

    # A collective each way between the processes: sum, largest, and everyone's own value.
    count, rank = exchange.count(), exchange.rank()
    total = torch.tensor([float(rank + 1), 1.0])
    if dist.is_initialized():
        dist.all_reduce(total)
    largest = backend.all_reduce_max(rank)()
    ranks, hosts = zip(*exchange.all_gather_object([rank, socket.gethostname()]), strict=True)
    good = total.tolist() == [count * (count + 1) / 2, count] and largest == count - 1
    good &= ranks == tuple(range(count))
    text = f"sum, maximum and gather over {count} process(es) on {len(set(hosts))} host(s)"
    table.line(all(exchange.all_gather_object(good)), "hosts", text)
    watchdog.alive()

    # Updates, their comparison with the reference, and checkpoints.
    devices = Devices(run, backend, sharded, settings)
    check_rows(devices, table)
    watchdog.alive()
    with own_folder(run, backend, table) as folder:
        checkpoints = Checkpoints(folder, run, backend, table)
        devices.update(1)
        watchdog.alive()
        checkpoints.save(1)
        for number in range(2, UPDATES + 1):
            devices.update(number)
        checkpoints.save(UPDATES)
        watchdog.alive()
        check_numbers(devices, checkpoints, allowed, table)
        if checkpoints.folder is not None:
            check_resuming(devices, checkpoints, checkpoints.folder, table)


# -- Updates on the devices, and their comparison --------------------------------------------------


@dataclass
class Devices:
    """The small run on the backend."""

    run: Run
    backend: Backend
    model: nn.Module
    settings: Settings
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.objective = open_objective(self.run, self.backend)
        # One more than updates: to continue from a checkpoint.
        self.batches = [
            put_micro_batches(
                self.backend, batch, fields_of(self.run), self.run.config.data.grad_accum_steps
            )
            for batch in batches(self.run, self.backend, positions=self.objective.takes_positions)
        ]

    def update(self, number: int) -> tuple[float, float]:
        """Make update ``number``, from 1 on; return and keep its loss and gradient norm."""
        batch, settings = self.batches[number - 1], self.settings
        tries = _TRIES if self.run.config.sharding.precision == "fp16" else 1
        for _ in range(tries):
            step = train_step(
                self.model,
                self.objective,
                self.backend,
                number - 1,
                batch,
                rates=settings.rates(self.run),
                max_norm=settings.max_norm,
            )
            values = {"loss": step["loss"], "norm": step["grad_norm"]}
            numbers = self.backend.read(values).result()
            if math.isfinite(numbers["norm"][0]):
                break
        self.losses.append(numbers["loss"][0])
        self.norms.append(numbers["norm"][0])
        return self.losses[-1], self.norms[-1]


def check_rows(devices: Devices, table: CheckTable) -> None:
    """Check that the devices have each sample of the batch once, with its label.

    Each sample's label times a weighted sum of its other values, summed by ``Backend.sum`` and
    ``mean``.
    """
    backend, batch_size = devices.backend, devices.run.config.data.batch_size
    micro_batches, fields = devices.batches[0], fields_of(devices.run)
    here, times = None, 1  # whole samples, or a global tensor of them
    for name, each in fields.items():
        if each.rows is not None and micro_batches[0][name].shape[1:] != each.shape:
            # Parts of images: ``Backend.sum`` expects the same sum of all that share one.
            here, times = backend.image_rows, devices.run.mesh.domain
    sums = [_weights(batch, fields, here).sum() * times for batch in micro_batches]
    total = sum(sums[1:], start=sums[0])
    count = sum(len(next(iter(batch.values()))) for batch in micro_batches)
    values = {"sum": backend.sum(total), "mean": backend.mean(total / count)}
    backend.end_step()
    totals = backend.read(values).result()
    positions = devices.objective.takes_positions
    rows = _weights(next(batches(devices.run, None, positions=positions)), fields, None)
    expected = rows.sum().item()
    for name, value in (("sum", totals["sum"][0]), ("mean", totals["mean"][0] * batch_size)):
        off = abs(value - expected) / rows.abs().mean().item()
        off = max(map(float, exchange.all_gather_object(repr(off))))
        what = f"{name} of a batch of {batch_size} across devices, in units of one row"
        table.within(f"rows, {name}", off, _ROW, what)


def _weights(batch: Batch, fields: Fields, rows: range | None) -> torch.Tensor:
    """Return each sample's weight, or the part of it that these ``rows`` of its images have."""
    weights, numbers = torch.zeros(()), torch.ones(())
    for name, values in batch.items():
        if values.dtype == torch.int64:  # labels or positions; a sequence has several labels
            numbers = numbers.to(values.device) + values.view(len(values), -1).sum(1)
            continue
        ramp = torch.linspace(-1.0, 1.0, math.prod(fields[name].shape), device=values.device)
        ramp, dimension = ramp.view(fields[name].shape), fields[name].rows
        if rows and dimension is not None:
            ramp = ramp.narrow(dimension, rows.start, len(rows))
        of_samples = (values.float() * ramp).reshape(len(values), -1).sum(1)
        weights = weights.to(values.device) + of_samples
    return weights * numbers


def check_numbers(
    devices: Devices, checkpoints: Checkpoints, allowed: Tolerances | None, table: CheckTable
) -> None:
    """Compare losses and norms with the reference, and those of all processes with each other.

    Then, in the first process, gradients, moments and weights, tensor by tensor.
    """
    if allowed:
        off = reference.apart(devices.losses, allowed.plain.losses)
        table.within("loss", off, allowed.loss(), f"{UPDATES} updates")
        off = reference.apart(devices.norms, allowed.plain.norms)
        table.within("gradient norm", off, allowed.norm(), f"{UPDATES} updates, before clipping")
    everyone = exchange.all_gather_object(
        [repr(number) for number in devices.losses + devices.norms]
    )
    numbers = [[float(text) for text in of_process] for of_process in everyone]
    off = max(reference.apart(of_process, numbers[0]) for of_process in numbers)
    what = f"difference between the losses and norms of {len(numbers)} process(es)"
    table.within("processes agree", off, EQUAL, what)
    if checkpoints.folder is None:
        table.line(
            None,
            "gradients",
            "not checked, nor moments and weights: they are read from a checkpoint",
        )
        return
    if not allowed:
        return
    run, expected, found = devices.run, allowed.plain.states, checkpoints.states
    lines = [
        ("gradients", 1, MOMENTS[:1], "update 1, clipped"),
        ("moments", UPDATES, MOMENTS, f"update {UPDATES}"),
        ("weights", UPDATES, ("weights",), f"update {UPDATES}"),
    ]
    if run.config.objective.has_teacher:
        lines.append(("teacher", UPDATES, (TEACHER,), f"update {UPDATES}"))
    for name, update, kinds, what in lines:
        figures = []
        for kind in kinds:
            start = expected[0].get(kind) if run.backend_config.keeps_fp32_weights else None
            far = reference.distance(found[update][kind], expected[update][kind], start)
            limit = allowed.state(update, kind, start)
            figures.append((far.whole, limit.whole, "all tensors together"))
            figures.append((far.worst, limit.worst, f"worst tensor: {far.name}"))
        # Print the one nearest to its limit; what is not finite is above any limit.
        off, most, which = max(
            figures, key=lambda f: f[0] / f[1] if math.isfinite(f[0]) else math.inf
        )
        table.within(name, off, most, f"{what}; {which}")


def check_resuming(
    devices: Devices, checkpoints: Checkpoints, folder: Path, table: CheckTable
) -> None:
    """Check that a checkpoint, loaded over the state of a later update, restores what was saved."""
    backend, path = devices.backend, folder_of(folder, UPDATES)
    if backend.is_main:
        sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
        text = f"{len(sizes)} files, {sum(sizes) / 1e6:,.1f} MB, checksums match the manifest"
        table.line(True, "checkpoint written", text)

    first = devices.update(UPDATES + 1)
    load_state(backend, path)
    checkpoints.save(UPDATES + 1)
    if checkpoints.folder is None:
        return
    if backend.is_main:  # to the last bit
        one, other = checkpoints.states[UPDATES], checkpoints.states[UPDATES + 1]
        tensors = [(kind, name) for kind, of in one.items() for name in of]
        unlike = [(k, n) for k, n in tensors if not torch.equal(one[k][n], other[k][n])]
        text = f"{len(tensors)} tensors bit-identical after loading them over a later state"
        if unlike:
            kind, name = unlike[0]
            text = (
                f"{len(unlike)} of {len(tensors)} tensors differ after loading and saving again; "
                f"first: {kind} of {name}"
            )
        table.line(not unlike, "checkpoint read", text)

    again = devices.update(UPDATES + 1)
    off = reference.apart(list(again), list(first))
    everyone = exchange.all_gather_object(repr(off))
    what = "difference of an update's loss and norm before and after loading"
    allowed = max(EQUAL, backend.unit_roundoff())  # GPUs may sum in another order
    table.within("resumed", max(map(float, everyone)), allowed, what)


# -- Checkpoints of the small run, in a folder of their own inside ``--ckpt_dir`` ------------------


@contextlib.contextmanager
def own_folder(run: Run, backend: Backend, table: CheckTable) -> Iterator[Path | None]:
    """Make a folder in ``--ckpt_dir``, which is locked meanwhile, and remove it afterwards.

    Yields None if no run could write there.
    """
    ckpt_dir = run.ckpt_dir
    shared = run.config.checkpoints.allow_other_owners
    lock = FolderLock(ckpt_dir, inside=run.log_dir, shared=shared)
    folder = ckpt_dir / exchange.broadcast_object(f"self_check_{secrets.token_hex(4)}")
    problem = ""
    try:
        try:
            with exchange.raise_on_all_ranks():
                restart = backend.is_main and is_restart(ckpt_dir)
            enter_folder(ckpt_dir, lock, is_restart=restart, is_main=backend.is_main)
            with exchange.raise_on_all_ranks():
                if backend.is_main:
                    try:
                        folder.mkdir()
                    except OSError as error:
                        raise UsageError(
                            f"cannot write to --ckpt_dir {ckpt_dir}: {error.strerror}"
                        ) from None
        except (RunFailed, UsageError) as error:
            problem = str(error)
        text = problem or f"{ckpt_dir} is writable and not in use by another job"
        table.line(not problem, "checkpoint folder", text)
        yield None if problem else folder
    finally:
        if backend.is_main:
            with contextlib.suppress(OSError):
                remove_tree(folder)
        lock.release()


@dataclass
class Checkpoints:
    """Writes checkpoints as training does, and reads them whole, in the first process."""

    folder: Path | None
    """None where none can be written."""
    run: Run
    backend: Backend
    table: CheckTable
    states: dict[int, dict[str, Tensors]] = field(default_factory=dict)
    """What was read by number; in the first process."""

    def save(self, number: int) -> None:
        """Write a checkpoint and read it; after a failure, which is printed, do nothing."""
        if self.folder is None:
            return
        saver = CheckpointSaver(
            self.folder, self.backend, lambda text: None, self.run.values, None, 0, 1
        )
        try:
            with saver:
                saver.save(Position(number), must=True)
            with exchange.raise_on_all_ranks():
                if self.backend.is_main:
                    self.states[number] = self._read(folder_of(self.folder, number))
        except (RunFailed, UsageError) as error:
            self.folder = None
            self.table.line(False, "checkpoint written", str(error))

    def _read(self, path: Path) -> dict[str, Tensors]:
        """Return weights and moments under their plain names. Raises UsageError."""
        # NaN: what the checkpoint does not hold is seen to be missing.
        model = self.run.model
        averages = [TEACHER] if self.run.config.objective.has_teacher else []
        tensors = {
            kind: {
                name: torch.full(parameter.shape, torch.nan)
                for name, parameter in model.meta.named_parameters()
                if name not in model.frozen
            }
            for kind in ("weights", *MOMENTS, *averages)
        }
        weights = tensors["weights"]
        state = {name: {kind: tensors[kind][name] for kind in MOMENTS} for name in weights}
        try:
            if problem := damage(path):
                raise UsageError(f"the checkpoint just written is damaged: {problem}")
            load_into(tree(State(weights, state, {}, tensors.get(TEACHER)), {}), path)
        except (OSError, ValueError, RuntimeError, dcp.CheckpointException) as error:
            raise UsageError(f"{path} cannot be read: {reason_of(error)}") from None
        return tensors
