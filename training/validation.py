"""What a run wants of its data, and whether a checkpoint goes with it; needs no device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from data.files import DataFolderError, printable
from data.source import FILES, DataSource, Wanted
from models.config import ModelConfig
from models.spec import ModelSpec
from training.checkpoints.format import SavedRun, read_metadata, readable
from training.config import OptimizerConfig, RunConfig
from training.errors import UsageError
from training.flags import Option, by_field, from_values
from training.resolve import Run, model_of


def wanted_images(run: Run, *, with_train: bool = True) -> Wanted:
    """Return what a run wants of its source of images."""
    sizes = run.model.sizes
    channels, *size = sizes.input_shape
    return Wanted(
        run.config.data, channels, tuple(size), sizes.num_classes, run.config.seed, with_train
    )


@contextlib.contextmanager
def bad_data_is_the_users() -> Iterator[None]:
    """Turn a folder that cannot be used, found by what reads data inside, into a UsageError."""
    try:
        yield
    except DataFolderError as error:
        raise UsageError(str(error)) from None


def check_same_classes(classes: Sequence[str] | None, path: Path, data: DataSource) -> None:
    """Raises UsageError where ``classes``, by label those that the weights in ``path`` were trained
    on, are not those of ``data``; None: not known.

    Labels are positions among the folders: one folder less, and all after it are wrong.
    """
    if classes is None or data.classes is None:
        return
    for label, (there, here) in enumerate(zip_longest(classes, data.classes)):
        if there != here:
            raise UsageError(
                printable(
                    f"{path} was trained on other classes than those of {data.name}/val: "
                    f"number {label} is {there or 'none'} there, {here or 'none'} here"
                )
            )


def check_goes_on(saved: SavedRun) -> None:
    """Raises UsageError for a checkpoint of weights alone: AdamW cannot go on without its state."""
    with readable(saved.path):
        names = read_metadata(saved.path).state_dict_metadata
    if not any(name.startswith("optimizer.") for name in names):
        raise UsageError(
            f"{saved.path} holds weights alone, which are for --predict and --eval_only: training "
            "goes on from a checkpoint that training wrote"
        )


_ORDER_FLAGS = ("data_source", "seed", "aug_repeats", "buckets")
_SAME_ORDER = {"folder", "webdataset"}
"""Sources that may have the same images in the same order, under other names."""


def other_order(saved: SavedRun, run: Run, data: DataSource) -> str | None:
    """Return by what an epoch's images are in another order than those of a checkpoint that was
    written in mid-epoch, with both values; None if they are not, or if it is of an epoch's end.

    What an older checkpoint does not say is taken for the same.
    """
    if not saved.position.images_in_epoch:
        return None
    there, here, flags = saved.arguments, run.values, by_field(RunConfig)
    # Where batches are not of one bucket each, positions are those of any batch size.
    names = [*_ORDER_FLAGS, *(["batch_size"] if here["buckets"] else [])]
    names += ["images_per_read"] if saved.order is None else []  # which has its final value
    values = {flags[name].names[0]: (there[name], here[name]) for name in names if name in there}
    order = data.order()
    values |= {what: (value, order.get(what)) for what, value in (saved.order or {}).items()}
    if {there.get("data_source"), here["data_source"]} == _SAME_ORDER:
        del values[flags["data_source"].names[0]]
        values.pop(FILES, None)
    for what, (before, now) in values.items():
        if before != now:
            return f"{what} was {_shown(before)}, is {_shown(now)}"
    return None


def check_same_order(saved: SavedRun, run: Run, data: DataSource) -> None:
    """Raises UsageError where a checkpoint cannot be resumed in mid-epoch, as ``other_order`` says,
    unless that epoch is to begin anew."""
    difference = other_order(saved, run, data)
    if difference and not run.config.checkpoints.restart_epoch:
        raise UsageError(
            f"{saved.path} was written in the middle of epoch {saved.position.epoch + 1}, whose "
            f"images come in another order now ({difference}): some would be trained on twice, "
            "others not at all: give the same, or --restart_epoch to begin that epoch anew"
        )


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else "none" if value is None else str(value)


def with_saved_model(saved: SavedRun, asked: ModelConfig) -> ModelConfig:
    """Return the checkpoint's model, and over it what was asked for; another model is as asked."""
    before: ModelConfig = from_values(ModelConfig, saved.arguments)
    if asked.model not in (None, before.model):
        return asked
    return replace(before, **asked.overrides())  # type: ignore[arg-type]


def with_resumed_model(config: RunConfig, saved: SavedRun) -> RunConfig:
    """Return the configuration with the model of the checkpoint that it resumes.

    Flags that were given may change its dropout and nothing else: raises UsageError.
    """
    config = replace(config, model=with_saved_model(saved, config.model))
    check_same_training(saved, model_of(config.model), config.optimizer)
    return config


def check_same_model(saved: SavedRun, model: ModelSpec) -> None:
    """Raises UsageError naming all model arguments that differ from the checkpoint's.

    Dropout rates and the scheme of initialisation may change: weights fit all the same.
    """
    _refuse(saved, _model_differences(saved, model))


def check_same_training(saved: SavedRun, model: ModelSpec, optimizer: OptimizerConfig) -> None:
    """Raises UsageError naming also where the checkpoint holds another optimizer's state."""
    _refuse(saved, [*_model_differences(saved, model), *_optimizer_differences(saved, optimizer)])


def _refuse(saved: SavedRun, differences: Sequence[str]) -> None:
    if differences:
        raise UsageError(
            f"{saved.path} was trained {'; '.join(differences)}: give the same (flags of the model "
            "may be left out, they are the checkpoint's), or train anew in another --ckpt_dir"
        )


def _model_differences(saved: SavedRun, model: ModelSpec) -> list[str]:
    before, known = model_of(from_values(ModelConfig, saved.arguments)), by_field(ModelConfig)
    names = model.differences(before.settings)
    told = [
        _difference(known[name], before.settings[name], model.settings[name])
        for name in names
        if name in known
    ]
    if names and before.name != model.name:
        return [f"with --model {before.name}, not {model.name}", *told]
    return told + [
        f"with --model {before.name}, whose {name} is {before.settings[name]}, not "
        f"{model.settings[name]}"
        for name in names
        if name not in known
    ]


def _optimizer_differences(saved: SavedRun, config: OptimizerConfig) -> list[str]:
    """Return where the checkpoint holds another state than what is to be updated needs."""
    known = by_field(OptimizerConfig)
    saved_as = {name: saved.arguments.get(name, known[name].field.default) for name in _STATE}
    return [
        _difference(known[name], there, getattr(config, name))
        for name, there in saved_as.items()  # older checkpoints have no such argument
        if there != getattr(config, name)
    ]


_STATE = ("optimizer", "linear_probe")
"""Flags that decide which state an optimizer has."""


def _difference(option: Option, there: Any, here: Any) -> str:
    """Return a flag with both its values; one that is None, or off, is not there at all."""
    absent = [None] if option.has_negation or not option.is_switch else [None, False]
    if there in absent:
        return f"without {option.names[0]}, this run is with {option.typed(here)}"
    if here in absent:
        return f"with {option.typed(there)}, this run is without it"
    words = option.words(here)
    return f"with {option.typed(there)}, not {' '.join(words[1:] or words)}"
