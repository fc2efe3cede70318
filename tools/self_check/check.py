"""The self-check from its arguments to its verdict; the body of every process."""

from __future__ import annotations

import functools
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from data.files import DataFolderError
from data.loader import Batch, Share
from data.source import DataSource, open_data
from models.spec import ModelSpec
from tools.self_check.folder import Checkpoints, check_disk, own_folder
from tools.self_check.reference import (
    MOMENTS,
    Outcome,
    Settings,
    Table,
    Tensors,
    Tolerances,
    apart,
    compute,
    distance,
    size_of,
)
from tools.self_check.small_run import UPDATES, FirstWeights, batches, shrink
from training.backend import Backend
from training.checkpoints.format import reason_of
from training.errors import SelfCheckFailed, UsageError
from training.losses import Objective
from training.optimizers import all_by_adamw, updates_of
from training.processes import exchange
from training.processes.exchange import check_alike
from training.processes.stopping import Watchdog
from training.resolve import Run
from training.step import put_micro_batches, train_step
from training.validation import bad_data_is_the_users, wanted_images
from training.weights import with_preprocessing

# ------------------------------------------------------------------------------------------------
# What the machines can do: talking to each other, decoding images, telling of their memory.


_MFU = 0.5
"""Of a step that is as fast as steps get."""
_SECONDS = 6.0
_SHARE = 16
"""Images a batch and process: first batches come soon."""


def check_hosts(backend: Backend, table: Table) -> None:
    """Try a collective each way between the processes: sum, largest, and everyone's own value."""
    count, rank = exchange.count(), exchange.rank()
    total = torch.tensor([float(rank + 1), 1.0])
    if dist.is_initialized():
        dist.all_reduce(total)
    largest = backend.largest_of_all(rank)()
    ranks, hosts = zip(*exchange.gather([rank, socket.gethostname()]), strict=True)
    good = total.tolist() == [count * (count + 1) / 2, count] and largest == count - 1
    good &= ranks == tuple(range(count))
    text = f"sum, largest and gather over {count} process(es) on {len(set(hosts))} host(s)"
    table.line(all(exchange.gather(good)), "hosts", text)


def check_memory(asked: Run, run: Run, backend: Backend, table: Table) -> None:
    """Compare a device's memory with the least that the run of ``asked`` takes of it.

    ``run`` is the small one: of its state a device holds the same share.
    """
    of = [each.model.parameter_count for each in (asked, run)]
    state = sum(backend.state_bytes().values()) * of[0] / of[1]
    text = f"weights and AdamW of the whole model: about {size_of(state)} a device"
    told = backend.memory()
    told = exchange.gather(told)[0]
    if not told.get("limit"):
        table.line(None, "memory", f"{text}; it does not tell what it has")
        return
    text += "".join(f", {name} {size_of(value)}" for name, value in told.items())
    table.line(state < told["limit"], "memory", text)


def check_decoding(run: Run, data: DataSource, backend: Backend, table: Table) -> None:
    """Compare the images a second that the loader gives with what the devices could take."""
    if not data.decodes:
        table.line(None, "data", "not read: --fake_data")
        return
    found = _measure(data)
    all_found = exchange.gather(str(found) if isinstance(found, DataFolderError) else found)
    problem = next((each for each in all_found if isinstance(each, str)), None)
    if problem:
        table.line(False, "data", problem)
        return
    speed = sum(each for each, _ in all_found)
    workers = all_found[0][1]
    text = f"{speed:,.0f} images/s decoded by {len(all_found)} x {workers} workers"
    peak = backend.peak_flops()
    if peak is None:
        table.line(None, "data", f"{text}; the peak of these devices is not known")
        return
    needed = _MFU * peak * backend.device_count / run.model.train_flops_per_image
    text += f", the devices take {needed:,.0f} at {_MFU:.0%} of their peak"
    table.line(speed >= needed, "data", text)


