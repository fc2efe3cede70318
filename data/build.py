"""From the arguments to a training and a validation source."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from data.fake import TRAIN_LENGTH, VAL_LENGTH, FakeLoader
from data.image_folder import (
    DataFolderError,
    FolderSplit,
    check_folder,
    train_transform,
    val_transform,
)
from data.loader import BatchLoader, DatasetLoader
from data.sampler import GlobalBatchSampler
from models.config import VitConfig


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

    def __str__(self) -> str:
        training = f"{self.train_length:,} training, " if self.train_length else ""
        return f"{self.name}: {training}{self.val_length:,} validation images"


def open_data(args: argparse.Namespace, config: VitConfig) -> DataSource:
    """Index the images the arguments ask for. Raises DataFolderError, see ``check_folder``."""
    if args.fake_data:
        return DataSource("fake data (zeros)", TRAIN_LENGTH, VAL_LENGTH)
    check_folder(args.data_dir, config.num_classes)
    size, channels = config.img_size, config.in_chans
    augment = train_transform(size, channels, tuple(args.scale), tuple(args.ratio), args.hflip)
    train = FolderSplit(args.data_dir, "train", augment, args.seed)
    val = _val_split(args, config)
    if len(train) < args.batch_size:
        raise DataFolderError(
            f"{args.data_dir} has {len(train)} training images, fewer than one batch: "
            f"use --batch_size {len(train)} or less"
        )
    return DataSource(args.data_dir, len(train), len(val), train, val)


def open_validation_data(args: argparse.Namespace, config: VitConfig) -> DataSource:
    """Index val/ alone; what is in train/, if there is one, does not matter.

    Raises DataFolderError, see ``check_folder``.
    """
    if args.fake_data:
        return DataSource("fake data (zeros)", 0, VAL_LENGTH)
    check_folder(args.data_dir, config.num_classes, ("val",))
    val = _val_split(args, config)
    return DataSource(args.data_dir, 0, len(val), val=val)


def _val_split(args: argparse.Namespace, config: VitConfig) -> FolderSplit:
    transform = val_transform(config.img_size, config.in_chans)
    return FolderSplit(args.data_dir, "val", transform, args.seed)


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
