"""The split of a table of images, stored with the run: ``--labels``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from training.feature import Feature

if TYPE_CHECKING:
    from data.source import DataSource
    from training.loop import Hook, Training

SPLIT_FILE = "split.csv"
"""The table of the images that a run uses, in the folder of its logs; itself one for ``--labels``,
with the columns path, label and split."""


class TableSplit(Feature):
    """Writes which images were trained on, and which were for validation."""

    turned_on_by = ("--labels",)

    def hooks(self, training: Training) -> Sequence[Hook]:
        from data.files import write_csv

        run, session = training.run, training.session
        if session.backend.is_main:
            try:
                rows = split_rows(training.data, run.config.data.data_dir)
                write_csv(run.log_dir / SPLIT_FILE, rows)
            except OSError as error:
                session.reports.say(f"warning: {SPLIT_FILE} cannot be written ({error.strerror})")
        return ()


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
