"""Segmentation from patch features: how well they predict the class of each pixel.

The protocol is DINOv2's linear segmentation (arXiv 2304.07193, section 7.4): a linear layer
computes logits for each patch token, which are interpolated to pixels. Windows of the model's size
overlap, and their logits are averaged (``data/windows.py``). The layer is trained on patches
instead of pixels, with ``train_probes``: the target of a patch is the fraction of each class among
its pixels. In addition, k-NN without training: the nearest training patches vote.

Each process has the patches of the images that it loaded, with all windows of a validation image.
"""

from __future__ import annotations

import colorsys
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.batch import BadImage
from data.files import BrokenImageError, printable, write_csv
from data.segmentation import LABELS, MaskedSource
from data.windows import WindowSplit
from training.evaluation.features import PATCHES, FeatureBatch, Features
from training.evaluation.knn_and_probe import (
    RATES,
    Labelled,
    PartCheck,
    Probes,
    count_classes,
    random_order,
    shares,
    sum_of,
    total,
    train_probes,
    votes,
)
from training.logs.bad_images import TRAIN, VAL, BadImages
from training.logs.figures import as_label, drawing, pyplot, save_figure, spread
from training.logs.records import SEGMENT
from training.processes import exchange

PATCHES_TRAINED = 2**20
"""The maximum number of training patches, in all processes: 4 GiB with width 1024."""
PATCHES_COMPARED = 2**16
"""The maximum number of them that k-NN compares validation patches with."""
NEIGHBORS = 20
_STRIP = 2**24
"""The number of pixel logits, in fp32, in memory at a time: 64 MiB."""


@dataclass(frozen=True)
class Segmentation:
    """How well linear probes and k-NN classify the pixels of validation images."""

    areas: dict[float, Areas]
    """The areas of each probe by learning rate; empty without labels."""
    knn_areas: Areas | None
    images: int
    """The number of validation images."""
    trained_on: int
    """The number of training patches."""
    compared_with: int
    """The number of training patches that k-NN compared with."""
    class_names: Sequence[str] = ()
    """The names of classes by label; may be fewer than the labels."""

    @property
    def best(self) -> float:
        """The learning rate of the best probe by mean IoU; the smallest if there are several."""
        return max(self.areas, key=lambda rate: self.areas[rate].miou)

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records, in percent."""
        if not self.areas or self.knn_areas is None:
            return {}
        best = self.areas[self.best]
        return {
            f"val_{SEGMENT}_miou": best.miou,
            f"val_{SEGMENT}_accuracy": best.accuracy,
            f"val_{SEGMENT}_lr": self.best,
            f"val_{SEGMENT}_knn_miou": self.knn_areas.miou,
        }

    def __str__(self) -> str:
        assert self.knn_areas is not None
        best = self.areas[self.best]
        return (
            f"segmentation on val: mIoU {best.miou:.2f} %, pixel accuracy {best.accuracy:.2f} % "
            f"of {self.images:,} images by a linear probe, trained on {self.trained_on:,} patches "
            f"of train, best with learning rate {self.best:g}; mIoU {self.knn_areas.miou:.2f} % "
            f"by k-NN, compared with {self.compared_with:,} of them"
        )


class Areas:
    """The number of pixels of each class in masks, in predictions, and in both."""

    def __init__(self, pixels: torch.Tensor | None = None) -> None:
        """``pixels``: (3, labels), int64: in both, in masks, in predictions."""
        self.pixels = torch.zeros(3, LABELS, dtype=torch.int64) if pixels is None else pixels

    def add(self, labels: torch.Tensor, predicted: torch.Tensor) -> None:
        """Count pixels; negative labels are ignored."""
        counts = labels >= 0
        labels, predicted = labels[counts], predicted[counts]
        for row, classes in zip(
            self.pixels, (labels[labels == predicted], labels, predicted), strict=True
        ):
            row += torch.bincount(classes, minlength=LABELS)

    @property
    def iou(self) -> np.ndarray:
        """The intersection over union of each label, from 0 to 1; NaN if it is neither in masks nor
        in predictions."""
        both, in_masks, in_predictions = self.pixels.double().numpy()
        union = in_masks + in_predictions - both
        return np.divide(both, union, out=np.full(len(union), np.nan), where=union > 0)

    @property
    def miou(self) -> float:
        """The mean of ``iou`` in percent."""
        iou = self.iou
        return 100 * float(iou[~np.isnan(iou)].mean())

    @property
    def accuracy(self) -> float:
        """The percentage of correctly classified pixels."""
        both, in_masks, _ = self.pixels.sum(dim=1).tolist()
        return 100 * both / in_masks


# -- masks -----------------------------------------------------------------------------------------


class Masks:
    """Reads the masks of a split's images, several at a time, and records unreadable ones."""

    def __init__(self, split: WindowSplit) -> None:
        self._split, self._bad = split, list[BadImage]()
        self._pool = ThreadPoolExecutor(split.reading_threads)

    def read(self, images: Iterable[int]) -> dict[int, np.ndarray]:
        """Return the readable masks of these images, by image index."""
        numbers = [*images]
        masks = {}
        for image, mask in zip(numbers, self._pool.map(self._read, numbers), strict=True):
            if isinstance(mask, BrokenImageError):
                name = printable(self._split.name_of(self._split.windows_of(image).start))
                self._bad.append((name, str(mask), 0))
            else:
                masks[image] = mask
        return masks

    def _read(self, image: int) -> np.ndarray | BrokenImageError:
        try:
            return self._split.mask(image)
        except BrokenImageError as error:
            return error

    def bad_images(self) -> list[BadImage]:
        """Return the images whose masks could not be read since the last call."""
        bad, self._bad = self._bad, []
        return bad


