"""Parquet files of images, as --data_source tables reads them."""

import io

import datasets
import numpy as np
import pyarrow.parquet as pq
from PIL import Image

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


CLASSES = ["angular_leaf_spot", "bean_rust", "healthy"]
ROWS = {"train": 30, "validation": 12, "test": 9}


def noise_png(seed):
    """An image of noise, whose size in bytes depends on ``seed``, too."""
    file, pixels, rows = io.BytesIO(), np.zeros((16, 16, 3), np.uint8), 4 + seed % 11
    pixels[:rows] = np.random.default_rng(seed).integers(0, 255, (rows, 16, 3))
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_beans(first=0):
    """A data set with the columns and splits of Beans, and its files on the Hub."""
    features = datasets.Features(
        image_file_path=datasets.Value("string"),
        image=datasets.Image(),
        labels=datasets.ClassLabel(names=CLASSES),
    )
    tables, files = {}, {}
    for split, rows in ROWS.items():
        names = [f"{split}/{number}.png" for number in range(rows)]
        images = [{"bytes": noise_png(first + n), "path": name} for n, name in enumerate(names)]
        labels = [number % 3 for number in range(rows)]
        columns = {"image_file_path": names, "image": images, "labels": labels}
        tables[split] = datasets.Dataset.from_dict(columns, features)
        tables[split].to_parquet(file := io.BytesIO())
        files[f"data/{split}-00000-of-00001.parquet"] = file.getvalue()
        first += rows
    return datasets.DatasetDict(tables), files
