"""Draws augmented images: ``python3 -m tools.show_augmentations FLAGS PICTURE.png``.

FLAGS are those of run_vit_training.py. Each row shows one image, first unchanged, then augmented
several times; with mixup or CutMix, the images of a column are mixed with each other. Where several
crops are made of an image, the columns are its crops.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("show_augmentations")

import torch

from config_fields import local_path
from data.batch import Batch, BatchShard, micro_batches
from data.source import Pictures, View, first_batch, open_data
from data.utf8 import use_utf8
from training.config import RunConfig
from training.data import data_errors_as_usage_errors, dataset_request
from training.errors import UsageError
from training.flags import parse
from training.logs.figures import as_label, pyplot
from training.mesh import Mesh
from training.objectives.classify import Mixing, smoothed
from training.objectives.mixup_config import MixupConfig
from training.processes.output import exit_quietly_on_broken_pipe
from training.resolve import Run, check_batch, resolve_common, resolve_model

IMAGES, DRAWS = 4, 6
"""Rows of the picture, and augmented columns."""
_UNCHANGED: dict[str, Any] = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "aa": None}
_UNCHANGED |= dict.fromkeys(("hflip", "vflip", "color_jitter", "reprob"), 0.0)
"""The flags of images that are only resized."""
_LEAST_SHARE = 0.02
"""The least share of a label with which a class is named; label smoothing gives less."""


def read_run(flags: Sequence[str]) -> Run:
    """Return the run of these flags with the picture's images as its batch. Raises UsageError."""
    config = resolve_common(parse(list(flags), {"run": RunConfig})["run"])
    config, model = resolve_model(config)
    if len(model.sizes.input_shape) != 3:
        raise UsageError("only 2-D images can be drawn, not volumes")
    if config.data.image_sizes:
        given = "--buckets" if config.data.buckets else "--image_size_schedule"
        raise UsageError(f"images are drawn in the model's own size: drop {given}")
    run = Run(config, None, model, Mesh(), None).with_data(
        batch_size=IMAGES, grad_accum_steps=1, num_workers=0
    )
    check_batch(run)
    if model.segments:
        features = [each for each in config.active_features if each.view(run, augment=True)]
        by = ", ".join(feature.shown(config) for feature in features)
        raise UsageError(f"only images of one size can be drawn: drop {by}")
    return run


def columns(run: Run) -> list[Pictures]:
    """Return the columns for the first images of an epoch. Raises DataFolderError."""
    request = dataset_request(run)
    if (pictures := request.view.pictures(request, IMAGES)) is not None:
        whole = replace(request, view=View(), config=replace(request.config, **_UNCHANGED))
        images = first_batch(whole, IMAGES)["image"] / 255
        return [Pictures("image", images, [""] * IMAGES), *pictures]
    smoothing, classes = run.config.loss.smoothing, run.model.sizes.num_classes
    unchanged = _draws(run.with_data(**_UNCHANGED))[1][0]
    names, draws = _draws(run)
    images, labels = unchanged["image"], smoothed(unchanged["target"], classes, 0.0)
    drawn, rows = [_column("image", run, names, images, labels)], range(images.shape[2])
    mixes = run.config.of(MixupConfig).mixes
    mixing = Mixing(run, torch.Tensor.contiguous, rows) if mixes else None
    for number, batch in enumerate(draws):
        images, title = batch["image"], f"draw {number + 1}"
        shares = smoothed(batch["target"], classes, smoothing)
        if mixing:
            mix = mixing.draw(number, images.shape)
            images, shares = mixing.images(images, mix), mixing.labels(shares, mix)
            _, label_share, top, bottom, *_ = mix.tolist()
            kind = "cutmix" if bottom > top else "mixup"
            title = "not mixed" if label_share == 1 else f"{kind}, {label_share:.2f}"
        drawn.append(_column(title, run, names, images, shares))
    return drawn


def _draws(run: Run) -> tuple[Sequence[str] | None, list[Batch]]:
    """Return the names of the classes, and the same images DRAWS times, each time augmented."""
    data = open_data(dataset_request(run.with_data(batch_size=IMAGES * DRAWS, aug_repeats=DRAWS)))
    batch = next(iter(data.train_loader(IMAGES * DRAWS, BatchShard()).epoch(0)))
    return data.classes, micro_batches(batch, 1, DRAWS)


def _column(
    title: str,
    run: Run,
    names: Sequence[str] | None,
    images: torch.Tensor,
    label_shares: torch.Tensor,
) -> Pictures:
    """Return images from 0 to 1, each with the classes of the largest shares of its label."""
    if run.config.data.image_dtype(2) == "uint8":
        images = images / 255
    else:  # normalized already
        values = run.config.data.preprocessing.of_channels(images.shape[1])
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in values)
        images = images * std + mean
    texts = []
    for label in label_shares.tolist():
        largest = sorted(
            ((share, i) for i, share in enumerate(label) if share > _LEAST_SHARE), reverse=True
        )
        texts.append(" + ".join(f"{names[i] if names else i}: {s:.2f}" for s, i in largest))
    return Pictures(title, images.clamp(0, 1), texts)


def draw(columns: Sequence[Pictures], path: Path) -> None:
    """Draw the columns side by side, each image with its label below it. Raises OSError."""
    size = (1.6 * len(columns), 1.85 * IMAGES)
    plt = pyplot()
    figure, axes = plt.subplots(IMAGES, len(columns), figsize=size, layout="constrained")
    for across, column in zip(axes.T, columns, strict=True):
        across[0].set_title(column.title, fontsize=9)
        for axis, image, label in zip(across, column.images, column.labels, strict=True):
            pixels = image.permute(1, 2, 0).squeeze(-1).numpy()
            axis.imshow(pixels, cmap="gray", vmin=0, vmax=1)
            axis.set_xlabel(as_label(label), fontsize=7)
            axis.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the images of these flags into the file named last; return the exit code."""
    *flags, name = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(__doc__, end="")
        return 0
    try:
        if not name.endswith(".png"):
            raise UsageError("the last argument must be the file to write, a .png")
        try:
            path = local_path(name)
        except argparse.ArgumentTypeError as error:
            raise UsageError(str(error)) from None
        with data_errors_as_usage_errors():
            drawn = columns(read_run(flags))
        try:
            draw(drawn, path)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
    except UsageError as error:
        print(f"show_augmentations: error: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {IMAGES} images, augmented {len(drawn) - 1} times")
    return 0


if __name__ == "__main__":
    use_utf8()
    with exit_quietly_on_broken_pipe("show_augmentations"):
        sys.exit(main())
