"""Use a trained model: classify images (--predict), or evaluate it on val/ (--eval_only).

Writes no files unless requested.
"""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from data import volumes
from data.batch import Batch
from data.class_order import in_order
from data.decode import find_images, open_image, read_batches
from data.files import printable, read_bytes, without_secrets
from data.images import reading_of, view_of_images
from data.index import class_folders
from data.source import DataSource
from training.backend import Backend
from training.checkpoints.compatible import check_same_classes, check_unnamed_classes
from training.config import RunConfig
from training.data import dataset_request, input_of, open_images
from training.errors import NOT_FINITE, RunFailed, UsageError, data_errors_as_usage_errors
from training.evaluation.class_report import gather_class_report
from training.evaluation.evaluate import evaluate
from training.evaluation.label_report import gather_label_report
from training.evaluation.report import Report, report_folder, write_report
from training.evaluation.trained import adapt_trained, open_trained
from training.files import folder_at
from training.logs.bad_images import VAL
from training.logs.sinks import as_json
from training.mesh import Mesh
from training.objectives.base import Measure
from training.objectives.classify import TOP, Accuracy, Classification
from training.objectives.multi_label import LabelEvaluation, LabelRanking
from training.objectives.registry import objective_class, open_objective
from training.resolve import Run, resolve_model
from training.step import val_loader
from training.weights.adapt import Adapter
from training.weights.describe import describe
from training.weights.source import Source, check_files

_BATCH_SIZE = 32


def _log(line: str) -> None:
    """Print on stderr, above the progress bar: stdout is for the result."""
    tqdm.write(without_secrets(line), file=sys.stderr)


def _named_classes(names: list[str] | None, num_classes: int) -> list[str]:
    """Return names by label: these, else "class <label>"."""
    names = names or []
    if len(names) > num_classes:  # the folders belong to another model
        names = []
    return names + [f"class {label}" for label in range(len(names), num_classes)]


# -- --predict ------------------------------------------------------------------------------------


class Predictor(NamedTuple):
    """What is predicted of an image: which of several words it has."""

    noun: str
    """What the words are, in JSON."""
    words: Sequence[str]
    open: Callable[[nn.Module, torch.device], Callable[[Batch], torch.Tensor]]
    """Takes the model, which has its weights, and its device. Returns the function from a batch of
    images, on that device, to the probabilities of the words, (images, words)."""


def _classifier(source: Source, run: Run) -> Predictor:
    """Return what a classifier predicts: classes. Raises UsageError for another model."""
    config, spec = run.config, run.model
    if config.objective.objective != "classify":
        raise UsageError(
            f"--predict requires a classifier, but {source.path} was trained with --objective "
            f"{config.objective.objective}: fine-tune it with --init_from first"
        )
    folders = class_folders(config.data.data_dir, "train") or []
    names = describe(source).class_names
    if names is None:
        check_unnamed_classes(folders, source.path, config.data, spec)
        names = in_order(folders, config.data.class_order, config.data.class_map)
    objective = objective_class(config)
    assert issubclass(objective, Classification)

    def open_model(model: nn.Module, device: torch.device) -> Callable[[Batch], torch.Tensor]:
        model_input = input_of(run, lambda values: values.to(device))
        return lambda batch: objective.probabilities(model(model_input(batch)))

    return Predictor("class", _named_classes(names, spec.sizes.num_classes), open_model)


@data_errors_as_usage_errors()
def predict_images(config: RunConfig, source: Source) -> None:
    """Print the most probable classes of each image of ``--predict``, or what else the model
    predicts, with plain PyTorch."""
    config, spec = resolve_model(config)
    run = Run(config, None, spec, Mesh(), None)
    assert config.use.predict is not None
    by_features = (feature.predictor(run) for feature in config.active_features)
    predictor = next(filter(None, by_features), None) or _classifier(source, run)
    names = predictor.words
    in_arrays = config.data.data_source == "volumes"
    images = find_images(config.use.predict, volumes.SUFFIXES if in_arrays else None)
    for folder in images.unreadable:
        _log(f"skipped {printable(folder)}")
    if images.passed_over:
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in images.passed_over.most_common())
        count = images.passed_over.total()
        _log(f"skipped {count:,} other files in the folders: {printable(kinds)}")
    adapter = adapt_trained(source, run)
    if adapter.note:
        _log(adapter.note)

    make, batch_size = _reader(run, images.paths, in_arrays=in_arrays)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_files(source, verify=config.checkpoints.verify_checkpoint)
    model = spec.build()
    for name, unit in spec.units(model):
        adapter.initialize(unit, name)
        unit.to(device)
    model.eval()
    precisions = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    lower = precisions[config.sharding.precision]
    with torch.inference_mode():
        probabilities_of = predictor.open(model, device)

    results: list[dict] = []
    broken: dict[Path, str] = {}
    with tqdm(total=len(images.paths), unit="image", dynamic_ncols=True, disable=None) as bar:

        def leave_out(path: Path, reason: str) -> None:
            broken[path] = f"{printable(str(path))} is not a readable image: {reason}"
            if path not in images.named:
                _log(broken[path])
            bar.update()

        for paths, batch in read_batches(images.paths, make, batch_size, leave_out):
            with (
                torch.inference_mode(),
                torch.autocast(device.type, dtype=lower, enabled=lower is not None),
            ):
                found = probabilities_of({name: x.to(device) for name, x in batch.items()})
            probabilities = found.float().cpu()
            values, indices = probabilities.topk(min(TOP, probabilities.shape[-1]))
            for path, labels, likelihoods in zip(
                paths, indices.tolist(), values.tolist(), strict=True
            ):
                top = list(zip(labels, likelihoods, strict=True))  # the most probable first
                if config.use.json:
                    top5 = [
                        {predictor.noun: names[i], "index": i, "probability": p} for i, p in top
                    ]
                    results.append({"image": without_secrets(str(path)), "top5": top5})
                else:
                    rows = (f"{p:10.2%}  {printable(names[i])}" for i, p in top)
                    tqdm.write("\n".join([printable(str(path)), *rows]))
            bar.update(len(paths))
    if config.use.json:
        print(json.dumps(results, indent=2))

    # After all results, unreadable images that were named explicitly end the program.
    mistakes = [line for path, line in broken.items() if path in images.named]
    for line in mistakes[:-1]:
        _log(line)
    if mistakes:
        raise UsageError(mistakes[-1])
    if len(broken) == len(images.paths):
        raise UsageError("none of the images can be read")