# -- training patches ------------------------------------------------------------------------------


def patches_of(window: np.ndarray, grid: Sequence[int]) -> torch.Tensor:
    """Return the labels of a window's pixels, (height, width), by patch: (patches, pixels)."""
    labels = torch.from_numpy(window)
    for dimension, cells in enumerate(grid):
        labels = labels.unflatten(2 * dimension, (cells, -1))
    return labels.transpose(1, 2).flatten(2).flatten(0, 1)


def quota(image: int, images: int, patches: int) -> range:
    """Return the range of an image's patches among all training patches: at most
    ``PATCHES_TRAINED`` in total, equally many per image."""
    count = min(images * patches, PATCHES_TRAINED)
    return range(image * count // images, (image + 1) * count // images)


def chosen_patches(labels: torch.Tensor, most: int, seed: int, image: int) -> torch.Tensor:
    """Return the indices of at most ``most`` random patches of an image that have labels.
    ``labels``: (patches, pixels)."""
    order = random_order(seed, image, len(labels))
    return order[(labels[order] >= 0).any(dim=1)][:most]


def _train_patches(
    features: Features,
    split: WindowSplit,
    batches: Iterable[FeatureBatch],
    masks: Masks,
) -> Labelled:
    """Return the training patches of this process, each with the labels of its pixels."""
    sizes, seed = features.run.model.sizes, features.run.config.seed
    pixels = split.request.size[0] * split.request.size[1] // sizes.num_patches
    numbers = [torch.zeros(0, dtype=torch.int64)]
    values = [torch.zeros(0, sizes.embed_dim)]
    labels = [torch.zeros(0, pixels, dtype=torch.int16)]
    for windows, batch in batches:
        images = windows.tolist()  # one window per image
        readable = masks.read(images)
        for image, patches in zip(images, batch[PATCHES], strict=True):
            if image not in readable:
                continue
            window = split.mask_of_window(image, readable[image])
            by_patch = patches_of(window, sizes.grid)
            places = quota(image, split.images, len(by_patch))
            chosen = chosen_patches(by_patch, len(places), seed, image)
            numbers.append(torch.tensor(places[: len(chosen)], dtype=torch.int64))
            values.append(patches[chosen])
            labels.append(by_patch[chosen])
    count = quota(split.images - 1, split.images, sizes.num_patches).stop
    return Labelled(torch.cat(numbers), torch.cat(values), torch.cat(labels), count)


def _compared(train: Labelled, classes: int) -> Labelled:
    """Return the patches that k-NN compares with, evenly spaced among the training patches, each
    with the most frequent class of its pixels."""
    rows = train.numbers % -(-train.images // PATCHES_COMPARED) == 0
    majority = shares(train.labels[rows], classes).argmax(dim=1)
    return Labelled(train.numbers[rows], train.features[rows], majority, train.images)


# -- validation images -----------------------------------------------------------------------------


@functools.lru_cache(64)
def placement(
    length: int, scaled: int, starts: tuple[int, ...], window: int, cells: int, mode: str
) -> torch.Tensor:
    """Return the matrix that maps patch values to pixel values along one side of an image, (length,
    windows * cells): the values of each window are interpolated to its pixels, averaged where
    windows overlap, and interpolated to the size of the mask.

    ``length``, ``scaled``: pixels of the mask's side, and of the resized image's; ``starts``: the
    first pixel of each window in that; ``window``, ``cells``: pixels and patches of a window;
    ``mode``: "linear" or "nearest", as ``F.interpolate`` has it.
    """
    inside = F.interpolate(torch.eye(cells)[None], size=window, mode=mode)[0].T
    canvas, count = torch.zeros(scaled, len(starts), cells), torch.zeros(scaled, 1)
    for number, start in enumerate(starts):
        canvas[start : start + window, number] = inside
        count[start : start + window] += 1
    averaged = canvas.flatten(1) / count
    return F.interpolate(averaged.T[None], size=length, mode=mode)[0].T


def predict_pixels(
    patches: torch.Tensor, split: WindowSplit, image: int, grid: Sequence[int], mode: str
) -> torch.Tensor:
    """Return the class with the largest value for each pixel of an image, (height, width), int64.
    ``patches``: patch values of its windows, (windows, patches, classes)."""
    starts = split.starts(image)
    (tall, wide), classes = grid, patches.shape[-1]
    # (rows of patches in all windows, columns, classes): windows beside windows
    joined = patches.view(len(starts[0]), len(starts[1]), tall, wide, classes)
    joined = joined.transpose(1, 2).flatten(0, 1).flatten(1, 2)
    rows, columns = (
        placement(*sides, mode)
        for sides in zip(
            split.sizes[image].tolist(),
            split.scaled[image].tolist(),
            starts,
            split.request.size,
            grid,
            strict=True,
        )
    )
    strip = max(1, _STRIP // (classes * len(columns)))
    predicted = []
    for part in rows.split(strip):
        values = columns @ torch.tensordot(part, joined, 1)  # (rows, columns, classes)
        predicted.append(torch.from_numpy(values.numpy().argmax(axis=-1)))  # twice PyTorch's speed
    return torch.cat(predicted)


def _whole_images(
    split: WindowSplit, batches: Iterable[tuple[np.ndarray, Sequence[torch.Tensor]]]
) -> Iterator[list[tuple[int, list[torch.Tensor]]]]:
    """Yield, for each batch, the images whose windows have all arrived, with their values. A batch
    consists of window indices, and tensors with an entry per window."""
    waiting: dict[int, list[Sequence[torch.Tensor]]] = {}
    for windows, values in batches:
        complete = []
        for number, *of_window in zip(windows.tolist(), *values, strict=True):
            image = split.image_of(number)
            waiting.setdefault(image, []).append(of_window)
            if len(waiting[image]) == len(split.windows_of(image)):
                of_windows = zip(*waiting.pop(image), strict=True)
                complete.append((image, [torch.stack(part) for part in of_windows]))
        yield complete


# -- measuring -------------------------------------------------------------------------------------


def measure(
    features: Features,
    bad_images: BadImages,
    say: Callable[[str], None],
    part_done: Callable[[], bool | None] = lambda: None,
    picture: Path | None = None,
) -> Segmentation | None:
    """Return how well patch features predict the classes of pixels; None if ``part_done``, called
    after each batch and part, returned True. ``features``: of a ``MaskedSource``. ``picture``: the
    file to draw to. All processes must call this."""
    data, parts = features.data, PartCheck(part_done)
    assert isinstance(data, MaskedSource)
    train_split, val_split = (data.splits[name] for name in (TRAIN, VAL))

    loader, masks = features.loader(TRAIN), Masks(train_split)
    batches = features.compute(loader, [PATCHES], parts)
    shown = _progress(batches, len(loader), "patches of train")
    train = _train_patches(features, train_split, shown, masks)
    if parts.stopped:
        return None
    for reader in (loader, masks):
        bad_images.collect(TRAIN, reader, say)
    trained_on = total(len(train.labels))
    if not trained_on:
        return Segmentation({}, None, 0, 0, 0)
    classes = count_classes(train)
    bank = _compared(train, classes)
    say(f"segmentation: a linear layer on {trained_on:,} patches of {classes:,} classes ...")
    probes = train_probes(train, classes, features.run.config.seed, parts)
    if probes is None:
        return None

    loader, masks = features.loader(VAL), Masks(val_split)
    batches = features.compute(loader, [PATCHES], parts)
    shown = _progress(batches, len(loader), "patches of val")
    areas, images = _val_areas(features, val_split, shown, masks, probes, bank, parts)
    if parts.stopped:
        return None
    for reader in (loader, masks):
        bad_images.collect(VAL, reader, say)
    summed = [Areas(pixels) for pixels in sum_of(torch.stack([each.pixels for each in areas]))]
    has_labels = summed[-1].pixels[1].any()
    by_rate = dict(zip(RATES, summed, strict=False)) if has_labels else {}
    compared_with = total(len(bank.labels))
    labels_in_val = summed[-1].pixels[1].nonzero().flatten().tolist()
    names, warning = data.names_by_label(1 + max([classes - 1, *labels_in_val]))
    if warning:
        say(f"warning: {warning}")
    result = Segmentation(by_rate, summed[-1], total(images), trained_on, compared_with, names)
    if picture and by_rate:
        layer = probes._replace(weights=probes.weights[RATES.index(result.best)])
        _draw_examples(features, val_split, layer, names, picture, say)
    return result


def _progress(batches: Iterable[FeatureBatch], count: int, what: str) -> Iterable[FeatureBatch]:
    """Show a progress bar on the terminal of the first process."""
    off = None if exchange.rank() == 0 else True
    return tqdm(batches, what, count, leave=False, unit="batch", disable=off, dynamic_ncols=True)


def _val_areas(
    features: Features,
    split: WindowSplit,
    batches: Iterable[FeatureBatch],
    masks: Masks,
    probes: Probes,
    bank: Labelled,
    parts: PartCheck,
) -> tuple[list[Areas], int]:
    """Return the areas of each probe, and last of k-NN, on this process's validation images, and
    the number of images."""
    grid, classes = features.run.model.sizes.grid, probes.weights.shape[-1]
    areas, images = [Areas() for _ in range(len(RATES) + 1)], 0
    with_votes = _with_votes(batches, bank, classes, parts)
    for complete in _whole_images(split, with_votes):
        readable = masks.read(image for image, _ in complete)
        for image, (patches, voted) in complete:
            if image not in readable:
                continue
            images += 1
            labels = torch.from_numpy(readable[image]).long()
            logits = probes.logits(patches.flatten(0, 1)).unflatten(1, patches.shape[:2])
            values = [*((one, "linear") for one in logits), (voted, "nearest")]
            for its_areas, (one, mode) in zip(areas, values, strict=True):
                its_areas.add(labels, predict_pixels(one, split, image, grid, mode))
    return areas, images


def _with_votes(
    batches: Iterable[FeatureBatch], bank: Labelled, classes: int, parts: PartCheck
) -> Iterator[tuple[np.ndarray, list[torch.Tensor]]]:
    """Yield window indices with their patches, (windows, patches, width), and the fraction of the
    nearest patches' votes for each class, (windows, patches, classes). All processes must exhaust
    the iterator."""
    ks = [min(NEIGHBORS, total(len(bank.labels)))]
    for windows, batch in batches:
        patches = batch[PATCHES]
        if parts.stopped:  # the remaining batches still arrive
            continue
        voted = torch.zeros(patches.shape[:2].numel(), classes)
        for part in votes(bank, patches.flatten(0, 1), ks, classes):
            if part:
                start, (its_votes,) = part
                voted[start : start + len(its_votes)] = F.normalize(its_votes, p=1.0, dim=1)
            if parts():
                break
        else:
            yield windows, [patches, voted.unflatten(0, patches.shape[:2])]


# -- reports ---------------------------------------------------------------------------------------

TABLE, PICTURE = "segment.csv", "segment.png"
_DRAWN = 8
"""Images of the picture."""
_IN_LEGEND = 30
"""Classes in its legend, those with the most pixels."""


def name_of(label: int, class_names: Sequence[str]) -> str:
    """Return the name of a class, or its number."""
    name = class_names[label] if label < len(class_names) else ""
    return printable(name) or f"class {label}"


def write_table(result: Segmentation, folder: Path) -> None:
    """Write segment.csv: a row for each class in masks or predictions. Raises OSError."""
    assert result.knn_areas is not None
    best, knn = result.areas[result.best], result.knn_areas
    rows: list[list] = [["label", "class", "iou", "knn_iou", "pixels", "predicted", "both"]]
    both, in_masks, in_predictions = best.pixels.tolist()
    for label, ious in enumerate(zip(best.iou, knn.iou, strict=True)):
        if np.isnan(ious).all():
            continue
        percent = ["" if np.isnan(iou) else f"{100 * iou:.2f}" for iou in ious]
        counts = [in_masks[label], in_predictions[label], both[label]]
        rows.append([label, name_of(label, result.class_names), *percent, *counts])
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / TABLE, rows)


def _draw_examples(
    features: Features,
    split: WindowSplit,
    layer: Probes,
    class_names: Sequence[str],
    path: Path,
    say: Callable[[str], None],
) -> None:
    """Draw a few images, their masks, and the predictions of the single probe in ``layer``. All
    processes must call this; the first one draws."""
    sizes = features.run.model.sizes
    drawn = spread(_DRAWN, split.images)
    windows = [number for image in drawn for number in split.windows_of(image)]
    patches = features.patches_of(VAL, windows)
    if exchange.rank():
        return
    rows = []
    for image in drawn:
        places = [windows.index(number) for number in split.windows_of(image)]
        logits = layer.logits(patches[places].flatten(0, 1)).unflatten(0, (len(places), -1))
        try:
            pixels, mask = split.picture(image), split.mask(image)
        except BrokenImageError:
            continue
        predicted = predict_pixels(logits, split, image, sizes.grid, "linear").numpy()
        rows.append((_colors_of(pixels, features), mask, predicted))
    with drawing(path, say):
        path.parent.mkdir(parents=True, exist_ok=True)
        _draw(rows, class_names, path)


def _colors_of(pixels: torch.Tensor, features: Features) -> np.ndarray:
    """Return the colors of an image, (channels, height, width), for display: (height, width, 3),
    from 0 to 1."""
    colors = pixels / 255
    if pixels.dtype != torch.uint8:  # it is normalized
        preprocessing = features.run.config.data.preprocessing
        mean, std = map(torch.tensor, preprocessing.of_channels(len(pixels)))
        colors = pixels * std[:, None, None] + mean[:, None, None]
    return colors.expand(3, -1, -1).permute(1, 2, 0).clamp(0, 1).numpy()


def _draw(
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]], class_names: Sequence[str], path: Path
) -> None:
    """Draw rows of an image, (height, width, 3), its mask and the predicted classes, (height,
    width), with a legend of the classes. Raises OSError."""
    plt = pyplot()
    palette = [*plt.get_cmap("tab20").colors]
    # For more classes, hues far apart.
    others = range(len(palette), LABELS)
    palette += [colorsys.hsv_to_rgb(0.618 * n % 1, 0.5 + n % 3 / 6, 0.9) for n in others]
    colors = np.array([*palette, (1.0, 1.0, 1.0)])  # the last one, -1: ignored

    heights = [mask.shape[0] / mask.shape[1] for _, mask, _ in rows]
    figure, axes = plt.subplots(
        len(rows),
        3,
        figsize=(7.0, min(2.05 * sum(heights) + 0.4, 40.0)),
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
    )
    for row, (pixels, *labels) in zip(axes, rows, strict=True):
        for axis, content in zip(row, [pixels, *(colors[each] for each in labels)], strict=True):
            axis.imshow(content, interpolation="nearest")
            axis.axis("off")
    for axis, title in zip(axes[0], ("image", "mask", "prediction"), strict=True):
        axis.set_title(title)
    shown = np.concatenate([each.ravel() for _, *labels in rows for each in labels])
    counts = np.bincount(shown[shown >= 0], minlength=1)
    most = np.argsort(-counts, kind="stable")[: min(_IN_LEGEND, np.count_nonzero(counts))]
    handles = [
        plt.Rectangle(
            (0, 0), 1, 1, color=colors[label], label=as_label(name_of(label, class_names), 24)
        )
        for label in sorted(most.tolist())
    ]
    if (shown < 0).any():
        handles.append(plt.Rectangle((0, 0), 1, 1, fc="white", ec="gray", label="ignored"))
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    save_figure(figure, path)
