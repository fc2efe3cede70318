"""How a training starts: chosen by each process before any device starts, then agreed by all.

``choose_start`` decides what is resumed or loaded, ``agree`` makes it the same for all processes,
``progress_of`` says where in the data it continues. Between them: what must hold for that.
"""

import functools
import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from data.config import DataConfig
from data.files import printable, told_apart
from data.index import in_order
from data.source import FILES, DataSource
from models.config import ModelConfig
from models.spec import ModelSpec
from training import files
from training.backend import Backend
from training.checkpoints import choose
from training.checkpoints import format as checkpoint
from training.checkpoints.format import Position, SavedRun
from training.checkpoints.local_tier import LocalTier
from training.config import CheckpointConfig, ObjectiveConfig, OptimizerConfig, RunConfig
from training.errors import UsageError
from training.flags import FlagField, by_field, flat
from training.logs import records
from training.logs.bad_images import FILE as BAD_IMAGES_FILE
from training.logs.bad_images import BadImages
from training.processes import exchange
from training.resolve import Run, model_of
from training.schedule import Schedule, make_schedule
from training.weights import Weights, weights_in

# -- before any device starts ----------------------------------------------------------------------


def choose_start(config: RunConfig) -> tuple[RunConfig, SavedRun | None, Weights | None]:
    """Decide what a training starts from; return the configuration with the model of that, too.

    That is a checkpoint, as far as this process sees and has looked into it; or the weights that
    ``--init_from`` names, found but not read; or new weights, where both are None.

    Raises UsageError for a folder that cannot be a run's, for a checkpoint or weights that cannot
    be read, and for flags that contradict their model.
    """
    folder = files.folder_at(config.checkpoints.ckpt_dir)
    try:
        if outer := choose.checkpoint_around(folder):
            raise UsageError(
                f"--ckpt_dir {folder} is inside of the checkpoint {outer.name}: give the run's "
                f"folder, {outer.parent}, or another one"
            )
        files.check_folder_writable(folder)
        if not files.is_url(folder) and folder.exists():
            files.check_own(folder, shared=config.checkpoints.shared_ckpt_dir)
    except OSError as error:
        raise UsageError(f"cannot read --ckpt_dir {folder}: {error.strerror}") from None
    if (local := config.checkpoints.local_ckpt_dir) is not None:
        if files.is_url(files.folder_at(local)):
            raise UsageError(
                f"--local_ckpt_dir {local} is a URL: give a folder on each host's disk"
            )
        if Path(local).resolve() == Path(folder).resolve():
            raise UsageError(f"--local_ckpt_dir {local} is --ckpt_dir: give another folder")
        files.check_folder_writable(Path(local), "--local_ckpt_dir")
        if Path(local).exists():
            files.check_own(Path(local), "--local_ckpt_dir")

    # The order matters:
    # 1. Resume here, from --local_ckpt_dir, if a step is whole there that is newer than what 2 can
    #    resume. Only for --resume auto, or after a restart of this job; decided by ``agree``, as it
    #    takes all hosts to know.
    # 2. Resume here, from --ckpt_dir. After a restart of this job always its newest checkpoint,
    #    whatever --resume names. Else as --resume (auto, best, lowest_loss) or --resume_epoch says.
    # 3. Resume elsewhere: --resume FOLDER.
    # 4. Start from trained weights: --init_from. Only if there is nothing to resume, so that the
    #    same command continues the run when it is started again.
    # 5. Start from new weights.
    saved, _ = find_resumable(config)
    if saved:  # 2 and 3
        model = with_saved_model(saved, config.model)
        config = replace(with_saved_objective(saved, config), model=model)
        check_same_training(saved, model_of(model, config.objective), config)
        return config, saved, None
    if config.checkpoints.init_from:  # 4
        config, weights = with_model_of_weights(config)
        return config, None, weights
    return config, None, None  # 5


def find_resumable(config: RunConfig) -> tuple[SavedRun | None, choose.Candidates]:
    """Return the checkpoint that the flags name (2 and 3 above), and all that may replace it.

    If all are damaged, there is none yet where a step of --local_ckpt_dir (1) may replace them.
    """
    checkpoints = config.checkpoints
    folder = files.folder_at(checkpoints.ckpt_dir)
    try:
        named = choose.find_resume(folder, checkpoints.resume, checkpoints.resume_epoch)
        return choose.first_readable(named)
    except choose.AllDamaged as error:
        if checkpoints.local_ckpt_dir is None or not resumes_newest(checkpoints):
            raise
        return None, choose.Candidates([], error.passed_over, explicit=False)


