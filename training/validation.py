"""What a run wants of its data, and whether a checkpoint goes with it; needs no device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from data.errors import DataFolderError, printable
from data.source import FILES, DataSource, Wanted
from models.config import ModelConfig
from models.spec import ModelSpec
from training.checkpoints.content import SavedRun
from training.checkpoints.reader import read_metadata, readable
from training.errors import UsageError
from training.options.config import OptimizerConfig, RunConfig
from training.options.flag_rules import by_field, from_values
from training.options.resolve import MODEL_FLAG, Run, model_of


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
"""Sources that have the same images in the same order, under other names."""


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


def check_same_model(saved: SavedRun, model: ModelSpec) -> None:
    """Raises UsageError naming the first model argument that differs from the checkpoint's.

    Dropout rates and the scheme of initialisation may change: weights fit all the same.
    """
    before = model_of(from_values(ModelConfig, saved.arguments))
    name = model.differs_from(before.settings)
    if name is None:
        return
    old, new = before.settings[name], model.settings[name]
    if name in MODEL_FLAG:
        flag = f"{MODEL_FLAG[name]} {old}"
        raise UsageError(
            f"{saved.path} was trained with {flag}, not {new}: give {flag}, or train anew in "
            "another --ckpt_dir"
        )
    raise UsageError(
        f"{saved.path} was trained with --model {before.name}, whose {name} is {old}, not {new}: "
        "give that, or train anew in another --ckpt_dir"
    )


def check_same_optimizer(saved: SavedRun, config: OptimizerConfig) -> None:
    """Raises UsageError if the checkpoint holds another state than what is to be updated needs."""
    known = by_field(OptimizerConfig)
    for name in ("optimizer", "linear_probe"):
        option, here = known[name], getattr(config, name)
        there = saved.arguments.get(name, option.field.default)  # older ones have no such argument
        if there == here:
            continue
        if option.is_switch:
            there_is, here_is = ("with", "without") if there else ("without", "with")
            told = f"{there_is} {option.names[0]}, this run is {here_is} it"
        else:
            told = f"with {option.typed(there)}, not {here}"
        raise UsageError(
            f"{saved.path} was trained {told}: give the same, or train anew in another --ckpt_dir"
        )
