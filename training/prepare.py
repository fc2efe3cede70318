"""What a training decides and checks before any device starts."""

import functools
from collections.abc import Callable

from training.backend import Backend
from training.checkpoints.choose import Start, choose_start
from training.checkpoints.compatible import check, check_unnamed_classes
from training.checkpoints.inventory import check_folders, inventory, retry_while_error_changes
from training.checkpoints.local_tier import LocalTier
from training.checkpoints.per_host import HostFolders
from training.config import RunConfig
from training.data import open_images
from training.errors import data_errors_as_usage_errors
from training.flags import with_values
from training.logs.events import StartParts
from training.logs.reports import Reports, read_expectation
from training.objectives.registry import objective_class
from training.resolve import Run, take_over
from training.train import Prepared, train
from training.weights.adapt import PartWeights, adapt, with_parts
from training.weights.describe import describe, settings_of, take_over_described
from training.weights.find import commits, find, pretrained
from training.weights.source import Source


def plan_start(config: RunConfig) -> tuple[RunConfig, Start, Source | None]:
    """Return the configuration with the model, objective and preprocessing of what this process
    would start from, except where flags are set; that start; and the weights of ``--init_from``, if
    it starts from them.

    Raises UsageError for an invalid run folder, and for a checkpoint or weights that cannot be
    read.
    """
    checkpoints = config.checkpoints
    alone = checkpoints.ckpt_dir_per_host
    check_folders(checkpoints)
    start = retry_while_error_changes(
        lambda: choose_start(inventory(checkpoints, alone=alone), checkpoints)
    )
    if saved := start.saved:
        config = take_over(config, settings_of(saved, config.data), saved.path)
        return with_values(config, commits(config, saved)), start, None
    config = with_values(config, pretrained(config))
    config, weights = with_values(config, commits(config, None)), None
    if init_from := config.checkpoints.init_from:
        found = find(init_from, "--init_from")
        config, weights = take_over_described(config, found, keeps_head=False)
        config = with_values(config, {"init_from": weights.name})
    return config, start, weights


def prepare_training(
    start: Start, weights: Source | None, run: Run
) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Check everything that can be checked without a device; return the run and the function to run
    in every process. Raises UsageError."""
    parts = StartParts()
    parts.done("imports")
    config, checkpoints, expected_s = run.config, run.config.checkpoints, read_expectation(run)
    data = open_images(run)
    run = run.with_data(intensity=data.intensity)  # with what the images decide
    if config.extension:  # whose view, or source, nobody else has tried
        with data_errors_as_usage_errors():
            for split in data.splits.values():
                split.check_first_sample()
    progress = check(start, run, data)
    initial, elsewhere = None, list[PartWeights]()
    if not start.saved:
        elsewhere = [part for each in config.active_features for part in each.part_weights(run)]
    if weights:
        without = tuple(name for part in elsewhere for name in part.prefixes + part.where_fitting)
        initial = adapt(weights, run.model, classes=data.classes, seed=config.seed, without=without)
        names = describe(weights).classes_among(data.classes)
        if data.classes and initial.keeps_head and not names:
            check_unnamed_classes(data.classes, initial.path, config.data, run.model)
    initial = with_parts(initial, run.model, elsewhere, seed=config.seed)
    opened = {type(each): each.check_data(run, data) for each in config.active_features}
    parts.done("data")
    prepared = Prepared(
        start,
        progress,
        check,
        initial,
        data,
        objective_class(config),
        opened,
        parts,
        open_reports=functools.partial(Reports, expected_s=expected_s),
        open_hosts=HostFolders if checkpoints.ckpt_dir_per_host else None,
        open_local=LocalTier if checkpoints.local_ckpt_dir is not None else None,
    )
    return run, functools.partial(train, prepared)