def with_model_of_weights(config: RunConfig) -> tuple[RunConfig, Weights]:
    """Return the configuration with the model of the weights that ``--init_from`` names.

    Flags that were given change it; a file without arguments leaves all as it is. Raises
    UsageError if there are no such weights.
    """
    assert config.checkpoints.init_from is not None
    weights = weights_in(files.folder_at(config.checkpoints.init_from), "--init_from")
    if weights.run:
        config = replace(config, model=with_saved_model(weights.run, config.model))
    return config, weights


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


# -- on the devices' hosts: all processes agree ----------------------------------------------------


class Agreed(NamedTuple):
    """What all processes start with."""

    saved: SavedRun | None
    """The checkpoint that all resume, or of a step on the hosts' own disks this process's part."""
    newest: Path | None
    """The newest checkpoint in --ckpt_dir or --resume, from which they continue."""
    local: LocalTier | None
    """The hosts' own disks, with --local_ckpt_dir."""
    bad_images: BadImages
    """The unreadable images known so far."""
    notes: list[str]
    """Lines for the log."""


Newer = Callable[[int], tuple[SavedRun | None, list[str]]]
"""A function from a step to what is to be resumed instead of a checkpoint of that step, because it
is newer, None: nothing; and to lines for the log."""


def agree(
    chosen: SavedRun | None, run: Run, data: DataSource, lock: files.FolderLock, backend: Backend
) -> Agreed:
    """Make all processes start alike, or end all: until here each was for itself, and has chosen a
    checkpoint to resume (None: none). Raises UsageError in all processes.
    """
    ckpt_dir, config, is_main = run.ckpt_dir, run.config.checkpoints, backend.is_main
    exchange.check_alike(run, data)
    enter_folder(ckpt_dir, lock, is_main=is_main)

    # The checkpoint. Who had the lock until now may have written and removed some.
    candidates = choose.Candidates([])
    with exchange.failing_together():
        if is_main:
            _, candidates = find_resumable(run.config)
    local = None
    newer: Newer | None = None
    if config.local_ckpt_dir is not None:
        local, continues_here = LocalTier(run, backend.shards), False
        with exchange.failing_together():
            continues_here = resumes_newest(config)
        if exchange.gather(continues_here)[0]:  # the first process resumes the newest step here
            newer = functools.partial(local.resume, verify=config.verify_checkpoint)
    saved, newest, notes = choose_checkpoint(
        candidates,
        lambda each: check_resume(each, run, data),
        verify=config.verify_checkpoint,
        newer=newer,
    )
    with exchange.failing_together():
        if chosen and not saved:
            raise UsageError(f"{chosen.path} was removed meanwhile: start again")
    if local:
        kept = saved.position.step if saved and saved.is_part else None
        local.forget(kept, goes_back=newer is None)
        notes.append(local.description)
    if saved and config.init_from:
        notes.append(f"note: --init_from {config.init_from} is ignored: this run is resumed")
    if saved and (difference := other_order(saved, run, data)):
        notes.append(f"note: {difference}: epoch {saved.position.epoch + 1} starts again")
    if saved:  # any flag of the objective may change, in mid-epoch too: the images are the same
        there, here = flat(saved.objective), flat(run.config.objective)
        notes += [
            f"note: {_changed(option.names[0], there[name], here[name])}, from this step on"
            for name, option in by_field(ObjectiveConfig).items()
            if there[name] != here[name]
        ]

    # The logs so far, which list the images that could not be read.
    if files.is_url(ckpt_dir):
        with exchange.failing_together():
            if is_main:
                try:
                    files.fetch_logs(
                        run.log_dir,
                        ckpt_dir,
                        (records.METRICS_FILE, records.EVENTS_FILE, BAD_IMAGES_FILE),
                    )
                except OSError as error:
                    raise UsageError(
                        f"cannot read the logs of {ckpt_dir}: {error.strerror}"
                    ) from None
        notes.append(
            f"note: {ckpt_dir} has no locks: a second job on another host is not noticed; logs are "
            f"copied there from {run.log_dir}"
        )
    listed = run.log_dir / BAD_IMAGES_FILE
    bad_images = BadImages(run.config.data.max_bad_images, data, listed, is_main=is_main)
    if bad_images.excess:
        raise UsageError(
            f"{bad_images.excess}; {ckpt_dir / BAD_IMAGES_FILE} lists them: remove it when they "
            "are mended",
            agreed=True,
        )

    # Last, as it changes the folder: checkpoints that this run does not continue.
    aside = ""
    with exchange.failing_together():
        if is_main and (later := choose.later_ones(ckpt_dir, newest)):
            folder = choose.set_aside(ckpt_dir, later)
            names = ", ".join(path.name for path in later)
            aside = (
                f"note: this run goes back: {names} set aside in {folder}, where --resume {folder} "
                "finds them"
            )
    if aside := exchange.gather(aside)[0]:
        notes.append(aside)
    return Agreed(saved, newest, local, bad_images, notes)


