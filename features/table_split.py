"""The split of a table of images, stored with the run: ``--labels``."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import printable, regular, write_csv
from training.feature import Feature

if TYPE_CHECKING:
    from data.source import DataSource
    from training.loop import Hook, Training

SPLIT_FILE = "split.csv"
"""The table of the images that a run uses, in the folder of its logs; itself one for ``--labels``,
with the columns path, label and split."""


class SavedSplit(Feature):
    """Writes which images were trained on, and which were for validation."""

    turned_on_by = ("--labels",)

    def hooks(self, training: Training) -> Sequence[Hook]:
        run, session = training.run, training.session
        if session.backend.is_main:
            root, file = run.config.data.data_dir, run.log_dir / SPLIT_FILE
            try:
                for line in store_split(split_rows(training.data, root), file):
                    session.reports.say(line)
            except OSError as error:
                session.reports.say(f"warning: {SPLIT_FILE} cannot be written ({error.strerror})")
        return ()


def store_split(rows: Iterable[Sequence[str]], file: Path) -> list[str]:
    """Write ``rows`` to ``file``, and return a warning if they have validation images that an
    earlier start of the run has trained on. Raises OSError."""
    rows = list(rows)
    before: set[str] = set()
    with (
        contextlib.suppress(FileNotFoundError, csv.Error, ValueError),
        open(file, newline="", encoding="utf-8", errors="surrogateescape", opener=regular) as old,
    ):
        before = {path for path, _, split in csv.reader(old) if split == "train"}
    moved = [path for path, _, split in rows if split == "val" and path in before]
    write_csv(file, rows)
    if not moved:
        return []
    return [
        f"warning: {len(moved):,} validation images, such as {printable(moved[0])}, were training "
        "images at an earlier start of this run: the table has changed, so the accuracy is too high"
    ]


def split_rows(data: DataSource, root: str) -> Iterator[tuple[str, str, str]]:
    """Yield the names of the columns, then the path in ``root``, the label and the split of each
    image."""
    yield ("path", "label", "split")
    for name, split in data.splits.items():
        for number, label in enumerate(split.labels):
            path = split.name_of(number).removeprefix(f"{root.rstrip('/')}/")
            if path[:1] in "=+-@":  # a spreadsheet would take it for a formula
                path = f"./{path}"
            labels = label.nonzero()[0].tolist() if label.ndim else [int(label)]
            classes = split.classes or {0: ""}
            yield path, "|".join(classes[each] for each in labels), name
