"""Check whether a checkpoint or weights fit a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from data.class_order import in_order
from data.config import DataConfig
from data.files import printable, told_apart
from data.source import FILES, DataSource
from models.spec import ModelSpec
from training.checkpoints import format as checkpoint
from training.checkpoints.choose import Start
from training.checkpoints.format import SavedRun
from training.config import OptimizerConfig, RunConfig, flags_of_model
from training.errors import UsageError
from training.feature_table import features
from training.flags import FlagField, by_field, flat
from training.objectives.config import flags_of_weights
from training.resolve import Run, trained_model
from training.schedule import Position, Schedule, make_schedule

# -- whether they fit ------------------------------------------------------------------------------

_ORDER_FLAGS = ("data_source", "seed", "aug_repeats", "buckets")
_SAME_ORDER = {"folder", "webdataset"}
"""Sources that may have the same images in the same order under different names."""
_STATE_FLAGS = ("optimizer", "linear_probe")
"""Flags that determine which state an optimizer has."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands when it starts, in the data and in its schedule."""

    at: Position
    """In batches of this run's size. A step is an update, counted over the whole run: with another
    batch size the run continues at the same position in the data, and so in the schedule."""
    schedule: Schedule
    last_step: int
    notes: tuple[str, ...] = ()
    """Lines for the log: what differs from the run that saved the checkpoint."""


def check(start: Start, run: Run, data: DataSource) -> Progress:
    """Return where the run begins on ``data``. Raises UsageError if it cannot continue from the
    checkpoint that it starts from, or if its schedule does not fit the data."""
    saved, checkpoints, batch_size = start.saved, run.config.checkpoints, run.config.data.batch_size
    at, notes, epoch_steps = Position(), list[str](), data.steps_of_epoch(batch_size)
    if saved:
        restarts = check_continues(saved, run, data)
        at = replace(saved.position, images_in_epoch=0) if restarts else saved.position
        at = at.in_batches(batch_size, epoch_steps)
        if checkpoints.init_from:
            ignored = f"--init_from {checkpoints.init_from}"
            notes.append(f"note: ignoring {ignored}: resuming this run")
        if restarts:
            notes.append(f"note: {restarts}: restarting epoch {saved.position.epoch + 1}")
        notes += changes_since(saved, run)
    return Progress(at, *make_schedule(run, epoch_steps, at), tuple(notes))


def check_continues(saved: SavedRun, run: Run, data: DataSource) -> str | None:
    """Raise UsageError if training cannot continue from a checkpoint: if it has no optimizer state,
    is for another model, optimizer or other classes, or if its epoch cannot be continued.

    Returns what has changed the order of the epoch's images, so that ``--restart_epoch`` restarts
    it; None if it continues.
    """
    with checkpoint.readable(saved.path):
        names = checkpoint.entries_of(saved.path)
    if not any(name.startswith("optimizer.") for name in names):
        raise UsageError(
            f"{saved.path} contains only weights, for --predict and --eval_only: to resume "
            "training, use a checkpoint that training has saved"
        )
    check_same_training(saved, run.model, run.config)
    check_same_classes(saved.classes, saved.path, data, run)
    difference = other_order(saved, run, data)
    if difference and not run.config.checkpoints.restart_epoch:
        raise UsageError(
            f"{saved.path} was saved in the middle of epoch {saved.position.epoch + 1}, and the "
            f"order of its images has changed since ({difference}): some would be trained on "
            "twice, others not at all: undo the change, or restart that epoch with --restart_epoch"
        )
    return difference


def check_same_classes(
    classes: Sequence[str] | None, path: Path, data: DataSource, run: Run
) -> None:
    """Raise UsageError if ``classes``, which the weights in ``path`` were trained on (by label),
    are not those of ``data``.

    Labels are positions in the list of folders: if one folder is missing, all later ones are wrong.
    None: the weights do not name their classes, see ``check_unnamed_classes``.
    """
    if data.classes is None:
        return
    if classes is None:
        check_unnamed_classes(data.classes, path, run.config.data, run.model)
        return
    for label, (there, here) in enumerate(zip_longest(classes, data.classes)):
        if there != here:
            there, here = told_apart(there or "none", here or "none")
            order = "; use the --class_order or --class_map of the training"
            raise UsageError(
                printable(
                    f"{path} was trained on different classes than those of {data.name}/val: "
                    f"class {label} is {there} in the checkpoint, {here} in the "
                    f"data{order if sorted(classes) == sorted(data.classes) else ''}"
                )
            )


