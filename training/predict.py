"""Use a trained model: name what images show (--predict), or measure it on val/ (--eval_only).

Writes no file unless asked.
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from data.decode import find_images, read_batches
from data.files import printable
from data.index import class_folders
from data.source import DataSource, open_data
from data.transforms import val_transform
from training.backend import Backend, bad_data_is_the_users, dataset_request, val_loader
from training.begin import (
    check_same_classes,
    check_same_training,
    check_weights,
    with_saved_model,
    with_saved_objective,
)
from training.checkpoints.state import load_state
from training.config import RunConfig
from training.errors import UsageError
from training.evaluate import TOP, Predictions, evaluate, write_report
from training.files import check_folder_writable, folder_at, is_url
from training.initial_weights import InitialWeights
from training.logs.bad_images import VAL, BadImages
from training.mesh import Mesh
from training.objectives import normalizer, open_objective
from training.objectives.classify import Classification
from training.processes.exchange import check_alike
from training.resolve import Run, model_of, resolve_model
from training.weights import Weights, find_weights, with_preprocessing_of

_BATCH_SIZE = 32
_BAR_FROM = 10
"""The number of images from which on --predict shows a progress bar."""
_KINDS_SHOWN = 5  # of files skipped


def find_trained(config: RunConfig) -> tuple[RunConfig, Weights]:
    """Find the weights that the flags name, and the configuration with the model that they are of.

    A checkpoint's own model takes the place of what was not given. Raises UsageError for a
    checkpoint that cannot be read, and for one that contradicts the model flags.
    """
    of = config.checkpoints
    ema = config.use.use_ema
    weights = find_weights(folder_at(of.ckpt_dir), of.resume, of.resume_epoch, use_ema=ema)
    if weights.run:
        config = with_saved_objective(weights.run, config)
        model = model_of(with_saved_model(weights.run, config.model), config.objective)
        check_same_training(weights.run, model, None)
        config = replace(config, model=weights.run.model)
    config, model = resolve_model(config)
    weights.check_fits(model)
    return config, weights


def _log(line: str) -> None:
    """Print on stderr, above the progress bar: stdout has the result alone."""
    tqdm.write(line, file=sys.stderr)


def _class_names(weights: Weights, of_data: list[str], num_classes: int) -> list[str]:
    """Return names by label: the checkpoint's, else the data's, else "class <label>"."""
    known = weights.run.classes if weights.run else None
    names = of_data if known is None else known
    if len(names) > num_classes:  # the folder is another model's
        names = []
    return names + [f"class {label}" for label in range(len(names), num_classes)]


# -- --predict ------------------------------------------------------------------------------------


@bad_data_is_the_users()
def predict(config: RunConfig, weights: Weights) -> None:
    """Print the most likely classes of every image of ``--predict``, in plain PyTorch."""
    if config.objective.objective != "classify":
        raise UsageError(
            f"--predict requires a classifier, {weights.path} was trained with --objective "
            f"{config.objective.objective}: fine-tune it with --init_from first"
        )
    config, spec = resolve_model(config)
    weights, run = with_preprocessing_of(weights, Run[Any](config, None, spec, Mesh()))
    config = run.config
    assert config.use.predict is not None
    found = find_images(config.use.predict)
    for folder in found.unreadable:
        _log(f"skipped {printable(folder)}")
    if found.passed_over:
        kinds = ", ".join(
            f"{kind} {n:,}" for kind, n in found.passed_over.most_common(_KINDS_SHOWN)
        )
        more = ", ..." if len(found.passed_over) > _KINDS_SHOWN else ""
        count = found.passed_over.total()
        _log(f"skipped in the folders, {count:,} in all: {printable(kinds)}{more}")
    if weights.note:
        _log(weights.note)

    of_data = class_folders(config.data.data_dir, "train") or []
    names = _class_names(weights, of_data, spec.sizes.num_classes)
    channels, *size = spec.sizes.input_shape
    transform = val_transform(config.data.preprocessing, tuple(size), channels)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_weights(weights, verify=config.checkpoints.verify_checkpoint)
    model = spec.build()
    for name, unit in spec.units(model):
        weights.fill(unit, name)
        unit.to(device)
    model.eval()
    normalize = normalizer(run, lambda values: values.to(device))

    results: list[dict] = []
    broken: dict[Path, str] = {}
    hide = None if len(found.paths) >= _BAR_FROM else True  # None: shown on a terminal
    with tqdm(total=len(found.paths), unit="image", dynamic_ncols=True, disable=hide) as bar:

        def leave_out(path: Path, reason: str) -> None:
            broken[path] = f"{printable(str(path))} is not a readable image: {reason}"
            if path not in found.named:
                _log(broken[path])
            bar.update()

        for paths, batch in read_batches(found.paths, transform, _BATCH_SIZE, leave_out):
            images = normalize(batch.to(device))
            top_of_each = _top_classes(model, images, config.sharding.precision)
            for path, top in zip(paths, top_of_each, strict=True):
                if config.use.json:
                    likely = [{"class": names[i], "index": i, "probability": p} for i, p in top]
                    results.append({"image": str(path), "top5": likely})
                else:
                    rows = (f"{p:10.2%}  {printable(names[i])}" for i, p in top)
                    tqdm.write("\n".join([printable(str(path)), *rows]))
            bar.update(len(paths))
    if config.use.json:
        print(json.dumps(results, indent=2))

    mistakes = [line for path, line in broken.items() if path in found.named]
    for line in mistakes[:-1]:
        _log(line)
    if mistakes:  # the last one ends the program, after the others' results
        raise UsageError(mistakes[-1])
    if len(broken) == len(found.paths):
        raise UsageError("none of the images can be read")


@torch.inference_mode()
def _top_classes(
    model: torch.nn.Module, images: torch.Tensor, precision: str
) -> list[list[tuple[int, float]]]:
    """Return each image's most likely classes and their probabilities, the highest first."""
    lower = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.autocast(images.device.type, dtype=lower, enabled=lower is not None):
        logits = model(images)
    probabilities = logits.float().softmax(dim=-1)
    values, indices = probabilities.topk(min(TOP, probabilities.shape[-1]))
    return [
        list(zip(*row, strict=True)) for row in zip(indices.tolist(), values.tolist(), strict=True)
    ]


