"""Draws augmented images: ``python3 -m tools.show_augmentations FLAGS PICTURE.png``.

FLAGS are those of run_vit_training.py, with its extensions. There is one image of each class, of at
most ten classes, chosen by --seed. Each row shows one image, first unchanged, then augmented
several times; with mixup or CutMix, the images of a column are mixed with each other. Where several
crops are made of an image, the columns are its crops. Of images of other than 1 or 3 bands, the
first three are drawn as colors.
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

import numpy as np
import torch

from config_fields import local_path
from data.open import draw_samples, open_data
from data.source import DataSource, Pictures, View
from data.utf8 import use_utf8
from training.command_line import parse
from training.config import RunConfig
from training.data import dataset_request
from training.errors import UsageError, data_errors_as_usage_errors
from training.extensions import named_in, use_extensions
from training.logs.figures import as_label, pyplot
from training.mesh import Mesh
from training.objectives.classify import Mixing, smoothed
from training.objectives.mixup_config import MixupConfig
from training.processes.output import exit_quietly_on_broken_pipe
from training.resolve import Run, check_batch, resolve_common, resolve_model

IMAGES, MOST_IMAGES, DRAWS = 4, 10, 6
"""The least and the largest number of rows of the picture, and the augmented columns."""
_UNCHANGED: dict[str, Any] = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "aa": None}
_UNCHANGED |= dict.fromkeys(("hflip", "vflip", "color_jitter", "reprob"), 0.0)
"""The flags of images that are only resized."""
_LEAST_SHARE = 0.02
"""The least share of a label with which a class is named; label smoothing gives less."""


def read_run(flags: Sequence[str]) -> Run:
    """Return the run of these flags, with small batches. Raises UsageError."""
    parsed = parse(list(flags), {"run": RunConfig}, lambda words: use_extensions(named_in(words)))
    config, model = resolve_model(resolve_common(parsed["run"]))
    if len(model.sizes.input_shape) != 3:
        raise UsageError("only 2-D images can be drawn, not volumes")
    if config.data.image_sizes:
        given = "--buckets" if config.data.buckets else "--image_size_schedule"
        raise UsageError(f"images are drawn in the model's own size: drop {given}")
    if config.data.data_source == "fake":
        raise UsageError("--data_source fake has no images to draw")
    run = Run(config, None, model, Mesh(), None).with_data(
        batch_size=IMAGES, grad_accum_steps=1, aug_repeats=1, num_workers=0
    )
    check_batch(run)
    if model.segments:
        features = [each for each in config.active_features if each.view(run, augment=True)]
        by = ", ".join(feature.shown(config) for feature in features)
        raise UsageError(f"only images of one size can be drawn: drop {by}")
    return run


def columns(run: Run, data: DataSource) -> list[Pictures]:
    """Return the columns for images of ``data``. Raises DataFolderError."""
    numbers = images_of_classes(data, run.config.seed)
    run = run.with_data(batch_size=len(numbers), intensity=data.intensity)
    request = dataset_request(run)
    if (pictures := request.view.pictures(request, numbers)) is not None:
        whole = replace(request, view=View(), config=replace(request.config, **_UNCHANGED))
        (unchanged,) = draw_samples(whole, numbers)
        return [Pictures("image", unchanged["image"] / 255, [""] * len(numbers)), *pictures]
    smoothing, classes = run.config.loss.smoothing, run.model.sizes.num_classes
    (unchanged,) = draw_samples(dataset_request(run.with_data(**_UNCHANGED)), numbers)
    names, draws = data.classes, draw_samples(request, numbers, DRAWS)
    images, labels = unchanged["image"], smoothed(unchanged["target"], classes, 0.0)
    drawn, rows = [_column("image", run, names, images, labels)], range(images.shape[2])
    mixes = run.config.of(MixupConfig).mixes
    mixing = Mixing(run, rows) if mixes else None
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


def images_of_classes(data: DataSource, seed: int) -> list[int]:
    """Return the numbers of the images to draw, by label: one of each of MOST_IMAGES classes, and
    others if these are fewer than IMAGES. They depend only on the labels and the seed."""
    labels = np.asarray(data.splits["train"].labels)
    order = np.random.default_rng(seed).permutation(len(labels))
    firsts = np.sort(np.unique(labels[order], return_index=True)[1])[:MOST_IMAGES]
    others = np.setdiff1d(np.arange(min(len(order), 2 * IMAGES)), firsts)
    chosen = order[np.concatenate([firsts, others[: max(0, IMAGES - len(firsts))]])]
    return sorted(chosen.tolist(), key=lambda number: (labels[number], number))


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
    rows = len(columns[0].images)
    size = (1.6 * len(columns), 1.85 * rows)
    plt = pyplot()
    figure, axes = plt.subplots(rows, len(columns), figsize=size, layout="constrained")
    for across, column in zip(axes.T, columns, strict=True):
        across[0].set_title(column.title, fontsize=9)
        for axis, image, label in zip(across, column.images, column.labels, strict=True):
            shown = image[:3] if len(image) >= 3 else image[:1]
            pixels = shown.permute(1, 2, 0).squeeze(-1).numpy()
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
            run = read_run(flags)
            data = open_data(dataset_request(run))
            drawn = columns(run, data)
        try:
            draw(drawn, path)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
    except UsageError as error:
        print(f"show_augmentations: error: {error}", file=sys.stderr)
        return 2
    print(f"data: {data}")
    print(f"{path}: {len(drawn[0].images)} images, augmented {len(drawn) - 1} times")
    return 0


if __name__ == "__main__":
    use_utf8()
    with exit_quietly_on_broken_pipe("show_augmentations"):
        sys.exit(main())
