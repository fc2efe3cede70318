"""Trained models beside the one that trains, decided before any device starts: the run of
``--teacher``, of another model, and the weights of ``--gram_weights``, of the same one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models.config import ModelConfig
from training.checkpoints.format import EMA
from training.config import EmaConfig, LossConfig, RunConfig
from training.errors import UsageError
from training.files import folder_at
from training.initial_weights import InitialWeights, fit
from training.resolve import Run
from training.weights import weights_in, with_preprocessing_of


def with_teacher(run: Run[Any], resolve: Callable[[RunConfig], Run[Any]]) -> Run[Any]:
    """Return the run with that of its teacher, if it has one and is a training.

    ``resolve`` makes a run of a configuration as the backend does. Raises UsageError for a teacher
    that cannot run so, whose weights do not fit it, or that is for other images or classes than
    the student.
    """
    config, name = run.config, run.config.loss.teacher
    if name is None or config.use.eval_only or config.use.features or config.self_check:
        return run
    if run.mesh.domain > 1:
        raise UsageError(
            f"--teacher is incompatible with --mesh_domain {run.mesh.domain}: drop one of the two"
        )
    assert config.loss.teacher_weights is not None  # --teacher requires it
    weights = weights_in(folder_at(config.loss.teacher_weights), "--teacher_weights")
    try:
        if weights.run is not None:  # a checkpoint knows its model
            model = weights.run.model
            if model.model != name:
                raise UsageError(f"{weights.path} is of --model {model.model}")
        else:  # made for the student's images and classes
            channels, *spatial = run.model.sizes.input_shape
            model = ModelConfig(
                model=name,
                img_size=tuple(spatial),
                dimension=len(spatial) if len(spatial) > 2 else None,
                in_chans=channels,
                num_classes=run.model.sizes.num_classes,
            )
        # It is used, not trained: no optimizer state and no gradients, sharded as ZeRO-3.
        teacher = resolve(
            replace(
                config,
                model=model,
                data=replace(config.data, mean=None, std=None),  # the weights' own
                loss=LossConfig(),
                ema=EmaConfig(),
                optimizer=replace(config.optimizer, linear_probe=False),
                checkpoints=replace(config.checkpoints, resume=str(weights.path), resume_epoch=0),
                sharding=replace(config.sharding, grad_ckpt="full", reshard_after_forward=True),
                given=frozenset(),  # what was given is the student's
            )
        )
        weights.check_fits(teacher.model)
    except UsageError as error:
        raise UsageError(f"--teacher {name}: {error}") from None
    there, here = teacher.model.sizes, run.model.sizes
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
    return replace(run, teacher=with_preprocessing_of(weights, teacher)[1])


def gram_teacher(run: Run[Any]) -> InitialWeights:
    """Return the weights of ``--gram_weights``, as those of the run's model: of a checkpoint of
    ``--objective dino`` its teacher's.

    Raises UsageError for what is no such thing, or of another model.
    """
    assert run.config.objective.gram_weights is not None
    found = weights_in(folder_at(run.config.objective.gram_weights), "--gram_weights")
    if found.tensors is None and found.run and found.run.objective.has_teacher:
        found = replace(found, kind=EMA)
    try:
        return fit(found, run, None)
    except UsageError as error:
        raise UsageError(f"--gram_weights: {error}") from None