def check_unnamed_classes(
    folders: list[str], path: Path, config: DataConfig, model: ModelSpec
) -> None:
    """Raise UsageError if the labels of these class folders may differ from those of the weights in
    ``path``, which do not name their classes, and no flag sets the numbering.

    They may differ if timm and torchvision number the folders differently, or if there are fewer
    folders than classes.
    """
    is_chosen = config.class_order or config.class_map
    if is_chosen or config.labels or config.data_source not in ("folder", "volumes"):
        return
    count = model.sizes.num_classes
    if folders and len(folders) < count:
        raise UsageError(
            f"{path} has {count:,} classes without names, but {config.data_dir} has "
            f"{len(folders):,} class folders: use --class_map FILE with the names of all classes "
            "in the order of their labels, or --class_order sorted if the folders are the first "
            "classes"
        )
    for label, (ours, theirs) in enumerate(zip(folders, in_order(folders, "natural"), strict=True)):
        if ours != theirs:
            raise UsageError(
                printable(
                    f"{path} does not name its classes, and the order of the class folders in "
                    f"{config.data_dir} is ambiguous: class {label} is {ours} in torchvision's "
                    f"order, {theirs} in timm's: use --class_order sorted (torchvision) or "
                    "natural (timm), or --class_map FILE"
                )
            )


def other_order(saved: SavedRun, run: Run, data: DataSource) -> str | None:
    """Return what has changed the order of an epoch's images since the checkpoint, with both
    values.

    None if nothing has, or if the checkpoint is from the end of an epoch. Values that an older
    checkpoint does not record count as unchanged.
    """
    if not saved.position.images_in_epoch:
        return None
    here, flags = run.values, by_field(RunConfig)
    of_features = [name for feature in features() for name in feature.order_flags]
    # A checkpoint that is older than a feature was saved without it.
    there = {name: flags[name].field.default for name in of_features} | saved.arguments
    # With buckets, positions depend on the batch size; otherwise they do not.
    names = [*_ORDER_FLAGS, *of_features, *(["batch_size"] if here["buckets"] else [])]
    names += ["images_per_read"] if saved.order is None else []  # which has its final value
    values = {flags[name].names[0]: (there[name], here[name]) for name in names if name in there}
    order = data.order()
    values |= {what: (value, order.get(what)) for what, value in (saved.order or {}).items()}
    if {there.get("data_source"), here["data_source"]} == _SAME_ORDER:
        del values[flags["data_source"].names[0]]
        values.pop(FILES, None)

    differ = (what for what, (before, now) in values.items() if before != now)
    return next((_changed(what, *values[what]) for what in differ), None)


def changes_since(saved: SavedRun, run: Run) -> list[str]:
    """Return log lines about extensions and flags of the objective that have changed since the
    checkpoint.

    Any of them may change, even within an epoch: the images stay the same.
    """
    notes = []
    extensions = saved.arguments.get("extension"), run.config.extension
    if extensions[0] != extensions[1]:
        notes.append(f"note: {_changed('--extension', *extensions)} at this step")
    there, here = flat(saved.config), flat(run.config)
    return notes + [
        f"note: {_changed(option.names[0], there[name], here[name])} at this step"
        for name, option in by_field(*flags_of_weights()).items()
        if there[name] != here[name]
    ]


def _changed(what: str, before: Any, now: Any) -> str:
    """Describe the change of a value, or of a list of values; None is shown as "none"."""

    def shown(value: Any) -> str:
        if isinstance(value, list | tuple):
            return " ".join(map(str, value))
        return "none" if value is None else str(value)

    return f"{what} changed from {shown(before)} to {shown(now)}"


def check_same_training(saved: SavedRun, model: ModelSpec, config: RunConfig | None) -> None:
    """Raise UsageError naming all model arguments that differ from the checkpoint's.

    Dropout rates and the initialization scheme may change, as weights still fit. Also checks the
    flags that determine the optimizer state, unless ``config`` is None because only weights are
    used.
    """
    before = trained_model(saved.config)
    known = by_field(*flags_of_model(), *flags_of_weights())
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
            f"{saved.path} was trained {'; '.join(differences)}: use the same flags (model flags "
            "may be omitted: the checkpoint has them), or another --ckpt_dir"
        )


def _difference(option: FlagField, there: Any, here: Any) -> str:
    """Describe a flag with both values; a value of None, or off, is shown as the absence of the
    flag."""
    absent = [None] if option.has_negation or not option.is_switch else [None, False]
    if there in absent:
        return f"without {option.names[0]}, but this run has {option.typed(here)}"
    if here in absent:
        return f"with {option.typed(there)}, which this run does not have"
    words = option.words(here)
    return f"with {option.typed(there)}, not {' '.join(words[1:] or words)}"
