"""The teachers of a training run: found, described and compared with the student before any device
starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models.config import ModelConfig
from models.dino import HEAD_SETTINGS
from training.checkpoints.format import EMA
from training.config import EmaConfig, RunConfig
from training.errors import UsageError
from training.objectives.config import LossConfig
from training.resolve import Run
from training.weights.adapt import Adapter, adapt
from training.weights.describe import check_described, describe, take_over_described
from training.weights.find import find
from training.weights.source import Source


def with_teacher(run: Run[Any], resolve: Callable[[RunConfig], Run[Any]]) -> Run[Any]:
    """Return the run with the run of its teacher, if it trains with one.

    ``resolve`` makes a run from a configuration, as the backend does. Raises UsageError for a
    teacher that cannot run this way, whose weights do not fit it, or whose images or classes differ
    from the student's.
    """
    config, name = run.config, run.config.loss.teacher
    if name is None or config.use.eval_only or config.use.features or config.self_check:
        return run
    if run.mesh.domain > 1:
        raise UsageError(
            f"--teacher is incompatible with --mesh_domain {run.mesh.domain}: drop one of the two"
        )
    assert config.loss.teacher_weights is not None  # --teacher requires it
    weights = weights_of_teacher(config.loss.teacher_weights, "--teacher_weights")
    objective, is_dino = config.objective, config.objective.has_teacher
    try:
        if weights.run is not None:  # a checkpoint records its model
            model = weights.run.model
            if model.model != name:
                raise UsageError(f"{weights.path} was trained with --model {model.model}")
            trained_for = weights.run.objective
            if is_dino and not trained_for.has_teacher:
                raise UsageError(
                    f"{weights.path} was trained with --objective {trained_for.objective}, not dino"
                )
            if is_dino:
                heads = {setting: getattr(trained_for, setting) for setting in HEAD_SETTINGS}
                objective = replace(objective, **heads)
        else:  # built for the student's images and classes
            channels, *spatial = run.model.sizes.input_shape
            model = ModelConfig(
                model=name,
                img_size=tuple(spatial),
                dimension=len(spatial) if len(spatial) > 2 else None,
                in_chans=channels,
                num_classes=run.model.sizes.num_classes,
            )
        # The teacher is not trained: no optimizer state and no gradients, sharded as ZeRO-3.
        teacher_config = replace(
            config,
            model=model,
            objective=objective,
            data=replace(config.data, mean=None, std=None),  # the weights' own
            loss=LossConfig(),
            ema=EmaConfig(),
            optimizer=replace(config.optimizer, linear_probe=False),
            checkpoints=replace(config.checkpoints, resume=str(weights.path), resume_epoch=0),
            sharding=replace(config.sharding, grad_ckpt="full", reshard_after_forward=True),
            explicitly_set=frozenset(),  # flags that are set are the student's
        )
        teacher = resolve(take_over_described(teacher_config, weights, keeps_head=not is_dino)[0])
        adapt(weights, teacher.model, unchanged=True)
    except UsageError as error:
        raise UsageError(f"--teacher {name}: {error}") from None
    there, here = teacher.model.sizes, run.model.sizes
    if there.input_shape != here.input_shape:
        images, wanted = (" x ".join(map(str, each.input_shape)) for each in (here, there))
        raise UsageError(
            f"--teacher {name} takes images of {wanted} (channels first), the student {images}: "
            "train the student with the teacher's --image_size and --in_chans"
        )
    if is_dino:
        for flag in ("dino_prototypes", "ibot_prototypes"):
            if (asked := getattr(config.objective, flag)) != (has := getattr(objective, flag)):
                raise UsageError(
                    f"--{flag} {asked}: --teacher {name} has {has}: use the same number"
                )
        if there.grid != here.grid:
            grids = (" x ".join(map(str, each.grid)) for each in (there, here))
            raise UsageError(
                f"--teacher {name} has {next(grids)} patches, the student {next(grids)}, but the "
                "two are compared patch by patch: train the student with the teacher's "
                "--patch_size"
            )
    elif there.num_classes != here.num_classes:
        raise UsageError(
            f"--teacher {name} has {there.num_classes} classes, the student {here.num_classes}: "
            "use another teacher, or change --num_classes"
        )
    return replace(run, teacher=teacher)


def weights_of_teacher(path: str, flag: str) -> Source:
    """Return the weights that ``flag`` names by ``path``; from a checkpoint of ``--objective
    dino``, those of its teacher. Raises UsageError if there are none."""
    found = find(path, flag)
    if found.tensors is None and found.run and found.run.objective.has_teacher:
        found = replace(found, kind=EMA)
    return found


def gram_teacher(run: Run[Any]) -> Adapter:
    """Return the weights of ``--gram_weights``, adapted to the run's model.

    Raises UsageError if they do not exist or are of another model.
    """
    assert run.config.objective.gram_weights is not None
    found = weights_of_teacher(run.config.objective.gram_weights, "--gram_weights")
    try:
        check_described(run.config.model, describe(found), keeps_head=False)
        return adapt(found, run.model, seed=run.config.seed)
    except UsageError as error:
        raise UsageError(f"--gram_weights: {error}") from None
