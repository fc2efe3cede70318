"""From the arguments to a training and a validation source."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import Any

from data.errors import DataFolderError, printable
from data.fake import TRAIN_LENGTH, VAL_LENGTH, FakeLoader
from data.folder_index import check_folder
from data.image_folder import FolderSplit
from data.loader import BatchLoader, DatasetLoader
from data.preprocessing import Preprocessing
from data.sampler import GlobalBatchSampler
from data.transforms import train_transform, val_transform
from models.config import VitConfig

_KINDS = 5  # of files, named in the log


@dataclass
class DataSource:
    """The splits, indexed but not loaded: made before any device starts."""

    name: str
    train_length: int
    val_length: int
    train: FolderSplit | None = None
    val: FolderSplit | None = None

    @property
    def classes(self) -> list[str] | None:
        """Names by label, if the source has any."""
        return self.val.classes if self.val else None

    def fingerprint(self) -> dict[str, Any]:
        """What decides which image a step trains on, under names for a person to read."""
        splits = {"train": self.train, "val": self.val}
        return {
            "the number of training images": self.train_length,
            "the number of validation images": self.val_length,
            "the class folders": self.classes,
        } | {
            f"the names or order of the files in {name}/": split.digest()
            for name, split in splits.items()
            if split is not None
        }

    def __str__(self) -> str:
        training = f"{self.train_length:,} training, " if self.train_length else ""
        text = f"{printable(self.name)}: {training}{self.val_length:,} validation images"
        left_out = Counter[str]()
        for split in (self.train, self.val):
            left_out += split.index.left_out if split is not None else Counter()
        if not left_out:
            return text
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in left_out.most_common(_KINDS))
        more = ", ..." if len(left_out) > _KINDS else ""
        return f"{text}; {left_out.total():,} files left out ({printable(kinds)}{more})"


def open_data(args: argparse.Namespace, config: VitConfig) -> DataSource:
    """Index the images the arguments ask for. Raises DataFolderError, see ``index_split``."""
    if args.fake_data:
        source = DataSource("fake data (zeros)", TRAIN_LENGTH, VAL_LENGTH)
    else:
        check_folder(args.data_dir, config.num_classes)
        augment = train_transform(
            Preprocessing.of_arguments(args), config.img_size, config.in_chans,
            tuple(args.scale), tuple(args.ratio), args.hflip,
        )  # fmt: skip
        train = FolderSplit(args.data_dir, "train", augment, args.seed, substitutes=True)
        val = _val_split(args, config)
        source = DataSource(args.data_dir, len(train), len(val), train, val)
    if source.train_length < args.batch_size:
        raise DataFolderError(
            f"{source.name} has {source.train_length} training images, fewer than one batch: "
            f"use --batch_size {source.train_length} or less"
        )
    return source


def open_validation_data(args: argparse.Namespace, config: VitConfig) -> DataSource:
    """Index val/ alone; what is in train/, if there is one, does not matter.

    Raises DataFolderError, see ``index_split``.
    """
    if args.fake_data:
        return DataSource("fake data (zeros)", 0, VAL_LENGTH)
    check_folder(args.data_dir, config.num_classes, ("val",))
    val = _val_split(args, config)
    return DataSource(args.data_dir, 0, len(val), val=val)


def _val_split(args: argparse.Namespace, config: VitConfig) -> FolderSplit:
    how = Preprocessing.of_arguments(args)
    transform = val_transform(how, config.img_size, config.in_chans)
    return FolderSplit(args.data_dir, "val", transform, args.seed, substitutes=False)


def build_loaders(
    source: DataSource, args: argparse.Namespace, config: VitConfig, rank: int, world_size: int
) -> tuple[BatchLoader, BatchLoader]:
    """Training and validation batches of loading process ``rank`` of ``world_size``."""
    part: dict = {"rank": rank, "world_size": world_size}
    val = build_val_loader(source, args, config, **part)
    if source.train is None:
        shape = (config.in_chans, config.img_size, config.img_size)
        train = FakeLoader(source.train_length, args.batch_size, shape, keep_short=False, **part)
        return train, val
    sampler = GlobalBatchSampler(
        len(source.train), args.batch_size, shuffle=True, seed=args.seed, **part
    )
    return DatasetLoader(source.train, sampler, args.num_workers), val


def build_val_loader(
    source: DataSource, args: argparse.Namespace, config: VitConfig, rank: int, world_size: int
) -> BatchLoader:
    """Validation batches of loading process ``rank`` of ``world_size``."""
    batch_size = args.batch_size // args.grad_accum_steps  # images in one pass
    part: dict = {"rank": rank, "world_size": world_size}
    if source.val is None:
        shape = (config.in_chans, config.img_size, config.img_size)
        return FakeLoader(source.val_length, batch_size, shape, keep_short=True, **part)
    sampler = GlobalBatchSampler(len(source.val), batch_size, shuffle=False, seed=args.seed, **part)
    return DatasetLoader(source.val, sampler, min(args.num_workers, len(sampler)))
