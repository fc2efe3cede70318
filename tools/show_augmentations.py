"""Draws what a model is shown: ``python3 -m tools.show_augmentations FLAGS PICTURE.png``.

The flags are those of a training. Each row has an image as it is, and then augmented several times,
mixed with the others of its column where that is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch

from data.loader import Batch, Share
from data.source import DataSource, open_data
from training.config import RunConfig
from training.errors import UsageError
from training.flags import parse
from training.losses import Mixing, smoothed
from training.mesh import Mesh
from training.resolve import Run, check_batch, resolve_common, resolve_model
from training.validation import bad_data_is_the_users, wanted_images
from training.weights import with_preprocessing

matplotlib.use("Agg")


IMAGES, DRAWS = 4, 6
"""Rows of the picture, and augmented columns."""
_NAMED_FROM = 0.02
"""The share of a label from which on a class is named: no more than label smoothing gives all."""


@dataclass(frozen=True)
class Column:
    """One column of the picture."""

    title: str
    images: torch.Tensor
    """(IMAGES, channels, height, width), from 0 to 1."""
    labels: list[str]


def read_run(flags: Sequence[str]) -> Run[Any]:
    """Return the run of these flags with the picture's images as its batch. Raises UsageError."""
    config = resolve_common(parse(list(flags), {"run": RunConfig})["run"])
    config, model = resolve_model(config)
    if len(model.sizes.input_shape) != 3:
        raise UsageError("volumes cannot be drawn")
    if config.data.buckets:
        raise UsageError("--buckets: images are drawn in the model's own size, drop it")
    run = with_preprocessing(Run(config, None, model, Mesh()), None)
    run = run.with_data(batch_size=IMAGES, grad_accum_steps=1, num_workers=0)
    check_batch(run)
    return run


def columns(run: Run[Any]) -> list[Column]:
    """Return what is drawn of the first images of an epoch. Raises DataFolderError."""
    unchanged: dict[str, Any] = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "hflip": 0.0}
    unchanged |= {"vflip": 0.0, "aa": None, "color_jitter": 0.0, "reprob": 0.0}
    config, classes = run.config.loss, run.model.sizes.num_classes
    (images, labels), *_ = _draws(_source(run.with_data(**unchanged)))
    source = _source(run)
    shares = smoothed(labels, classes, 0.0)
    found = [Column("image", _visible(run, images), _told(shares, source.classes))]
    mixing = None
    if config.mixes:
        mixing = Mixing(run, torch.Tensor.contiguous, range(images.shape[2]))
    for number, (images, labels) in enumerate(_draws(source)):
        shares, title = smoothed(labels, classes, config.smoothing), f"draw {number + 1}"
        if mixing:
            mix = mixing.draw(number)
            images, shares = mixing.images(images, mix), mixing.labels(shares, mix)
            title = _kind(mix)
        found.append(Column(title, _visible(run, images), _told(shares, source.classes)))
    return found


def _source(run: Run[Any]) -> DataSource:
    return open_data(wanted_images(run.with_data(batch_size=IMAGES * DRAWS, aug_repeats=DRAWS)))


def _draws(source: DataSource) -> list[Batch]:
    """Return the same images several times, augmented anew each time."""
    images, labels = next(iter(source.train_loader(IMAGES * DRAWS, Share()).epoch(0)))
    return list(zip(images.chunk(DRAWS), labels.chunk(DRAWS), strict=True))


def _kind(mix: torch.Tensor) -> str:
    _, label, top, bottom, *_ = mix.tolist()
    if label == 1:
        return "not mixed"
    return f"{'cutmix' if bottom > top else 'mixup'}, {label:.2f}"


def _visible(run: Run[Any], images: torch.Tensor) -> torch.Tensor:
    """Return images from 0 to 1."""
    if run.config.data.image_dtype(2) == "uint8":
        images = images / 255
    else:  # normalised already
        values = run.config.data.preprocessing.of_channels(images.shape[1])
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in values)
        images = images * std + mean
    return images.clamp(0, 1)


def _told(shares: torch.Tensor, classes: Sequence[str] | None) -> list[str]:
    """Return in words which classes have the largest shares of each label."""
    texts = []
    for each in shares:
        found = [(share, label) for label, share in enumerate(each.tolist()) if share > _NAMED_FROM]
        names = [
            f"{classes[label] if classes else label}: {share:.2f}"
            for share, label in sorted(found, reverse=True)
        ]
        texts.append(" + ".join(names))
    return texts


def draw(found: Sequence[Column], path: Path) -> None:
    """Draw the columns beside each other, each image with its label below it. Raises OSError."""
    size = (1.6 * len(found), 1.85 * IMAGES)
    figure, axes = plt.subplots(IMAGES, len(found), figsize=size, layout="constrained")
    for across, column in zip(axes.T, found, strict=True):
        across[0].set_title(column.title, fontsize=9)
        for axis, image, label in zip(across, column.images, column.labels, strict=True):
            pixels = image.permute(1, 2, 0).squeeze(-1).numpy()
            axis.imshow(pixels, cmap="gray", vmin=0, vmax=1)
            axis.set_xlabel(label, fontsize=7)
            axis.set_xticks([])
            axis.set_yticks([])
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the flags ask for into the file named last; return the exit code."""
    *flags, name = sys.argv[1:] if argv is None else argv or [""]
    try:
        if not name.endswith(".png"):
            raise UsageError("the last word must be the picture to write, a .png")
        with bad_data_is_the_users():
            found = columns(read_run(flags))
        try:
            draw(found, Path(name))
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror}") from None
    except UsageError as error:
        print(f"show_augmentations: error: {error}", file=sys.stderr)
        return 2
    print(f"{name}: {IMAGES} images, augmented {DRAWS} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
