"""The self-check from its arguments to its verdict; the body of every process."""

from __future__ import annotations

import functools
from collections.abc import Callable

from data.source import DataSource, open_data
from models.spec import ModelSpec
from training.backend import Backend
from training.checkpoints.reader import reason_of
from training.errors import SelfCheckFailed, UsageError
from training.hosts import processes
from training.hosts.fingerprint import check_alike
from training.hosts.watchdog import Watchdog
from training.options.resolve import Run
from training.self_check.compare import Tolerances, apart
from training.self_check.content import UPDATES, FirstWeights
from training.self_check.folder import Checkpoints, check_disk, own_folder
from training.self_check.machine import check_decoding, check_hosts, check_memory
from training.self_check.reference import Outcome, Settings, compute
from training.self_check.shrink import shrink
from training.self_check.table import Table
from training.self_check.updates import EQUAL, Devices, check_rows, check_scalars, check_states
from training.trained_weights.weights_preprocessing import with_preprocessing
from training.updates.parameter_groups import all_by_adamw, updates_of
from training.validation import bad_data_is_the_users, wanted_images

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
    if any(processes.gather(table.failed)):
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
    everyone = processes.gather(repr(off))
    what = "apart, loss and norm of an update before and after the loading"
    allowed = max(EQUAL, devices.backend.rounding())  # GPUs may sum in another order
    table.within("resumed", max(map(float, everyone)), allowed, what)


def _reference(run: Run, backend: Backend) -> tuple[Settings, Outcome | None, Tolerances | None]:
    """Return what to compare with, in the first process, and how all of them update."""
    plain = allowed = None
    told: list[float] = []
    if backend.is_main:
        settings, plain, rounded = compute(run)
        allowed = Tolerances(backend.rounding(), plain, rounded)
        told = [settings.lr, settings.eps, settings.max_norm]
    return Settings(*processes.gather(told)[0]), plain, allowed


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
