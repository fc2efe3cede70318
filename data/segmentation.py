"""Images with segmentation masks, for ``--segment_probe``.

``open_masked`` opens the folder ``--segment_dir`` in one of several layouts; without the flag, it
opens mosaics with their own masks. The model sees windows of the images (``data/windows.py``).
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
import xxhash
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor
from tqdm import tqdm

from data.decode import MAX_ASPECT, read_mask
from data.digits import CLASSES, MosaicsSplit, open_mosaics
from data.files import (
    TEXT,
    BrokenImageError,
    DataFolderError,
    find_files,
    first_of,
    is_url,
    read_bytes,
)
from data.image_folder import FolderSplit
from data.images import ImageSplit, view_of_images
from data.index import FolderIndex, class_folders, index_split
from data.index_file import Strings
from data.sizes import image_sizes
from data.source import DatasetRequest, DataSource, View
from data.tables import open_masks
from data.transforms import grayscale
from data.windows import WindowSplit

IGNORED = -1
"""The label of ignored pixels."""
LABELS = 4096
"""Maximum number of labels, starting at 0: larger ones indicate instance instead of class masks."""

# -- images and masks in files or tables -----------------------------------------------


class StoredWindows(WindowSplit):
    """Windows of images that are stored, like their masks, as files or in a table."""

    def __init__(
        self, request: DatasetRequest, images: ImageSplit, masks: ImageSplit, ignored: Sequence[int]
    ) -> None:
        """``masks``: those of ``images``, in the same order. ``ignored``: labels to ignore."""
        self.reading_threads = masks.reading_threads
        sizes = image_sizes(images)
        # Such images are unreadable, and need no millions of windows.
        is_line = sizes.max(1) > MAX_ASPECT * sizes.min(1)
        super().__init__(request, images.name, np.where(is_line[:, None], 0, sizes))
        self._images, self._masks, self._ignored = images, masks, np.array(ignored)
        self._mode = v2.InterpolationMode(request.config.preprocessing.interpolation_of_val)
        self._last: tuple[int, torch.Tensor] | None = None
        self.left_out = images.left_out

    def name_of(self, number: int) -> str:
        return self._images.name_of(self.image_of(number))

    def picture(self, image: int) -> torch.Tensor:
        if self._last and self._last[0] == image:  # another window of it was read before
            return self._last[1]
        pixels = Image.fromarray(self._images.open(image).pixels())
        sides = self.scaled[image].tolist()
        resized = pil_to_tensor(v2.functional.resize(pixels, sides, self._mode))
        if self.request.channels == 1:
            resized = grayscale(resized)
        self._last = image, resized
        return resized

    def mask(self, image: int) -> np.ndarray:
        try:
            labels = read_mask(self._masks.read(image))
            height, width = self.sizes[image].tolist()
            if labels.shape != (height, width):
                rows, columns = labels.shape
                raise BrokenImageError(
                    f"it is {columns} x {rows} pixels, but its image is {width} x {height}"
                )
            if labels.min() < 0:
                raise BrokenImageError(f"it contains label {labels.min()}: labels start at 0")
            labels = np.where(np.isin(labels, self._ignored), IGNORED, labels)
            if labels.max() >= LABELS:
                raise BrokenImageError(
                    f"it contains label {labels.max()}: classes are numbered 0 to {LABELS - 1}; "
                    "list other labels in --segment_ignore"
                )
        except BrokenImageError as error:
            raise BrokenImageError(f"its mask {self._masks.name_of(image)}: {error}") from None
        return labels.astype(np.int16)

    def check_labels(self) -> None:
        """Raise DataFolderError if the masks have fewer than two labels besides ignored ones: a
        single one would have an IoU of 100 %. Reads masks until there are two."""
        pixels, part = Counter[int](), self.reading_threads

        def count(image: int) -> dict[int, int]:
            try:
                labels, counts = np.unique(self.mask(image), return_counts=True)
            except BrokenImageError:  # reported when it is measured
                return {}
            return dict(zip(labels.tolist(), counts.tolist(), strict=True))

        title = f"looking for two labels in the masks of {self.name}"
        with ThreadPoolExecutor(part) as pool:
            for first in tqdm(range(0, self.images, part), title, delay=5, disable=None):
                for counts in pool.map(count, range(first, min(first + part, self.images))):
                    pixels.update(counts)
                if len(pixels.keys() - {IGNORED}) > 1:
                    return
        if not pixels:  # no mask can be read
            return
        labels, ignored = pixels.keys() - {IGNORED}, self._ignored.tolist()
        what = f"have a single label, {min(labels)}" if labels else "have no labels"
        if pixels[IGNORED]:
            share = 100 * pixels[IGNORED] / pixels.total()
            unused = max({*range(LABELS)} - {*ignored, *labels})
            what += (
                f", because {share:.1f} % of their pixels are ignored (--segment_ignore "
                f"{' '.join(map(str, ignored))}); if an ignored label is a class, set "
                f"--segment_ignore {unused}, which no mask has"
            )
        raise DataFolderError(
            f"{self.request.config.data_dir}: the masks in {self.name} {what}: segmentation "
            "requires at least two labels"
        )

    def digest(self) -> str:
        content = f"{self._images.digest()} {self._masks.digest()}".encode()
        return xxhash.xxh3_64(content + self.sizes.tobytes()).hexdigest()


class MosaicWindows(WindowSplit):
    """Mosaics of the model's size, and their masks."""

    dtype = torch.float32

    def __init__(self, mosaics: MosaicsSplit) -> None:
        size = np.array(mosaics.request.size)
        super().__init__(mosaics.request, mosaics.name, np.tile(size, (len(mosaics), 1)))
        self._mosaics = mosaics

    def picture(self, image: int) -> torch.Tensor:
        return self._mosaics.load_sample(image, 0, image)["image"]

    def mask(self, image: int) -> np.ndarray:
        return self._mosaics.mask(image)

    def digest(self) -> str:
        return self._mosaics.digest()


