"""Images in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from data.sampler import PADDING

SPLITS = ("train", "val")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class DataFolderError(Exception):
    """A folder or file that cannot be used; the message says what to change."""


def train_transform(
    image_size: int,
    channels: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    hflip: float,
) -> Callable:
    """Random resized crop (bicubic) and horizontal flip, normalised, (channels, size, size)."""
    bicubic = v2.InterpolationMode.BICUBIC
    crop = v2.RandomResizedCrop(image_size, scale, ratio, interpolation=bicubic)
    return v2.Compose([crop, v2.RandomHorizontalFlip(hflip), *_to_tensor(channels)])


def val_transform(image_size: int, channels: int) -> Callable:
    """Resize the short side to size * 256/224 (bicubic), centre crop, normalise."""
    resize = v2.Resize(image_size * 256 // 224, interpolation=v2.InterpolationMode.BICUBIC)
    return v2.Compose([resize, v2.CenterCrop(image_size), *_to_tensor(channels)])


def _to_tensor(channels: int) -> list[Callable]:
    mean, std = list(IMAGENET_MEAN), list(IMAGENET_STD)
    if channels == 1:
        mean, std = [sum(mean) / 3], [sum(std) / 3]
    return [
        v2.Grayscale() if channels == 1 else v2.Identity(),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean, std),
    ]


class FolderSplit(Dataset):
    """One split (train or val) as a dataset indexed by (epoch, image index).

    What a transform draws at random depends on the seed, the epoch and the image
    alone: not on the worker that loads it, nor on where a run was resumed.
    """

    def __init__(self, root: str, split: str, transform: Callable, seed: int) -> None:
        path = os.path.join(root, split)
        try:
            self._folder = ImageFolder(path, transform=transform)
        except FileNotFoundError as error:  # raised for a class folder without images
            raise DataFolderError(f"{path}: {str(error).splitlines()[0]}") from None
        self._seed = seed

    @property
    def classes(self) -> list[str]:
        """Names by label."""
        return self._folder.classes

    def __len__(self) -> int:
        return len(self._folder)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = key
        if index == PADDING:
            return self._blank, -1
        return self._load(epoch, index)

    @functools.cached_property
    def _blank(self) -> torch.Tensor:
        """Zeros of an image's shape, which only the transform knows."""
        return torch.zeros_like(self._load(0, 0)[0])

    def _load(self, epoch: int, index: int) -> tuple[torch.Tensor, int]:
        state = np.random.SeedSequence((self._seed, epoch, index)).generate_state(1, np.uint64)
        with torch.random.fork_rng(devices=[]):
            # Only the CPU generator: torch.manual_seed would also queue work for CUDA.
            torch.default_generator.manual_seed(int(state[0] >> 1))
            try:
                return self._folder[index]
            except OSError as error:
                path = self._folder.samples[index][0]
                raise DataFolderError(f"{path} is not a readable image: {error}") from error


def class_folders(root: str, split: str) -> list[str]:
    """Names of the classes of a split by label; empty if there is no such folder."""
    path = os.path.join(root, split)
    if not os.path.isdir(path):
        return []
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def check_folder(root: str, num_classes: int, splits: Sequence[str] = SPLITS) -> None:
    """Refuse a folder that cannot be used, in one line, without reading images.

    Raises DataFolderError for a missing or empty split, class folders that differ
    between the splits, or more classes than ``num_classes``.
    """
    classes = {split: class_folders(root, split) for split in splits}
    for split, names in classes.items():
        path = os.path.join(root, split)
        if not os.path.isdir(path):
            needed = " and ".join(f"{name}/<class>/*" for name in splits)
            raise DataFolderError(f"{path} is not a folder: --data_dir needs {needed} images")
        if not names:
            raise DataFolderError(
                f"{path} holds no class folders: --data_dir needs {split}/<class>/* images "
                f"({', '.join(IMG_EXTENSIONS)})"
            )
    for split, other in itertools.permutations(splits, 2):
        names = sorted(set(classes[split]) - set(classes[other]))
        if names:
            listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise DataFolderError(
                f"the class folders of train and val differ in {root}: only {split} has {listed}"
            )
    found = len(classes[splits[0]])
    if found > num_classes:
        raise DataFolderError(f"{root} has {found} classes, --num_classes is {num_classes}")
