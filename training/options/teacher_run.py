"""The run of ``--teacher``: on the same devices, of another model; decided before any starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from models.config import ModelConfig
from training.errors import UsageError
from training.options.config import RunConfig
from training.options.ema_config import EmaConfig
from training.options.flag_rules import from_values
from training.options.loss_config import LossConfig
from training.options.resolve import Run
from training.url_path import folder_at

if TYPE_CHECKING:
    from models.spec import ModelSpec
    from training.trained_weights.weights import Weights

FLAG = "--teacher_weights"


def with_teacher(run: Run[Any], resolve: Callable[[RunConfig], Run[Any]]) -> Run[Any]:
    """Return the run with that of its teacher, if it has one and is a training.

    ``resolve`` makes a run of a configuration as the backend does. Raises UsageError for a teacher
    that cannot run so, whose weights do not fit it, or that is for other images or classes than
    the student.
    """
    loss, config = run.config.loss, run.config
    if loss.teacher is None or config.use.eval_only or config.self_check:
        return run
    if run.mesh.domain > 1:
        raise UsageError(
            f"--teacher does not go with --mesh_domain {run.mesh.domain}: drop one of the two"
        )
    from training.trained_weights.weights import (
        weights_in,  # with torch: what is known without it is told before
    )
    from training.trained_weights.weights_preprocessing import with_preprocessing_of

    assert loss.teacher_weights is not None  # the flag needs it
    weights = weights_in(folder_at(loss.teacher_weights), FLAG)
    try:
        teacher = resolve(_configuration(run, weights))
        weights.check_fits(teacher.model)
    except UsageError as error:
        raise UsageError(f"--teacher {loss.teacher}: {error}") from None
    _check_alike(loss.teacher, teacher.model, run.model)
    return replace(run, teacher=with_preprocessing_of(weights, teacher)[1])


def _configuration(run: Run[Any], weights: Weights) -> RunConfig:
    """Return what the teacher is resolved from: it is used, not trained, and shards as ZeRO-3."""
    config = run.config
    return replace(
        config,
        model=_model(run, weights),
        data=replace(config.data, mean=None, std=None),  # the weights' own
        loss=LossConfig(),
        ema=EmaConfig(),
        optimizer=replace(config.optimizer, linear_probe=False),
        checkpoints=replace(config.checkpoints, resume=str(weights.path), resume_epoch=0),
        sharding=replace(config.sharding, grad_ckpt="full", reshard_after_forward=True),
    )


def _model(run: Run[Any], weights: Weights) -> ModelConfig:
    """Return the teacher's model: as a checkpoint has it, else made for what the student is."""
    name = run.config.loss.teacher
    if weights.run is not None:
        saved: ModelConfig = from_values(ModelConfig, weights.run.arguments)
        if saved.model != name:
            raise UsageError(f"{weights.path} is of --model {saved.model}")
        return saved
    channels, *spatial = run.model.sizes.input_shape
    return ModelConfig(
        model=name,
        img_size=tuple(spatial),
        dimension=len(spatial) if len(spatial) > 2 else None,
        in_chans=channels,
        num_classes=run.model.sizes.num_classes,
    )


def _check_alike(name: str, teacher: ModelSpec, student: ModelSpec) -> None:
    there, here = teacher.sizes, student.sizes
    if there.input_shape != here.input_shape:
        images, wanted = (" x ".join(map(str, each.input_shape)) for each in (here, there))
        raise UsageError(
            f"--teacher {name} is for images of {wanted} (channels first), the student for "
            f"{images}: give the student --image_size and --in_chans of the teacher"
        )
    if there.num_classes != here.num_classes:
        raise UsageError(
            f"--teacher {name} has {there.num_classes} classes, the student {here.num_classes}: "
            "give another teacher, or --num_classes"
        )
