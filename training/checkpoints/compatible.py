"""Whether a checkpoint, or weights, fit a run: asked before any device starts, and of what the
processes agreed on; and what a run takes over from a checkpoint.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.files import printable
from data.index import in_order
from data.source import FILES, DataSource
from models.config import ModelConfig
from models.spec import ModelSpec
from training.checkpoints import format as checkpoint
from training.checkpoints.format import SavedRun
from training.config import OptimizerConfig, RunConfig
from training.errors import UsageError
from training.flags import FlagField, by_field, flat
from training.objectives.config import ObjectiveConfig
from training.resolve import Run, model_of

# -- what a run takes over, unless flags say otherwise ---------------------------------------------


def with_saved_model(saved: SavedRun, asked: ModelConfig) -> ModelConfig:
    """Return the checkpoint's model with the flags that were given over it; as asked if they name
    another model."""
    if asked.model not in (None, saved.model.model):
        return asked
    return replace(saved.model, **asked.overrides())  # type: ignore[arg-type]


def with_saved_objective(saved: SavedRun, config: RunConfig) -> RunConfig:
    """Return the configuration with the checkpoint's objective and its flags, but for those that
    were given. Raises UsageError if another objective was."""
    there, asked = saved.objective, config.objective
    if "objective" in config.given and asked.objective != there.objective:
        raise UsageError(
            f"{saved.path} was trained with --objective {there.objective}, not {asked.objective}: "
            "give the same, or start another training from its weights with --init_from and "
            "another --ckpt_dir"
        )
    given = {name: value for name, value in flat(asked).items() if name in config.given}
    return replace(config, objective=replace(there, **given))


# -- whether they fit ------------------------------------------------------------------------------

_ORDER_FLAGS = ("data_source", "seed", "aug_repeats", "buckets")
_SAME_ORDER = {"folder", "webdataset"}
"""Sources that may have the same images in the same order, under other names."""
_STATE_FLAGS = ("optimizer", "linear_probe")
"""Flags that decide which state an optimizer has."""


def check_continues(saved: SavedRun, run: Run, data: DataSource) -> None:
    """Raise UsageError if training cannot continue from a checkpoint: if it has no optimizer's
    state, is of another model, optimizer or other classes, or if its epoch cannot be continued."""
    with checkpoint.readable(saved.path):
        names = checkpoint.entries_of(saved.path)
    if not any(name.startswith("optimizer.") for name in names):
        raise UsageError(
            f"{saved.path} holds weights alone, which are for --predict and --eval_only: training "
            "resumes a checkpoint that training wrote"
        )
    check_same_training(saved, run.model, run.config)
    check_same_classes(saved.classes, saved.path, data, run)
    difference = other_order(saved, run, data)
    if difference and not run.config.checkpoints.restart_epoch:
        raise UsageError(
            f"{saved.path} was written in the middle of epoch {saved.position.epoch + 1}, whose "
            f"images come in another order now ({difference}): some would be trained on twice, "
            "others not at all: give the same, or --restart_epoch to restart that epoch"
        )


def check_same_classes(
    classes: Sequence[str] | None, path: Path, data: DataSource, run: Run
) -> None:
    """Raise UsageError if ``classes``, by label those that the weights in ``path`` were trained on,
    are not those of ``data``.

    Labels are positions among the folders: one folder less, and all after it are wrong. None: the
    weights do not say, see ``check_unnamed_classes``.
    """
    if data.classes is None:
        return
    if classes is None:
        check_unnamed_classes(data.classes, path, run.config.data, run.model)
        return
    for label, (there, here) in enumerate(zip_longest(classes, data.classes)):
        if there != here:
            order = "; give --class_order or --class_map as in training"
            raise UsageError(
                printable(
                    f"{path} was trained on other classes than those of {data.name}/val: "
                    f"number {label} is {there or 'none'} there, {here or 'none'} here"
                    f"{order if sorted(classes) == sorted(data.classes) else ''}"
                )
            )


def check_unnamed_classes(
    folders: list[str], path: Path, config: DataConfig, model: ModelSpec
) -> None:
    """Raise UsageError if the labels of these class folders may not be those of the weights in
    ``path``, which do not name their classes, and no flag says how they are numbered.

    They may not if timm numbers the folders otherwise than torchvision, or if there are fewer
    folders than classes.
    """
    is_chosen = config.class_order or config.class_map
    if is_chosen or config.labels or config.data_source not in ("folder", "volumes"):
        return
    count = model.sizes.num_classes
    if folders and len(folders) < count:
        raise UsageError(
            f"{path} is for {count:,} classes and does not name them, {config.data_dir} has "
            f"{len(folders):,} class folders: give --class_map FILE with the names of all, by "
            "label, or --class_order sorted if these are the first ones"
        )
    for label, (ours, theirs) in enumerate(zip(folders, in_order(folders, "natural"), strict=True)):
        if ours != theirs:
            raise UsageError(
                printable(
                    f"{path} does not name its classes, and {config.data_dir} has class folders "
                    f"whose order is not certain: number {label} is {ours} by torchvision, "
                    f"{theirs} by timm: give --class_order sorted (torchvision) or natural (timm), "
                    "or --class_map FILE"
                )
            )


def other_order(saved: SavedRun, run: Run, data: DataSource) -> str | None:
    """Return what changes the order of an epoch's images since the checkpoint, with both values.

    None if nothing does, or if the checkpoint is of an epoch's end. What an older checkpoint does
    not record counts as unchanged.
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

    differ = (what for what, (before, now) in values.items() if before != now)
    return next((_changed(what, *values[what]) for what in differ), None)


