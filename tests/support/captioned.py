"""The same images with captions in every form in which data sets have them."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from data.config import DataConfig
from data.open import open_data
from data.source import DatasetRequest, DataSource
from features.image_text.tokenizer import ByteTokenizer
from features.image_text.view import ImageTextView
from tests.support.archives import write_tar
from tests.support.table_files import noise_png
from training.config import RunConfig
from training.data import opener_of

LENGTH = 32
ROWS = {"train": 12, "val": 5}


def captions(split: str, number: int) -> list[str]:
    """Those of an image: one, or three of every third."""
    return [
        f"{split} {number} {word}" for word in ("one", "two", "drei ä")[: 1 + 2 * (not number % 3)]
    ]


def image(split: str, number: int) -> bytes:
    return noise_png(number + 100 * (split == "val"))


def write_pairs(root: Path, form: str) -> dict:
    """Write the pairs in a form, and return the flags of data that read them."""
    writer = {"csv": _write_csv, "parquet": _write_parquet, "huggingface": _write_saved}
    return writer.get(form, _write_shards)(root, form)


def _write_shards(root, form):
    for split, rows in ROWS.items():
        content = {}
        for number in range(rows):
            key, found = f"{number:05}", captions(split, number)
            content[f"{key}.png"] = image(split, number)
            if form == "json":
                caption = found if len(found) > 1 else found[0]
                content[f"{key}.json"] = json.dumps({"url": "u", "caption": caption}).encode()
            if form == "txt":
                content[f"{key}.txt"] = found[0].encode()
        write_tar(root / f"{split}-0.tar", content)
    return {"data_source": "webdataset"}


def _write_csv(root, form):
    rows = [("path", "split", "caption")]
    for split, count in ROWS.items():
        (root / "images").mkdir(parents=True, exist_ok=True)
        for number in range(count):
            name = f"images/{split}{number}.png"
            (root / name).write_bytes(image(split, number))
            rows += [(name, split, caption) for caption in captions(split, number)]
    with open(root / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return {"labels": str(root / "pairs.csv")}


def _columns(split: str) -> dict:
    numbers = range(ROWS[split])
    return {
        "id": [*numbers],
        "image": [{"bytes": image(split, number), "path": None} for number in numbers],
        "captions": [captions(split, number) for number in numbers],
    }


def _write_parquet(root, form):
    root.mkdir(parents=True, exist_ok=True)
    for split in ROWS:
        table = pa.table(_columns(split))
        pq.write_table(table, root / f"{split}-00000-of-00001.parquet", row_group_size=4)
    return {"data_source": "parquet"}


def _write_saved(root, form):
    features = datasets.Features(
        id=datasets.Value("int64"),
        image=datasets.Image(),
        captions=datasets.Sequence(datasets.Value("string")),
    )
    names = {"train": "train", "validation": "val"}
    found = {name: datasets.Dataset.from_dict(_columns(s), features) for name, s in names.items()}
    datasets.DatasetDict(found).save_to_disk(root)
    return {"data_source": "huggingface"}


def opened(
    root: Path, flags: dict, keys: Sequence[str] = (), *, seed: int = 3, size: int = 16, view=None
) -> DataSource:
    """The source as a run opens it, with the bytes of captions as tokens."""
    tokenizer = ByteTokenizer(LENGTH, canonical=False)
    view = view or ImageTextView(LENGTH, tokenizer.vocab_size, tokenizer, tuple(keys))
    config = DataConfig(**{"data_dir": str(root), "batch_size": 4, "num_workers": 0} | flags)
    opened_by = opener_of(RunConfig(data=config))
    return open_data(
        DatasetRequest(
            config, 3, (size, size), 1, seed, labels=False, view=view, opened_by=opened_by
        )
    )


def text(tokens) -> str:
    """The text of which these are the bytes."""
    return bytes(token for token in tokens.tolist() if token < 256).decode()