class MaskedSource(DataSource):
    """Images with masks; the splits consist of windows."""

    splits: Mapping[str, WindowSplit]

    def __init__(
        self, name: str, splits: Mapping[str, WindowSplit], class_names: Sequence[str] = ()
    ) -> None:
        """``class_names``: in label order; may be fewer than the labels."""
        super().__init__(name, splits)
        self.class_names = list(class_names)
        self.train_length, self.val_length = (splits[split].images for split in ("train", "val"))

    def names_by_label(self, count: int) -> tuple[list[str], str | None]:
        """Return the class names by label, and a warning if they may be those of other labels.
        ``count``: the number of labels, from 0 to the largest in the masks.

        If label 0 is ignored, the names may start at label 1, as ADE20K's do. Only their number
        tells, unless the first name is empty.
        """
        names = self.class_names
        if not names:
            return [], None
        ignores_0 = 0 in next(iter(self.splits.values())).request.config.ignored_labels
        if ignores_0 and names[0] and len(names) == count - 1:
            return ["", *names], None
        add = f"if it is that of label 1, add an empty first line to {_NAMES}"
        if len(names) < count:
            return names, (
                f"{_NAMES} has {len(names):,} names, but the labels range from 0 to {count - 1:,}: "
                f"the first name is used for label 0; {add}"
            )
        if ignores_0 and names[0]:
            return names, (
                f"the first name in {_NAMES}, {names[0]}, is used for label 0, which is ignored; "
                f"{add}"
            )
        return names, None


def open_masked(request: DatasetRequest) -> MaskedSource:
    """Open the images and masks of ``--segment_dir``, or mosaics and their masks without it. Raises
    DataFolderError."""
    config, root = request.config, request.config.segment_dir
    if len(request.size) != 2:
        raise DataFolderError(
            "segmentation masks require a 2-D model, and this model takes volumes"
        )
    request = replace(request, labels=False, augment=False, view=View())
    if root is None:
        mosaics = open_mosaics(request)
        windows = {name: MosaicWindows(split) for name, split in mosaics.splits.items()}  # type: ignore[arg-type]
        return MaskedSource("mosaics of digits with masks", windows, CLASSES)
    config = replace(
        config, data_dir=root, data_source="folder", labels=None, train_split=None, val_split=None
    )
    request = replace(request, config=config)
    splits = {}
    for name in ("train", "val"):
        images, masks = _find_split(request, name)
        splits[name] = StoredWindows(request, images, masks, config.ignored_labels)
    splits["train"].check_labels()
    return MaskedSource(root, splits, _class_names(root))


_NAMES = "classes.txt"
"""A file in ``--segment_dir`` with the class names in label order, one per line; empty for a label
without a name."""