def changes_since(saved: SavedRun, run: Run, data: DataSource) -> list[str]:
    """Return lines for the log: what the run does otherwise than before the checkpoint.

    Any flag of the objective may change, within an epoch too: the images are the same.
    """
    notes = []
    if difference := other_order(saved, run, data):
        notes.append(f"note: {difference}: epoch {saved.position.epoch + 1} starts again")
    there, here = flat(saved.objective), flat(run.config.objective)
    return notes + [
        f"note: {_changed(option.names[0], there[name], here[name])}, from this step on"
        for name, option in by_field(ObjectiveConfig).items()
        if there[name] != here[name]
    ]


def _changed(what: str, before: Any, now: Any) -> str:
    """Return in words that a value, or several, has changed; None: there is none."""

    def shown(value: Any) -> str:
        if isinstance(value, list | tuple):
            return " ".join(map(str, value))
        return "none" if value is None else str(value)

    return f"{what} was {shown(before)}, is {shown(now)}"


def check_same_training(saved: SavedRun, model: ModelSpec, config: RunConfig | None) -> None:
    """Raise UsageError naming all model arguments that differ from the checkpoint's.

    Dropout rates and the scheme of initialisation may change: weights fit all the same. Likewise
    for flags by which the optimizer has another state; ``config`` None: weights alone are used.
    """
    before = model_of(saved.model, saved.objective)
    known = by_field(ModelConfig, ObjectiveConfig)
    names = model.differences(before.settings)
    other_model = bool(names) and before.name != model.name
    differences = [f"with --model {before.name}, not {model.name}"] if other_model else []
    for name in sorted(names, key=lambda name: name not in known):
        there, here = before.settings[name], model.settings[name]
        if name in known:
            differences.append(_difference(known[name], there, here))
        elif not other_model:
            differences.append(f"with --model {before.name}, whose {name} is {there}, not {here}")
    flags = by_field(OptimizerConfig)
    for name in _STATE_FLAGS if config else ():
        # Older checkpoints have no such argument.
        there = saved.arguments.get(name, flags[name].field.default)
        here = getattr(config.optimizer, name)  # type: ignore[union-attr]
        if there != here:
            differences.append(_difference(flags[name], there, here))
    if differences:
        raise UsageError(
            f"{saved.path} was trained {'; '.join(differences)}: give the same (flags of the model "
            "may be left out, they are the checkpoint's), or train in another --ckpt_dir"
        )


def _difference(option: FlagField, there: Any, here: Any) -> str:
    """Return a flag with both its values; one that is None, or off, is not given at all."""
    absent = [None] if option.has_negation or not option.is_switch else [None, False]
    if there in absent:
        return f"without {option.names[0]}, this run is with {option.typed(here)}"
    if here in absent:
        return f"with {option.typed(there)}, this run is without it"
    words = option.words(here)
    return f"with {option.typed(there)}, not {' '.join(words[1:] or words)}"
