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
    """Both splits, indexed but not loaded: made before any device starts."""

    name: str
    train_length: int
    val_length: int
    train: FolderSplit | None = None
    val: FolderSplit | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.train_length:,} training, {self.val_length:,} validation images"


def open_data(args: argparse.Namespace, config: VitConfig) -> DataSource:
    """Index the images the arguments ask for. Raises DataFolderError, see ``check_folder``."""
    if args.fake_data:
        return DataSource("fake data (zeros)", TRAIN_LENGTH, VAL_LENGTH)
    check_folder(args.data_dir, config.num_classes)
    size, channels = config.img_size, config.in_chans
    augment = train_transform(size, channels, tuple(args.scale), tuple(args.ratio), args.hflip)
    train = FolderSplit(args.data_dir, "train", augment, args.seed)
    val = FolderSplit(args.data_dir, "val", val_transform(size, channels), args.seed)
    if len(train) < args.batch_size:
        raise DataFolderError(
            f"{args.data_dir} has {len(train)} training images, fewer than one batch: "
            f"use --batch_size {len(train)} or less"
        )
    return DataSource(args.data_dir, len(train), len(val), train, val)


def build_loaders(
    source: DataSource, args: argparse.Namespace, config: VitConfig, rank: int, world_size: int
) -> tuple[BatchLoader, BatchLoader]:
    """Training and validation batches of loading process ``rank`` of ``world_size``."""
    evaluated = args.batch_size // args.grad_accum_steps  # images in one pass
    part: dict = {"rank": rank, "world_size": world_size}
    if source.train is None or source.val is None:
        shape = (config.in_chans, config.img_size, config.img_size)
        return (
            FakeLoader(source.train_length, args.batch_size, shape, keep_short=False, **part),
            FakeLoader(source.val_length, evaluated, shape, keep_short=True, **part),
        )
    part["seed"] = args.seed
    train_sampler = GlobalBatchSampler(len(source.train), args.batch_size, shuffle=True, **part)
    val_sampler = GlobalBatchSampler(len(source.val), evaluated, shuffle=False, **part)
    return (
        DatasetLoader(source.train, train_sampler, args.num_workers),
        DatasetLoader(source.val, val_sampler, min(args.num_workers, len(val_sampler))),
    )
