"""Use a trained model: name what images show, or measure it on val/. Writes no file."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from data.build import DataSource, build_val_loader, open_validation_data
from data.image_files import find_images, read_batches
from data.image_folder import DataFolderError, class_folders, val_transform
from models.config import PRESETS
from models.vit import build_vit, fsdp_units
from training.arguments import DEFAULT_MODEL, MODEL_FLAG, model_config
from training.backend import Backend
from training.checkpoint import SavedRun
from training.errors import UsageError
from training.evaluation import evaluate
from training.validation import check_model, check_run, check_same_model
from training.weights import Weights, find_weights

_TOP = 5
_BATCH_SIZE = 32
_BAR_FROM = 10  # images


def open_trained(args: argparse.Namespace) -> Weights:
    """Find the weights that the flags name; a checkpoint's own model becomes that of ``args``.

    ``args.model`` is None if the command line does not give it. Raises UsageError for a
    checkpoint that cannot be read, and for one that contradicts the model flags.
    """
    weights = find_weights(Path(args.ckpt_dir), args.resume, args.resume_epoch)
    if weights.run:
        _take_model(args, weights.run)
    args.model = args.model or DEFAULT_MODEL
    config = model_config(args)
    check_model(config)
    weights.check_fits(config)
    return weights


def _take_model(args: argparse.Namespace, run: SavedRun) -> None:
    saved = {name: run.arguments.get(name) for name in ("model", *MODEL_FLAG)}
    if saved["model"] not in PRESETS:
        raise UsageError(f"{run.path} was trained with --model {saved['model']}, unknown here")
    given = {name: getattr(args, name) for name in saved}
    if given["model"] in (None, saved["model"]):  # a flag alone; another preset brings all its own
        given = saved | {name: value for name, value in given.items() if value is not None}
    check_same_model(run, model_config(argparse.Namespace(**given)))
    vars(args).update(saved)


@contextlib.contextmanager
def _bad_data_is_the_users() -> Iterator[None]:
    try:
        yield
    except DataFolderError as error:  # from a loader process with a traceback
        raise UsageError(str(error).strip().splitlines()[-1]) from None


# -- predict --------------------------------------------------------------------------


@_bad_data_is_the_users()
def predict(args: argparse.Namespace, weights: Weights) -> None:
    """Print the likeliest classes of every image of ``args.predict``, in plain PyTorch."""
    config = model_config(args)
    images = find_images(args.predict)
    names = _class_names(weights, args.data_dir, config.num_classes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = weights.plain_model(config, device)
    transform = val_transform(config.img_size, config.in_chans)
    results = []
    hide = None if len(images) >= _BAR_FROM else True  # None: shown on a terminal
    with tqdm(total=len(images), unit="image", dynamic_ncols=True, disable=hide) as bar:
        for paths, batch in read_batches(images, transform, _BATCH_SIZE):
            for path, top in zip(paths, _top_classes(model, batch, args.precision), strict=True):
                if args.json:
                    found = [{"class": names[i], "index": i, "probability": p} for i, p in top]
                    results.append({"image": str(path), "top5": found})
                else:
                    rows = (f"{p:10.2%}  {names[i]}" for i, p in top)
                    tqdm.write("\n".join([str(path), *rows]))
            bar.update(len(paths))
    if args.json:
        print(json.dumps(results, indent=2))


@torch.inference_mode()
def _top_classes(
    model: nn.Module, images: torch.Tensor, precision: str
) -> list[list[tuple[int, float]]]:
    """For each image the likeliest classes and their probabilities, from the highest down."""
    device = next(model.parameters()).device
    lower = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.autocast(device.type, dtype=lower, enabled=lower is not None):
        logits = model(images.to(device))
    probabilities = logits.float().softmax(dim=-1)
    values, indices = probabilities.topk(min(_TOP, probabilities.shape[-1]))
    return [
        list(zip(*row, strict=True)) for row in zip(indices.tolist(), values.tolist(), strict=True)
    ]


def _class_names(weights: Weights, data_dir: str, num_classes: int) -> list[str]:
    """By label: from the checkpoint, else from ``data_dir``/train, else "class <label>"."""
    known = weights.run.classes if weights.run else None
    names = class_folders(data_dir, "train") if known is None else known
    if len(names) > num_classes:  # the folder is another model's
        names = []
    return names + [f"class {label}" for label in range(len(names), num_classes)]


# -- evaluate -------------------------------------------------------------------------


@_bad_data_is_the_users()
def prepare_evaluation(
    weights: Weights, args: argparse.Namespace, device_count: int
) -> Callable[[argparse.Namespace, Backend], None]:
    """The body of every process, once everything was checked. Raises UsageError."""
    check_run(args, device_count)
    data = open_validation_data(args, model_config(args))
    _check_same_classes(weights, data)
    return functools.partial(_evaluate_weights, weights, data)


def _check_same_classes(weights: Weights, data: DataSource) -> None:
    """Labels are positions among the folders: one folder less, and all after it are wrong."""
    trained = weights.run.classes if weights.run else None
    if trained is None or data.classes is None:
        return
    for label, (there, here) in enumerate(zip_longest(trained, data.classes)):
        if there != here:
            raise UsageError(
                f"{weights.path} was trained on other classes than those of {data.name}/val: "
                f"number {label} is {there or 'none'} there, {here or 'none'} here"
            )


@_bad_data_is_the_users()
def _evaluate_weights(
    weights: Weights, data: DataSource, args: argparse.Namespace, backend: Backend
) -> None:
    check_run(args, backend.device_count)  # as many as were expected?
    config = model_config(args)
    lines = sys.stderr if args.json else sys.stdout

    def say(text: str) -> None:
        if backend.is_main:
            print(text, file=lines, flush=True)

    loader = build_val_loader(data, args, config, backend.rank, backend.world_size)
    model = build_vit(config)
    say(f"data: {data}")
    say(f"model: {args.model}, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"weights of {weights.path}")  # fmt: skip
    sharded = backend.shard(model, list(fsdp_units(model)), weights.initialize)
    if weights.tensors is None:
        backend.load(weights.path, with_optimizer=False)
    say(backend.describe())
    say("evaluating" + (" (compiling takes a while) ..." if backend.compiles else " ..."))
    result = evaluate(sharded, loader, backend)
    say(f"val loss: {result.loss:.4f}, accuracy on val: {result.top1:.2f} % of "
        f"{result.images:,} images")  # fmt: skip
    if args.json and backend.is_main:
        print(json.dumps({
            "val_loss": result.loss, "val_top1": result.top1, "val_images": result.images
        }))  # fmt: skip