def printer(backend: Backend, *, json: bool = False) -> Callable[[str], None]:
    """Return what prints a line in the first process; on stderr if stdout is for ``json`` alone."""

    def say(text: str) -> None:
        if backend.is_main:
            print(text, file=sys.stderr if json else sys.stdout, flush=True)

    return say


def place_trained(
    weights: Weights,
    run: Run,
    backend: Backend,
    say: Callable[[str], None],
    initial: InitialWeights | None = None,
) -> nn.Module:
    """Put the model on the devices with trained weights, and say which; return it.

    ``initial``: how weights of another model become this one's.
    """
    check_weights(weights, verify=run.config.checkpoints.verify_checkpoint)
    model, count = run.build_model(backend.constant), run.model.parameter_count
    kind = "EMA of the weights" if run.config.use.use_ema else "weights"
    say(f"model: {run.config.model.model}, {count:,} parameters, {kind} of {weights.path}")
    if note := initial.note if initial else weights.note:
        say(note)
    units = list(run.model.units(model))
    if initial:
        return backend.shard(model, units, initial.initialize)
    sharded = backend.shard(model, units, weights.initialize)
    if weights.tensors is None:
        use_ema = run.config.use.use_ema
        load_state(backend, weights.path, with_optimizer=False, use_ema=use_ema)
    return sharded


# -- --eval_only ----------------------------------------------------------------------------------


@bad_data_is_the_users()
def prepare_evaluation(weights: Weights, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run with its data, and the body of every process. Raises UsageError."""
    if run.config.use.eval_report:
        folder = folder_at(run.config.use.eval_report)
        if is_url(folder):
            raise UsageError(f"--eval_report {folder}: give a folder of this machine")
        check_folder_writable(folder, "--eval_report")
    weights, run = with_preprocessing_of(weights, run)
    labels = run.config.objective.uses_labels
    data = open_data(dataset_request(run, with_train=False, labels=labels))
    check_same_classes(weights.run.classes if weights.run else None, weights.path, data)
    return run, functools.partial(_evaluate_weights, weights, data)


@bad_data_is_the_users()
def _evaluate_weights(weights: Weights, data: DataSource, run: Run, backend: Backend) -> None:
    use, pass_size = run.config.use, run.config.data.pass_size
    say = printer(backend, json=use.json)

    check_alike(run, data)
    loader = val_loader(data, backend, pass_size)
    say(f"data: {data}")
    sharded = place_trained(weights, run, backend, say)
    say(backend.describe())

    # Evaluate.
    say("evaluating" + (" (compiling takes a while) ..." if backend.compiles else " ..."))
    objective, predictions = open_objective(run, backend), None
    measure = objective.measure(data.val_length)
    if use.eval_report:
        assert isinstance(objective, Classification)
        predictions = Predictions(backend, pass_size)
        measure = objective.measure(data.val_length, predictions)
    result = evaluate(sharded, measure, loader, backend)
    assert result is not None  # nothing stops it
    bad_images = BadImages(run.config.data.max_bad_images, data, is_main=backend.is_main)
    bad_images.collect(VAL, loader, _log if backend.is_main else lambda line: None)
    if bad_images.excess:
        raise UsageError(bad_images.excess, agreed=True)
    if not result.images:
        raise UsageError(f"no image of {data.name}/val can be read", agreed=True)
    names = _class_names(weights, data.classes or [], run.model.sizes.num_classes)
    result = bad_images.left_out_of(result, names)

    # Print and write what was found.
    say(str(result))
    if not backend.is_main:
        return
    if use.eval_report and predictions:
        try:
            write_report(predictions.all(), names, folder_at(use.eval_report))
        except OSError as error:
            raise UsageError(
                f"cannot write to --eval_report {use.eval_report}: {error.strerror}"
            ) from None
        say(f"report on {len(names):,} classes: {use.eval_report}")
    if use.json:
        left_out = {"bad_images": result.left_out, "lost_classes": result.lost_classes}
        print(json.dumps(result.values | left_out))
