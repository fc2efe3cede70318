"""The source of images in parquet files, as Hugging Face's hub keeps data sets.

Training images are in a random order of runs (``data/loader.py``): a row group, the
smallest part of a file that can be read, holds a hundred images or a thousand.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from data.files import DataFolderError
from data.huggingface import TRAIN, VALIDATION, check_classes, check_labels, check_same_columns
from data.loader import GlobalBatchSampler, RunSampler
from data.source import SplitSource, Wanted
from data.transforms import BytesSplit, Transform, transforms_of

_SHARE = 8  # of a row group's images, one part in so many is a run by default

try:
    from data.parquet_files import ParquetFiles, split_files
except ImportError:
    raise DataFolderError(
        "--data_source parquet requires the package pyarrow: python3 -m pip install pyarrow"
    ) from None


def open_parquet(wanted: Wanted) -> SplitSource:
    """Index the files of the splits that are wanted. Raises DataFolderError."""
    augment, plain = transforms_of(wanted)
    root = wanted.config.data_dir
    train = ParquetSplit(wanted, TRAIN, augment) if wanted.with_train else None
    val = ParquetSplit(wanted, VALIDATION, plain)
    if train is not None:
        check_same_columns(train.files.columns, val.files.columns, root)
    return ParquetSource(wanted, root, train, val, val.files.columns.classes)


class ParquetSource(SplitSource):
    """A ``DataSource`` whose training images are in an order that reads each row group seldom."""

    def sampler(self, length: int, batch_size: int, **how: Any) -> GlobalBatchSampler:
        split = self._train if how["shuffle"] else self._val
        assert isinstance(split, ParquetSplit)
        return RunSampler(split.groups, split.run_length, batch_size, **how)

    def order(self) -> dict[str, Any]:
        if not isinstance(self._train, ParquetSplit):
            return {}
        return super().order() | {"--images_per_read": self._train.run_length}


class ParquetSplit(BytesSplit):
    """One split of images in parquet files: a dataset by (epoch, image index)."""

    def __init__(self, wanted: Wanted, names: tuple[str, ...], transform: Transform) -> None:
        """Index the files of the first of ``names`` that any is of. Raises DataFolderError."""
        config = wanted.config
        self.files = ParquetFiles(split_files(config.data_dir, names), config.columns)
        where = f"{config.data_dir} ({names[0]})"
        check_classes(self.files.columns, wanted.num_classes, where)
        check_labels(self.files.labels, wanted.num_classes, where)
        super().__init__(wanted, self.files.labels, transform, substitutes=names == TRAIN)
        usual = math.ceil(int(np.median(self.files.group_lengths)) / _SHARE)
        self.groups, self.run_length = self.files.group_lengths, config.images_per_read or usual

    def read(self, number: int) -> bytes:
        return self.files.read(number)

    def name_of(self, number: int) -> str:
        return self.files.name_of(number)

    def digest(self) -> str:
        return self.files.digest()
