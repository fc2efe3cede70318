"""Use a trained model: name what images show, or measure it on val/. Writes no file."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from data.build import DataSource, build_val_loader, open_validation_data
from data.errors import printable
from data.folder_index import class_folders
from data.image_files import FoundImages, find_images, read_batches
from data.loader import BadImage
from data.preprocessing import Preprocessing
from data.transforms import val_transform
from models.config import PRESETS
from models.vit import build_vit, fsdp_units
from training.arguments import DEFAULT_MODEL, MODEL_FLAG, model_config
from training.backend import Backend
from training.checkpoints.choose import Candidates
from training.checkpoints.content import SavedRun
from training.errors import UsageError
from training.evaluation import evaluate
from training.fingerprint import check_alike
from training.preprocessing import take_preprocessing, take_preprocessing_of_file
from training.processes import failing_together
from training.start import choose_checkpoint
from training.validation import (
    bad_data_is_the_users,
    check_model,
    check_run,
    check_same_classes,
    check_same_model,
)
from training.weights import Weights, find_weights

_TOP = 5
_BATCH_SIZE = 32
_BAR_FROM = 10  # images
_KINDS = 5  # of files passed over, named in a line


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
    if weights.run:
        take_preprocessing(args, weights.run)
        return weights
    return replace(weights, note=take_preprocessing_of_file(args, weights.path))


def _take_model(args: argparse.Namespace, run: SavedRun) -> None:
    saved = {name: run.arguments.get(name) for name in ("model", *MODEL_FLAG)}
    if saved["model"] not in PRESETS:
        raise UsageError(f"{run.path} was trained with --model {saved['model']}, unknown here")
    given = {name: getattr(args, name) for name in saved}
    if given["model"] in (None, saved["model"]):  # a flag alone; another preset brings all its own
        given = saved | {name: value for name, value in given.items() if value is not None}
    check_same_model(run, model_config(argparse.Namespace(**given)))
    vars(args).update(saved)


def _tell(line: str) -> None:
    """On stderr, above the bar: stdout has the result alone."""
    tqdm.write(line, file=sys.stderr)


# -- predict --------------------------------------------------------------------------


@bad_data_is_the_users()
def predict(args: argparse.Namespace, weights: Weights) -> None:
    """Print the likeliest classes of every image of ``args.predict``, in plain PyTorch."""
    config = model_config(args)
    found = find_images(args.predict)
    _say_passed_over(found)
    if weights.note:
        _tell(weights.note)
    names = _class_names(weights, args.data_dir, config.num_classes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.verify_checkpoint:
        weights.check_undamaged()
    model = weights.plain_model(config, device)
    how = Preprocessing.of_arguments(args)
    transform = val_transform(how, config.img_size, config.in_chans)
    results: list[dict] = []
    broken: dict[Path, str] = {}
    hide = None if len(found.paths) >= _BAR_FROM else True  # None: shown on a terminal
    with tqdm(total=len(found.paths), unit="image", dynamic_ncols=True, disable=hide) as bar:

        def leave_out(path: Path, reason: str) -> None:
            broken[path] = f"{printable(str(path))} is not a readable image: {reason}"
            if path not in found.named:
                _tell(broken[path])
            bar.update()

        for paths, batch in read_batches(found.paths, transform, _BATCH_SIZE, leave_out):
            for path, top in zip(paths, _top_classes(model, batch, args.precision), strict=True):
                if args.json:
                    likely = [{"class": names[i], "index": i, "probability": p} for i, p in top]
                    results.append({"image": str(path), "top5": likely})
                else:
                    rows = (f"{p:10.2%}  {printable(names[i])}" for i, p in top)
                    tqdm.write("\n".join([printable(str(path)), *rows]))
            bar.update(len(paths))
    if args.json:
        print(json.dumps(results, indent=2))
    mistakes = [line for path, line in broken.items() if path in found.named]
    for line in mistakes[:-1]:
        _tell(line)
    if mistakes:  # told with the others' results there
        raise UsageError(mistakes[-1])
    if len(broken) == len(found.paths):
        raise UsageError("none of the images can be read")


def _say_passed_over(found: FoundImages) -> None:
    for folder in found.unreadable:
        _tell(f"passed over {printable(folder)}")
    if found.passed_over:
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in found.passed_over.most_common(_KINDS))
        more = ", ..." if len(found.passed_over) > _KINDS else ""
        count = found.passed_over.total()
        _tell(f"passed over in the folders, {count:,} in all: {printable(kinds)}{more}")


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


@bad_data_is_the_users()
def prepare_evaluation(
    weights: Weights, args: argparse.Namespace, device_count: int
) -> Callable[[argparse.Namespace, Backend], None]:
    """The body of every process, once everything was checked. Raises UsageError."""
    check_run(args, device_count)
    data = open_validation_data(args, model_config(args))
    check_same_classes(weights.run.classes if weights.run else None, weights.path, data)
    return functools.partial(_evaluate_weights, weights, data)


@bad_data_is_the_users()
def _evaluate_weights(
    weights: Weights, data: DataSource, args: argparse.Namespace, backend: Backend
) -> None:
    config = model_config(args)
    lines = sys.stderr if args.json else sys.stdout

    def say(text: str) -> None:
        if backend.is_main:
            print(text, file=lines, flush=True)

    with failing_together():
        check_run(args, backend.device_count)  # as many as were expected?
    check_alike(args, data)
    if weights.tensors is None:
        choose_checkpoint(
            Candidates([weights.path]), lambda saved: None, verify=args.verify_checkpoint
        )
    loader = build_val_loader(data, args, config, backend.rank, backend.world_size)
    model = build_vit(config)
    say(f"data: {data}")
    say(f"model: {args.model}, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"weights of {weights.path}")  # fmt: skip
    if weights.note:
        say(weights.note)
    sharded = backend.shard(model, list(fsdp_units(model)), weights.initialize)
    if weights.tensors is None:
        backend.load(weights.path, with_optimizer=False)
    say(backend.describe())
    say("evaluating" + (" (compiling takes a while) ..." if backend.compiles else " ..."))
    result = evaluate(sharded, loader, backend)
    assert result is not None  # nothing stops it
    left_out = _count_bad_images(loader.bad_images(), args.max_bad_images)
    if not result.images:
        raise UsageError(f"no image of {data.name}/val can be read", agreed=True)
    say(f"val loss: {result.loss:.4f}, accuracy on val: {result.top1:.2f} % of "
        f"{result.images:,} images"
        + (f"; {left_out:,} unreadable ones left out" if left_out else ""))  # fmt: skip
    if args.json and backend.is_main:
        print(json.dumps({
            "val_loss": result.loss, "val_top1": result.top1, "val_images": result.images,
            "bad_images": left_out,
        }))  # fmt: skip


def _count_bad_images(found: list[BadImage], most: int) -> int:
    """List those of this process; returns how many all processes found.

    Raises UsageError in all of them if these are more than ``most``.
    """
    for path, reason in found:
        _tell(f"{path} is not a readable image: {reason}")
    count = torch.tensor(len(found))
    if dist.is_initialized():
        dist.all_reduce(count)  # on the hosts
    if count > most:
        raise UsageError(
            f"{int(count):,} images of val/ cannot be read: mend or remove them (listed above), or "
            f"allow more with --max_bad_images {int(count)}",
            agreed=True,
        )
    return int(count)