def resumes_newest(config: CheckpointConfig) -> bool:
    """Return True if the newest step of --ckpt_dir is asked for."""
    is_auto = config.resume == "auto" and not config.resume_epoch
    return is_auto or choose.is_restart(files.folder_at(config.ckpt_dir))


def enter_folder(ckpt_dir: Path, lock: files.FolderLock, *, is_main: bool) -> None:
    """Lock the folder for this job. Raises in all processes if that is not possible: RunFailed in a
    restart whose folder is still in use, perhaps by a lost machine, else UsageError."""
    token = ""
    with exchange.failing_together():
        if is_main:
            token = lock.acquire(is_restart=choose.is_restart(ckpt_dir))
    token = exchange.gather(token)[0]
    with exchange.failing_together():
        if not is_main:  # closing the file in the first process would release its lock
            files.check_same_folder(ckpt_dir, token)


def choose_checkpoint(
    candidates: choose.Candidates,
    check: Callable[[SavedRun], None],
    *,
    verify: bool,
    newer: Newer | None = None,
) -> tuple[SavedRun | None, Path | None, list[str]]:
    """Choose, for all processes, the first of the first process's candidates that is undamaged, or
    what is ``newer`` than it.

    Returns what is resumed, None if there is nothing; that candidate; and lines for the log.
    ``check`` raises UsageError for what does not fit the run. Raises UsageError in all processes if
    all candidates are damaged and nothing is newer.
    """
    mine = [[str(path) for path in candidates.paths], candidates.passed_over, candidates.explicit]
    named, passed_over, explicit = exchange.gather(mine)[0]
    paths, damaged = [files.folder_at(path) for path in named], list(passed_over)
    notes: dict[str, None] = {}  # each once: the hosts' disks are asked again after a damaged one
    resumed: SavedRun | None = None
    for path in [*paths, None]:
        step = choose.step_of(path) if path and not explicit else -1
        if newer:
            resumed, more = newer(step)
            notes |= dict.fromkeys(more)
            if resumed:
                with exchange.failing_together():
                    check(resumed)
                break
        if path is None:
            break

        # All must see the same checkpoint there.
        seen = None
        with exchange.failing_together():
            file = path / (
                checkpoint.MANIFEST
                if (path / checkpoint.MANIFEST).exists()
                else checkpoint.METADATA
            )
            if file.exists():
                seen = checkpoint.checksum(file)
        found = exchange.gather([seen, socket.gethostname()])
        for number, (other, host) in enumerate(found):
            if other != found[0][0]:
                raise UsageError(
                    f"{exchange.name(number, host)} does not see the checkpoint {path} that the "
                    "first process is about to resume: give a folder that all nodes share",
                    agreed=True,
                )

        # Each process checks its share of the files.
        problem = None
        with exchange.failing_together():
            try:
                if verify:
                    problem = checkpoint.damage(path, exchange.rank(), exchange.count())
            except ValueError as error:
                problem = str(error)
        problem = next((each for each in exchange.gather(problem) if each is not None), None)
        if problem is None:
            with exchange.failing_together():
                resumed = checkpoint.read_saved_run(path)
                check(resumed)
            break
        damaged.append(f"{path} is damaged ({problem})")
        if explicit:
            break
    if resumed:
        passed_over = [f"warning: {each}, so {resumed.path.name} is resumed" for each in damaged]
        return resumed, path, [*notes, *passed_over]
    if paths:
        raise UsageError(
            f"{damaged[-1]}: name another one, or use it as it is with --no_verify_checkpoint",
            agreed=True,
        )
    if damaged:
        raise choose.AllDamaged(damaged, agreed=True)
    return None, None, [*notes]


def check_weights(weights: Weights, *, verify: bool) -> None:
    """Compare a checkpoint's files with its manifest, each process its share of them.

    Without ``verify`` only check that all processes see the same. Raises UsageError in all of them.
    """
    path = weights.path
    if weights.tensors is None and weights.run:
        choose_checkpoint(choose.Candidates([path]), lambda saved: None, verify=verify)
    elif weights.tensors is None and verify:  # weights alone, which DCP wrote
        with checkpoint.readable(path):
            problem = checkpoint.damage(path)
        if problem:
            raise UsageError(
                f"{path} is damaged ({problem}): name another one, or use it as it is with "
                "--no_verify_checkpoint"
            )


