"""Use a trained model: name what images show (--predict), or measure it on val/ (--eval_only).

Writes no file unless asked.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.decode import find_images, read_batches
from data.files import printable
from data.index import class_folders, in_order
from data.source import DataSource, open_data
from data.transforms import val_transform
from training.backend import Backend, data_errors_as_usage_errors, dataset_request, val_loader
from training.checkpoints.compatible import check_same_classes, check_unnamed_classes
from training.config import RunConfig
from training.errors import NOT_FINITE, RunFailed, UsageError
from training.evaluation.evaluate import TOP, Predictions, evaluate, write_report
from training.files import check_folder_writable, folder_at, is_url
from training.initial_weights import place_trained, printer
from training.logs.bad_images import VAL, BadImages
from training.logs.records import as_json
from training.mesh import Mesh
from training.objectives.classify import Classification
from training.objectives.objective import normalizer, open_objective
from training.processes.exchange import check_alike
from training.resolve import Run, resolve_model
from training.weights import Weights, check_weights

_BATCH_SIZE = 32
_BAR_FROM = 10
"""The number of images from which on --predict shows a progress bar."""
_KINDS_SHOWN = 5  # of files skipped


def _log(line: str) -> None:
    """Print on stderr, above the progress bar: stdout has the result alone."""
    tqdm.write(line, file=sys.stderr)


def _class_names(weights: Weights, of_data: list[str], num_classes: int) -> list[str]:
    """Return names by label: the checkpoint's, else the data's, else "class <label>"."""
    names = of_data if weights.classes is None else weights.classes
    if len(names) > num_classes:  # the folder is another model's
        names = []
    return names + [f"class {label}" for label in range(len(names), num_classes)]


# -- --predict ------------------------------------------------------------------------------------


@data_errors_as_usage_errors()
def predict_images(config: RunConfig, weights: Weights) -> None:
    """Print the most likely classes of every image of ``--predict``, in plain PyTorch."""
    if config.objective.objective != "classify":
        raise UsageError(
            f"--predict requires a classifier, {weights.path} was trained with --objective "
            f"{config.objective.objective}: fine-tune it with --init_from first"
        )
    config, spec = resolve_model(config)
    run = Run[Any](config, None, spec, Mesh())
    assert config.use.predict is not None
    of_data = class_folders(config.data.data_dir, "train") or []
    if not weights.classes:
        check_unnamed_classes(of_data, weights.path, config.data, spec)
    of_data = in_order(of_data, config.data.class_order, config.data.class_map)
    names = _class_names(weights, of_data, spec.sizes.num_classes)
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
    precisions = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    lower = precisions[config.sharding.precision]

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
            with (
                torch.inference_mode(),
                torch.autocast(device.type, dtype=lower, enabled=lower is not None),
            ):
                logits = model(images)
            probabilities = logits.float().softmax(dim=-1)
            values, indices = probabilities.topk(min(TOP, probabilities.shape[-1]))
            for path, *of_image in zip(paths, indices.tolist(), values.tolist(), strict=True):
                top = list(zip(*of_image, strict=True))  # (class, probability), the highest first
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


# -- --eval_only ----------------------------------------------------------------------------------


@data_errors_as_usage_errors()
def prepare_evaluation(weights: Weights, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run with its data, and the body of every process. Raises UsageError."""
    if run.config.use.eval_report:
        folder = folder_at(run.config.use.eval_report)
        if is_url(folder):
            raise UsageError(f"--eval_report {folder}: give a folder of this machine")
        check_folder_writable(folder, "--eval_report")
    labels = run.config.objective.uses_labels
    data = open_data(dataset_request(run, with_train=False, labels=labels))
    check_same_classes(weights.classes, weights.path, data, run)
    return run, functools.partial(_evaluate_weights, weights, data)


@data_errors_as_usage_errors()
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
    result = bad_images.excluding_unreadable(result, names)

    # Print and write what was found.
    say(str(result))
    if use.eval_report and predictions and backend.is_main:
        try:
            write_report(predictions.all(), names, folder_at(use.eval_report), say)
        except OSError as error:
            raise UsageError(
                f"cannot write to --eval_report {use.eval_report}: {error.strerror}"
            ) from None
        say(f"report on {len(names):,} classes: {use.eval_report}")
    if use.json and backend.is_main:
        left_out = {"bad_images": result.left_out, "lost_classes": result.lost_classes}
        print(as_json(result.values | left_out))
    if not result.is_finite:
        raise RunFailed(f"the val loss of {weights.path} is not finite", NOT_FINITE)
