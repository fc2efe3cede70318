"""The teachers of a training run: found, described and compared with the student before any device
starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from models.config import ModelConfig
from models.dino import HEAD_SETTINGS
from training.checkpoints.format import EMA
from training.config import EmaConfig, RunConfig
from training.errors import UsageError
from training.objectives.config import LossConfig
from training.objectives.dino_config import DinoConfig
from training.objectives.distillation_config import DistillationConfig
from training.objectives.mixup_config import MixupConfig
from training.resolve import Run
from training.weights.adapt import Adapter, adapt
from training.weights.describe import check_described, describe, take_over_described
from training.weights.find import find
from training.weights.source import Source

AnyRun = TypeVar("AnyRun", bound=Run)


def with_teacher(run: AnyRun, resolve: Callable[[RunConfig], AnyRun]) -> AnyRun:
    """Return the run with the run of its teacher, if it trains with one.

    ``resolve`` makes a run from a configuration, as the backend does. Raises UsageError for a
    teacher that cannot run this way, whose weights do not fit it, or whose images or classes differ
    from the student's.
    """
    config, distillation = run.config, run.config.of(DistillationConfig)
    name = distillation.teacher
    if name is None or config.use.eval_only or config.use.features or config.self_check:
        return run
    assert distillation.teacher_weights is not None  # --teacher requires it
    weights = weights_of_teacher(distillation.teacher_weights, "--teacher_weights")
    dino, is_dino = config.of(DinoConfig), config.objective.has_teacher
    try:
        if weights.run is not None:  # a checkpoint records its model
            model = weights.run.model
            if model.model != name:
                raise UsageError(f"{weights.path} was trained with --model {model.model}")
            objective, of_teacher = weights.run.config.objective, weights.run.config.of(DinoConfig)
            if is_dino and not objective.has_teacher:
                raise UsageError(
                    f"{weights.path} was trained with --objective {objective.objective}, not dino"
                )
            if is_dino:
                heads = {setting: getattr(of_teacher, setting) for setting in HEAD_SETTINGS}
                dino = replace(dino, **heads)
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
            data=replace(config.data, mean=None, std=None),  # the weights' own
            loss=LossConfig(),
            ema=EmaConfig(),
            optimizer=replace(config.optimizer, linear_probe=False),
            checkpoints=replace(config.checkpoints, resume=str(weights.path), resume_epoch=0),
            sharding=replace(config.sharding, grad_ckpt="full", reshard_after_forward=True),
            explicitly_set=frozenset(),  # flags that are set are the student's
        )
        teacher_config = teacher_config.with_flags(dino, MixupConfig(), DistillationConfig())
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
            if (asked := getattr(config.of(DinoConfig), flag)) != (has := getattr(dino, flag)):
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
    if found.tensors is None and found.run and found.run.config.objective.has_teacher:
        found = replace(found, kind=EMA)
    return found


def gram_teacher(run: Run) -> Adapter:
    """Return the weights of ``--gram_weights``, adapted to the run's model.

    Raises UsageError if they do not exist or are of another model.
    """
    path = run.config.of(DinoConfig).gram_weights
    assert path is not None
    found = weights_of_teacher(path, "--gram_weights")
    try:
        check_described(run.config, describe(found), keeps_head=False)
        return adapt(found, run.model, seed=run.config.seed)
    except UsageError as error:
        raise UsageError(f"--gram_weights: {error}") from None