# -- where training continues ----------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """Where in the data a training starts, and where it ends."""

    at: Position
    last_step: int
    schedule: Schedule
    warning: str | None
    """A line for the log, if the warmup never ends."""


def progress_of(saved: SavedRun | None, run: Run, data: DataSource, epoch_steps: int) -> Progress:
    """Return where a run continues that resumes ``saved`` (None: at the start).

    A step is an update, counted over the whole run. With another batch size the run continues at
    the same place in the data, and so in the schedule, with as many more steps as are left there.
    ``epoch_steps``: how many batches an epoch has now. Raises UsageError if warmup and decay are
    longer than the run.
    """
    config, batch_size = run.config, run.config.data.batch_size
    at = saved.position if saved else Position()
    epoch, batches = at.epoch, at.images_in_epoch // batch_size
    if saved and other_order(saved, run, data):  # --restart_epoch
        batches = 0
    if batches >= epoch_steps:
        epoch, batches = epoch + 1, 0
    at = Position(at.step, epoch, batches * batch_size)
    done = epoch * epoch_steps + batches
    last_step = at.step + max(0, config.num_epochs * epoch_steps - done)
    last_step = max(at.step, min(last_step, config.max_steps or last_step))
    end = done + last_step - at.step  # the last step of the schedule, in batches of this size
    schedule, warning = make_schedule(run, epoch_steps, end), None
    if at.step < last_step and end < schedule.warmup_steps and schedule.peak:
        warning = (
            f"warning: the warmup takes {schedule.warmup_steps:,} steps, the run ends at {end:,}: "
            f"the learning rate stays below {schedule.lr(end):.2g}, --lr {schedule.peak:g} is not "
            "reached; give fewer --warmup_steps (or --warmup_epochs)"
        )
    return Progress(at, last_step, schedule, warning)


@dataclass(frozen=True)
class History:
    """What the run has reported in its folder before this start."""

    continues: bool
    """The folder's records are of this run."""
    evaluated: dict[int, str | None]
    """By step, the figure of each evaluation that was finite; None of one of no image."""
    frozen: Mapping[str, Collection[int]]
    """By ``records.KNN`` and ``PROBE``, the steps of the evaluations by frozen features."""
    best: Path | None = None
    """The checkpoint of the best evaluation, if there is one."""
    best_score: float = -math.inf
    """Its ``records.score``."""
    left_out: str = ""
    """How many lines of the folder's metrics are damaged, in words."""


def history_of(saved: SavedRun | None, ckpt_dir: Path, step: int) -> History:
    """Return what the folder's metrics say of the steps up to ``step``; later ones are dropped."""
    if saved is None or not (saved.is_part or saved.path.parent.resolve() == ckpt_dir.resolve()):
        # What was resumed from elsewhere is not evaluated again.
        return History(
            False, {step: None} if step else {}, {records.KNN: {step}, records.PROBE: {step}}
        )
    found = records.read_metrics(ckpt_dir)
    lines = [r for r in found if r["step"] <= step]
    finite = records.evaluations(lines)
    best = max(((records.score(r), at) for at, r in finite.items()), default=(-math.inf, 0))
    evaluated: dict[int, str | None] = {r["step"]: None for r in lines if r.get("val_images") == 0}
    evaluated |= {at: records.summary(each) for at, each in finite.items()}
    folder = choose.folder_of(ckpt_dir, best[1]) if best[1] else None
    left_out = records.damaged_lines(found.left_out)
    return History(True, evaluated, records.frozen_steps(lines), folder, best[0], left_out)


# -- whether a checkpoint fits a run ---------------------------------------------------------------

_ORDER_FLAGS = ("data_source", "seed", "aug_repeats", "buckets")
_SAME_ORDER = {"folder", "webdataset"}
"""Sources that may have the same images in the same order, under other names."""
_STATE_FLAGS = ("optimizer", "linear_probe")
"""Flags that decide which state an optimizer has."""


def check_resume(saved: SavedRun, run: Run, data: DataSource) -> None:
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
            there, here = told_apart(there or "none", here or "none")
            order = "; give --class_order or --class_map as in training"
            raise UsageError(
                printable(
                    f"{path} was trained on other classes than those of {data.name}/val: "
                    f"number {label} is {there} there, {here} here"
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