def _reader(run: Run, paths: list[Path], *, in_arrays: bool) -> tuple[Callable[[int], Batch], int]:
    """Return the function that reads the image of a number, and how many to compute at once.
    Raises DataFolderError."""
    request = dataset_request(run, with_train=False, augment=False)
    if in_arrays:
        split = volumes.open_files(request, list(map(str, paths)))
        return lambda number: split.load_sample(number, 0, number), 1  # one may fill the device
    transform = view_of_images(request).transforms(request)["val"]
    return lambda number: transform(
        open_image(read_bytes(str(paths[number])), reading_of(request))
    ), _BATCH_SIZE


# -- --eval_only ----------------------------------------------------------------------------------


class Evaluated(NamedTuple):
    """What ``--eval_only`` measures."""

    data: DataSource
    names: list[str]
    """Of the classes, by label."""
    open: Callable[[nn.Module, Run, Backend], tuple[nn.Module, Measure]]
    """Takes the trained model on the devices; returns the model that is measured, and the
    measure. All processes call it."""


def _of_objective(model: nn.Module, run: Run, backend: Backend) -> tuple[nn.Module, Measure]:
    return model, open_objective(run, backend).measure()


def prepare_evaluation(source: Source, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run, and the function to run in every process. Raises UsageError."""
    if run.config.use.eval_report:
        report_folder(run)
    by_features = (feature.evaluated(run) for feature in run.config.active_features)
    evaluated = next(filter(None, by_features), None)
    if evaluated is None:
        data = open_images(run, with_train=False)
        hints = describe(source)
        check_same_classes(hints.classes_among(data.classes), source.path, data, run)
        names = hints.classes or data.classes or hints.class_names
        names = _named_classes(names, run.model.sizes.num_classes)
        evaluated = Evaluated(data, names, _of_objective)
    return run, functools.partial(_evaluate_weights, adapt_trained(source, run), evaluated)


@data_errors_as_usage_errors()
def _evaluate_weights(adapter: Adapter, evaluated: Evaluated, run: Run, backend: Backend) -> None:
    use, data, names = run.config.use, evaluated.data, evaluated.names
    loader = val_loader(data, backend, run.config.data.global_micro_batch_size)
    model, bad_images, say = open_trained(adapter, data, run, backend)

    say("evaluating ...")
    model, measure = evaluated.open(model, run, backend)
    if isinstance(measure, Accuracy):
        measure.keeps_predictions = bool(use.eval_report or use.json)
    result = evaluate(model, measure, loader, backend, run.config.log.eval_batches or 0)
    assert result is not None  # nothing stops it
    bad_images.collect(VAL, loader, say)
    bad_images.check()
    if not result.images:
        raise UsageError(f"no image of {data.name}/val can be read", agreed=True)
    result = bad_images.excluding_unreadable(result, names)
    say(str(result))
    for line in result.by_class.lines() if result.by_class else ():
        say(line)
    rows = result.figures_by_label(names)
    for row in rows:
        say(", ".join(f"{name}: {value}" for name, value in row.items()))
    report: Report | None = None
    if use.eval_report or use.json:
        split = data.splits[VAL]
        if isinstance(measure, Accuracy):
            report = gather_class_report(measure.predictions(), backend, split, names)
        elif isinstance(measure, LabelRanking) and isinstance(result, LabelEvaluation):
            report = gather_label_report(measure, result, backend, split, names)
        else:
            found = (each.report(measure, split) for each in run.config.active_features)
            report = next(filter(None, found), None)
    if report and use.eval_report:
        about = f"{run.config.model.model}, weights of {adapter.title}, on {data}"
        try:
            write_report(report, result, about, folder_at(use.eval_report), say)
        except OSError as error:
            raise UsageError(
                f"cannot write to --eval_report {use.eval_report}: {error.strerror}"
            ) from None
        say(f"{report.title}: {use.eval_report}")
    if use.json and backend.is_main:
        left_out = {"bad_images": result.left_out, "lost_classes": result.lost_classes}
        by_label = {"by_class": rows} if rows else {}
        print(as_json(result.values | left_out | by_label | (report.values if report else {})))
    if not result.is_finite:
        raise RunFailed(f"the val loss of {adapter.path} is not finite", NOT_FINITE)
