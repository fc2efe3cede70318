"""Parquet files of images, as --data_source tables reads them."""

import datasets
import pyarrow.parquet as pq

SPLITS = {"train": "train", "validation": "val"}
"""The folders of digits by the names of splits in Hugging Face's data sets."""


def write_tables(digits, root):
    """The folders of the same digits as parquet files and as a saved data set, in a new folder.

    Parquet files as the hub has them: new ones, written by ``datasets``, and old ones, with
    compressed pages and dictionaries, of several row groups of a few rows each.
    """
    (root / "parquet" / "data").mkdir(parents=True)
    found = datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict(_columns(digits / folder), _features())
            for name, folder in SPLITS.items()
        }
    )
    found.save_to_disk(root / "saved")
    for name, part in found.items():
        for number in range(2):
            shard = part.shard(2, number, contiguous=True)
            path = root / "parquet" / "data" / f"{name}-0000{number}-of-00002.parquet"
            if number:
                shard.to_parquet(path)
            else:
                pq.write_table(shard.with_format("arrow")[:], path, row_group_size=20)
    return root


def _columns(folder):
    paths = sorted(folder.glob("*/*.png"))
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    return {"image": images, "label": [int(path.parent.name) for path in paths]}


def _features():
    names = [str(digit) for digit in range(10)]
    return datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