def _class_names(root: str) -> list[str]:
    path = os.path.join(root, _NAMES)
    try:
        text = read_bytes(path, limit=TEXT).decode("utf-8-sig")
    except BrokenImageError as error:
        if isinstance(error.__cause__, FileNotFoundError):  # it is optional
            return []
        raise DataFolderError(f"{path} cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise DataFolderError(f"{path} is not UTF-8 text") from None
    return [line.strip() for line in text.rstrip().splitlines()]


# -- the layouts -----------------------------------------------------------------------


_ADE20K = {"train": ("training", "train"), "val": ("validation", "val")}
"""Names of a split's folders below images/ and annotations/."""
_PAIRED = tuple(suffix for suffix in IMG_EXTENSIONS if suffix != ".png")
"""Extensions of images stored next to their masks, which are PNGs."""


def _find_split(request: DatasetRequest, name: str) -> tuple[ImageSplit, ImageSplit]:
    """Return the images of a split, and their masks in the same order. Raises DataFolderError."""
    root = request.config.data_dir
    folders = class_folders(root, "")
    if folders is None:
        raise DataFolderError(f"--segment_dir {root} is not a folder")
    if {"images", "annotations"} <= {*folders}:
        inside = [class_folders(root, top) or [] for top in ("images", "annotations")]
        split = next((s for s in _ADE20K[name] if all(s in names for names in inside)), None)
        if split is None:
            either = " or ".join(_ADE20K[name])
            raise DataFolderError(
                f"--segment_dir {root}: images/ and annotations/ must both contain {either}"
            )
        tops = [os.path.join(root, top, split) for top in ("images", "annotations")]
        images, masks = _by_stem(tops[0], IMG_EXTENSIONS), _by_stem(tops[1], (".png",))
        paths, left_out = _matched(images, masks, tops[1])
    elif {"JPEGImages", "SegmentationClass"} <= {*folders}:
        paths, left_out = _listed(root, name), Counter[str]()
    elif any(path.endswith(".parquet") for path in find_files(root)):
        return open_masks(request, name, view_of_images(request).transforms(request)[name])
    elif {"train", "val"} <= {*folders}:
        top = os.path.join(root, name)
        paths, left_out = _matched(_by_stem(top, _PAIRED), _by_stem(top, (".png",)), top)
    else:
        raise DataFolderError(
            f"--segment_dir {root} contains no images with masks: use a folder with images/ and "
            "annotations/ (ADE20K), with JPEGImages/ and SegmentationClass/ (VOC), with train/ "
            "and val/ of name.jpg next to name.png, or with parquet files"
        )
    labels = np.zeros(len(paths), np.int32)
    transform = view_of_images(request).transforms(request)[name]
    image_split, mask_split = (
        FolderSplit(
            request, name, transform, FolderIndex(None, Strings.of(column), labels, left_out)
        )
        for column in zip(*paths, strict=True)
    )
    return image_split, mask_split


def _by_stem(top: str, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Return the sorted paths of the files below a folder, by relative path without suffix. Raises
    DataFolderError if there are none, or if two differ only in their suffix."""
    by_stem: dict[str, str] = {}
    for path in index_split(top, suffixes, labels=False).paths:
        other = by_stem.setdefault(os.path.splitext(path[len(top) :])[0], path)
        if other != path:
            raise DataFolderError(
                f"{other} and {os.path.basename(path)} differ only in the extension, but images "
                "and masks are matched by the name without it: rename or remove one of the two"
            )
    return by_stem


def _matched(
    images: dict[str, str], masks: dict[str, str], where: str
) -> tuple[list[tuple[str, str]], Counter[str]]:
    """Return pairs of image path and mask path, and the number of files left out. Raises
    DataFolderError for an image without a mask."""
    if missing := [path for stem, path in images.items() if stem not in masks]:
        raise DataFolderError(
            f"{len(missing):,} of {len(images):,} images have no mask in {where}: "
            f"{first_of(missing)}; add a .png with the same name for each, or remove the images"
        )
    left_out = Counter[str]()
    if len(masks) > len(images):
        left_out["masks without an image"] = len(masks) - len(images)
    return [(path, masks[stem]) for stem, path in images.items()], left_out


def _listed(root: str, name: str) -> list[tuple[str, str]]:
    """Return the paths of images and masks listed in a VOC image set. Raises DataFolderError."""
    path = os.path.join(root, "ImageSets", "Segmentation", f"{name}.txt")
    try:
        names = read_bytes(path, limit=TEXT).decode(errors="surrogateescape").split()
    except BrokenImageError as error:
        raise DataFolderError(f"cannot read {path}, the list of images: {error}") from None
    pairs = [
        (
            os.path.join(root, "JPEGImages", f"{stem}.jpg"),
            os.path.join(root, "SegmentationClass", f"{stem}.png"),
        )
        for stem in names
    ]
    missing = [] if is_url(root) else [p for p in itertools.chain(*pairs) if not os.path.exists(p)]
    if missing or not pairs:
        what = f"lists missing files: {first_of(missing)}" if missing else "is empty"
        raise DataFolderError(f"{path} {what}")
    return pairs
