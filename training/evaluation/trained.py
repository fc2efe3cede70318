"""Trained weights that are used, not trained: --predict, --eval_only, --features."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from torch import nn

from data.source import DataSource
from models.initialize import allocate_uninitialized
from training.backend import Backend
from training.checkpoints import format as checkpoint
from training.checkpoints.compatible import check_same_training
from training.checkpoints.state import load_state
from training.config import RunConfig
from training.errors import UsageError
from training.files import is_on_hub
from training.flags import with_values
from training.logs.bad_images import BadImages
from training.processes.exchange import check_alike
from training.resolve import Run, resolve_model, take_over, trained_model
from training.weights.adapt import Adapter, adapt
from training.weights.describe import settings_of, take_over_described
from training.weights.find import commits_of_data, find, find_resumed, pretrained
from training.weights.source import Source

_OF_TRAINING = ("gram_weights", "gram_weight", "gram_update_steps", "gram_crop_factor")
"""Settings of a checkpoint that are not taken over. If flags set them, they are refused later."""


def find_trained(config: RunConfig) -> tuple[RunConfig, Source]:
    """Find the weights that the flags name; also return the configuration with their model and
    preprocessing.

    The checkpoint's model replaces flags that are not set. Weights of ``--init_from``, whose head
    may be missing, use the model of the flags. Raises UsageError for a checkpoint that cannot be
    read or that contradicts the model flags.
    """
    config = with_values(config, pretrained(config))
    checkpoints, use_ema = config.checkpoints, config.use.use_ema
    if checkpoints.init_from is not None:
        if use_ema:
            raise UsageError("--use_ema requires --resume, not --init_from: use --resume PATH")
        if "resume" in config.explicitly_set:
            raise UsageError("--init_from and --resume both name weights: drop one of the two")
        source = find(checkpoints.init_from, "--init_from")
        config, source = take_over_described(config, source, keeps_head=False)
        config = with_values(config, {"init_from": source.name})
    else:
        source = find_resumed(checkpoints, use_ema=use_ema)
        if source.run:
            values = settings_of(source.run, config.data)
            values = {name: each for name, each in values.items() if name not in _OF_TRAINING}
            config = take_over(config, values, source.path)
            check_same_training(source.run, trained_model(config), None)
        else:
            config, source = take_over_described(config, source, keeps_head=True)
        adapt(source, resolve_model(config)[1], unchanged=True)  # refuses tensors that do not fit
        if is_on_hub(source.name):
            config = with_values(config, {"resume": source.name})
    if config.use.predict is None:
        config = with_values(config, commits_of_data(config.data, None))
    return config, source


def adapt_trained(source: Source, run: Run, classes: list[str] | None = None) -> Adapter:
    """Return how the weights that ``find_trained`` found are adapted to the run's model, for data
    with these classes: those of ``--init_from`` may be of another model. Raises UsageError."""
    unchanged = run.config.checkpoints.init_from is None
    seed = run.config.seed
    return adapt(source, run.model, unchanged=unchanged, classes=classes, seed=seed)


def printer(backend: Backend, *, json: bool = False) -> Callable[[str], None]:
    """Return a function that prints a line in the first process; on stderr with ``json``."""
    if not backend.is_main:
        return lambda line: None
    return functools.partial(print, file=sys.stderr if json else sys.stdout, flush=True)


def place_trained(
    adapter: Adapter, run: Run, backend: Backend, say: Callable[[str], None]
) -> nn.Module:
    """Place the model on the devices with trained weights, log which, and return it."""
    adapter.check_files(verify=run.config.checkpoints.verify_checkpoint)
    model, use_ema = run.build_model(backend.constant), run.config.use.use_ema
    kind = "EMA of the weights" if use_ema else "weights"
    say(f"model: {run.model_line}, {kind} of {adapter.title}")
    if adapter.note:
        say(adapter.note)
    units = list(run.model.units(model))
    if not adapter.loads_sharded:
        return backend.shard(model, units, adapter.initialize)
    sharded = backend.shard(model, units, allocate_uninitialized)
    with checkpoint.readable(adapter.path):  # its run may have removed it meanwhile
        load_state(backend, adapter.path, with_optimizer=False, use_ema=use_ema)
    return sharded


def open_trained(
    adapter: Adapter,
    data: DataSource,
    run: Run,
    backend: Backend,
) -> tuple[nn.Module, BadImages, Callable[[str], None]]:
    """Place trained weights on the devices; return the model, the unreadable images, and a function
    that prints a line. Raises UsageError in all processes if they differ."""
    say = printer(backend, json=run.config.use.json)
    check_alike(run, data)
    say(f"data: {data}")
    model = place_trained(adapter, run, backend, say)
    say(backend.describe())
    if backend.compiles:
        say("compiling takes a while ...")
    return model, BadImages(run.config.data.max_bad_images, data, is_main=backend.is_main), say