def _measure(data: DataSource) -> tuple[float, int] | DataFolderError:
    """Return the images a second of this process, all of them reading at once, from the first batch
    on, and its loader processes."""
    share = min(_SHARE, data.train_length // exchange.count())
    host = socket.gethostname()
    of_host = exchange.gather(host).count(host)
    mine = Share(exchange.rank(), exchange.count(), of_host=of_host)
    loader = data.train_loader(share * exchange.count(), mine)
    images, epoch = 0, 0
    began = end = 0.0
    try:
        # Each worker has batches of its own under way: what is ready at the start is not counted.
        left = 2 * max(1, loader.workers)
        while not began or time.perf_counter() < began + _SECONDS:
            for loaded, _ in loader.epoch(epoch):
                end = time.perf_counter()
                if began:
                    images += len(loaded)
                    if end > began + _SECONDS:
                        break
                left -= 1
                if left == 0:
                    began = end
            epoch += 1
    except DataFolderError as error:
        return error
    return images / (end - began), loader.workers


# ------------------------------------------------------------------------------------------------
# Updates on the devices, and what is compared of them.


_TRIES = 24
"""In fp16: a loss scale that is too large is halved, and its update not made."""
_ROW = 0.01
"""Of the typical weight of a row in their sum."""
EQUAL = 1e-5
"""What should be the same number, but for the order of sums on a GPU."""


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
        self.objective = Objective(self.run, self.backend)
        # The one after the last update is for going on from a checkpoint.
        self.batches = [
            put_micro_batches(self.backend, batch, self.run.config.data.grad_accum_steps)
            for batch in batches(self.run, self.backend)
        ]

    def update(self, number: int) -> tuple[float, float]:
        """Make the update of this number, from 1 on; returns its loss and gradient norm."""
        tries = _TRIES if self.run.config.sharding.precision == "fp16" else 1
        for _ in range(tries):
            batch = self.batches[number - 1]
            loss, norm, _ = train_step(
                self.model,
                self.objective,
                self.backend,
                number - 1,
                batch,
                lr=self.settings.lr,
                max_norm=self.settings.max_norm,
            )
            found = self.backend.read({"loss": loss, "norm": norm}).result()
            if math.isfinite(found["norm"][0]):
                break
        return found["loss"][0], found["norm"][0]

    def updates(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            loss, norm = self.update(number)
            self.losses.append(loss)
            self.norms.append(norm)


# -- rows -----------------------------------------------------------------------------


def check_rows(devices: Devices, table: Table) -> None:
    """Check that the devices have each image of the batch once, with its label.

    Each row's label times a weighted sum of its pixels, summed by ``Backend.sum`` and ``mean``.
    """
    backend, batch_size = devices.backend, devices.run.config.data.batch_size
    micro_batches = devices.batches[0]
    total = _sum_of_rows(micro_batches, devices)
    count = sum(len(labels) for _, labels in micro_batches)
    values = {"sum": backend.sum(total), "mean": backend.mean(total / count)}
    backend.end_step()
    found = backend.read(values).result()
    shape = devices.run.model.sizes.input_shape
    rows = _weights_of_rows(next(iter(batches(devices.run))), shape, range(shape[1]))
    expected = rows.sum().item()
    for name, value in (("sum", found["sum"][0]), ("mean", found["mean"][0] * batch_size)):
        off = abs(value - expected) / rows.abs().mean().item()
        off = max(map(float, exchange.gather(repr(off))))
        what = f"{name} over the devices of a batch of {batch_size}, a row as the unit"
        table.within(f"rows, {name}", off, _ROW, what)


def _sum_of_rows(micro_batches: Sequence[Batch], devices: Devices) -> torch.Tensor:
    shape, times = devices.run.model.sizes.input_shape, 1
    rows = devices.backend.image_rows
    if micro_batches[0][0].shape[2] == shape[1]:  # whole images, or a global tensor of them
        rows = range(shape[1])
    else:  # parts, whose sums add up to those that ``Backend.sum`` takes to be the same
        times = devices.run.mesh.domain
    sums = [_weights_of_rows(each, shape, rows).sum() * times for each in micro_batches]
    return sum(sums[1:], start=sums[0])


def _weights_of_rows(batch: Batch, shape: Sequence[int], rows: range) -> torch.Tensor:
    """Return a weight of each image, which parts of it, these ``rows`` of pixels, add up to."""
    images, labels = batch
    ramp = torch.linspace(-1.0, 1.0, math.prod(shape), device=images.device).view(*shape)
    part = ramp[:, rows.start : rows.stop]
    return (images.float() * part).flatten(1).sum(1) * (labels + 1)


# -- numbers --------------------------------------------------------------------------


def check_scalars(
    devices: Devices, plain: Outcome | None, allowed: Tolerances | None, table: Table
) -> None:
    """Losses and norms against the reference, and those of all processes against each other."""
    if plain and allowed:
        off = apart(devices.losses, plain.losses)
        table.within("loss", off, allowed.loss(), f"{UPDATES} updates")
        off = apart(devices.norms, plain.norms)
        table.within("gradient norm", off, allowed.norm(), f"{UPDATES} updates, before clipping")
    everyone = exchange.gather([repr(each) for each in devices.losses + devices.norms])
    numbers = [[float(each) for each in of_one] for of_one in everyone]
    off = max(apart(of_one, numbers[0]) for of_one in numbers)
    what = f"apart, losses and norms of {len(numbers)} process(es)"
    table.within("processes agree", off, EQUAL, what)


def check_states(
    found: dict[int, dict[str, Tensors]],
    plain: Outcome,
    allowed: Tolerances,
    run: Run,
    table: Table,
) -> None:
    """Gradients, moments and weights, tensor by tensor, in the first process."""
    moved_from = plain.states[0]["weights"] if run.own.keeps_fp32_weights else None

    def compare(name: str, update: int, kinds: Sequence[str], what: str) -> None:
        figures = []
        for kind in kinds:
            start = moved_from if kind == "weights" else None
            far = distance(found[update][kind], plain.states[update][kind], start)
            limit = allowed.state(update, kind, start)
            figures.append((far.whole, limit.whole, "all together"))
            figures.append((far.worst, limit.worst, f"the worst: {far.name}"))
        # Of these the one to be told; what is not a number is above any limit.
        off, limit_, which = max(figures, key=lambda each: _share(each[0], each[1]))
        table.within(name, off, limit_, f"{what}; {which}")

    compare("gradients", 1, MOMENTS[:1], "update 1, clipped")
    compare("moments", UPDATES, MOMENTS, f"update {UPDATES}")
    compare("weights", UPDATES, ["weights"], f"update {UPDATES}")


def _share(off: float, allowed: float) -> float:
    return off / allowed if math.isfinite(off) else math.inf


# ------------------------------------------------------------------------------------------------


_SILENT_S = 600.0
"""Without ``--step_timeout_s``, what a line of the table may take before it counts as a hang."""


def prepare_self_check(run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the small run in the place of ``run``, and the body of every process.

    Checks what needs no device, as for training. Raises UsageError.
    """
    run = with_preprocessing(run, None)
    with bad_data_is_the_users():
        data = open_data(wanted_images(run))
    return shrink(run), functools.partial(_self_check, run, data)


def _self_check(asked: Run, data: DataSource, run: Run, backend: Backend) -> None:
    """Check ``run``, the small one, on the devices, and what else ``asked``, the user's, needs."""
    check_alike(asked, data)
    table = Table(silent=not backend.is_main)
    watchdog = Watchdog(asked.config.log.step_timeout_s or _SILENT_S)
    watchdog.alive()
    try:
        _check_devices(asked, run, backend, table, watchdog)
        check_disk(asked, table)
        watchdog.alive()
        check_decoding(asked, data, backend, table)
        check_memory(asked, run, backend, table)
    except UsageError:
        raise
    except Exception as error:
        table.line(False, "crashed", f"in what would come here: {reason_of(error)}")
        raise
    finally:
        watchdog.rest()
    table.end()
    if any(exchange.gather(table.failed)):
        raise SelfCheckFailed


def _check_devices(
    asked: Run, run: Run, backend: Backend, table: Table, watchdog: Watchdog
) -> None:
    settings, plain, allowed = _reference(run, backend)
    model = run.model.build()
    sharded = backend.shard(model, list(run.model.units(model)), FirstWeights(run.config.seed))
    optimizer = run.config.optimizer
    assert optimizer.betas is not None  # resolved
    updates = all_by_adamw(run.model, optimizer.weight_decay)
    backend.build_optimizer(updates, betas=optimizer.betas, eps=settings.eps)
    sharded.train()
    table.say(backend.describe())
    table.say(_describe(asked, run))
    table.say(
        "figures: relative distance from plain PyTorch on the CPU, in brackets what is allowed"
    )
    check_hosts(backend, table)
    watchdog.alive()
    devices = Devices(run, backend, sharded, settings)
    check_rows(devices, table)
    watchdog.alive()
    with own_folder(run, backend, table) as folder:
        checkpoints = Checkpoints(folder, run, backend, table)
        devices.updates(1, 1)
        watchdog.alive()
        checkpoints.save(1)
        devices.updates(2, UPDATES)
        checkpoints.save(UPDATES)
        watchdog.alive()
        check_scalars(devices, plain, allowed, table)
        if plain and allowed and checkpoints.usable:
            check_states(checkpoints.states, plain, allowed, run, table)
        _check_going_on(devices, checkpoints, table)
    backend.memory()  # some answer a question late: this one is for check_memory


def _check_going_on(devices: Devices, checkpoints: Checkpoints, table: Table) -> None:
    """Check that a checkpoint, loaded over the state of another update, is what was saved."""
    if not checkpoints.usable:
        table.line(None, "gradients", "nor moments and weights: they are read from a checkpoint")
        return
    checkpoints.check_written(UPDATES)
    first = devices.update(UPDATES + 1)
    checkpoints.load(UPDATES)
    checkpoints.save(UPDATES + 1)
    if not checkpoints.usable:
        return
    checkpoints.check_equal(UPDATES, UPDATES + 1)
    again = devices.update(UPDATES + 1)
    off = apart(list(again), list(first))
    everyone = exchange.gather(repr(off))
    what = "apart, loss and norm of an update before and after the loading"
    allowed = max(EQUAL, devices.backend.unit_roundoff())  # GPUs may sum in another order
    table.within("resumed", max(map(float, everyone)), allowed, what)


def _reference(run: Run, backend: Backend) -> tuple[Settings, Outcome | None, Tolerances | None]:
    """Return what to compare with, in the first process, and how all of them update."""
    plain = allowed = None
    told: list[float] = []
    if backend.is_main:
        settings, plain, rounded = compute(run)
        allowed = Tolerances(backend.unit_roundoff(), plain, rounded)
        told = [settings.lr, settings.eps, settings.max_norm]
    return Settings(*exchange.gather(told)[0]), plain, allowed


def _describe(asked: Run, run: Run) -> str:
    real, small, data = asked.model, run.model, run.config.data
    sizes = small.sizes
    return (
        f"model: {asked.config.model.model}, {real.parameter_count:,} parameters, shrunk to "
        f"{small.parameter_count:,}: {sizes.depth} blocks, {sizes.embed_dim} wide, "
        f"{sizes.num_heads} head(s), {sizes.num_tokens} tokens; {data.batch_size} images a step"
        + (f" in {data.grad_accum_steps} passes" if data.grad_accum_steps > 1 else "")
        + ("; dropout off, its masks would differ" if _drops(real) else "")
        + ("; updated by AdamW, all parameters alike" if _groups(asked) else "")
    )


def _groups(run: Run) -> bool:
    """Tell whether training would update otherwise than the check, whose gradients show more."""
    weight_decay = run.config.optimizer.weight_decay
    return updates_of(run.config.optimizer, run.model) != all_by_adamw(run.model, weight_decay)


def _drops(model: ModelSpec) -> bool:
    return any(value for name, value in model.settings.items() if name.endswith("_rate"))
