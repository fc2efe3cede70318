"""The unreadable images of a run: listed, counted over all processes, and limited."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from data.batch import BadImage, class_counts
from data.files import no_link, regular, without_secrets
from training.errors import UsageError
from training.processes import exchange

if TYPE_CHECKING:
    from data.source import DataSource
    from training.logs.records import Evaluation
    from training.resolve import Run

FILE = "bad_images.txt"
_SEPARATOR = "\t"
_MOST_LOGGED = 20  # images found since the last log step
TRAIN, VAL = "train", "val"
_SPLIT_NAMES = {TRAIN: "training", VAL: "validation"}


class Reader(Protocol):
    """An object that reads images, such as a loader."""

    def bad_images(self) -> list[BadImage]:
        """Return the images that could not be read since the last call."""


class BadImages:
    """Tracks, in every process, which images of the run's data cannot be read."""

    def __init__(
        self,
        limit: int | str,
        data: DataSource,
        file: Path | None = None,
        *,
        is_main: bool,
    ) -> None:
        """Count unreadable images of ``data`` against ``limit`` (``--max_bad_images``), including
        those of earlier starts listed in ``file``; None: write no file. All processes must call
        this."""
        self._limit, self.data, self._file, self._is_main = limit, data, file, is_main
        self._sizes = {TRAIN: data.train_length, VAL: data.val_length}
        self._numbers: dict[str, dict[str, int | None]] = {TRAIN: {}, VAL: {}}
        """The number of each one, by split and path; None if an earlier start found it."""
        listed: list[list[str]] = []
        if file and is_main:  # it reads the file for all, so that all have the same counts
            with (
                contextlib.suppress(OSError),
                open(file, encoding="utf-8", errors="surrogateescape", opener=regular) as opened,
            ):
                listed = [line.split(_SEPARATOR) for line in opened.read().splitlines() if line]
        listed = exchange.broadcast_object(listed)
        self._listed = {path for path, *_ in listed}
        for path, *others in listed:
            if others and others[-1] in self._numbers:  # earlier versions wrote no split
                self._numbers[others[-1]][path] = None

    @property
    def excess(self) -> str | None:
        """The error message if the limit is exceeded; the same in all processes."""
        total = sum(map(len, self._numbers.values()))
        advice = f": fix or remove them, or allow more with --max_bad_images {total}"
        if isinstance(self._limit, int):
            if total <= self._limit:
                return None
            return (
                f"{total:,} images cannot be read, more than --max_bad_images {self._limit}{advice}"
            )
        for split, paths in self._numbers.items():
            size = self._sizes[split]
            most = math.ceil(size * Fraction(self._limit.rstrip("%")) / 100)
            if len(paths) > most:
                return (
                    f"{len(paths):,} {_SPLIT_NAMES[split]} images cannot be read, more than "
                    f"--max_bad_images {self._limit} ({most:,} of {size:,}){advice}"
                )
        return None

    def check(self, advice: str = "") -> None:
        """Raise UsageError, in all processes, if the limit is exceeded."""
        if excess := self.excess:
            raise UsageError(f"{excess}{advice}", agreed=True)

    def collect(self, split: str, reader: Reader, say: Callable[[str], None]) -> None:
        """List and log the unreadable images that a reader of ``split`` found since the last call.
        All processes must call this."""
        new: dict[str, str] = {}
        for part in exchange.all_gather_object(reader.bad_images()):
            for name, reason, number in part:
                path = without_secrets(name)
                self._numbers[split][path] = number
                if path not in self._listed:
                    new[path] = reason
        self._listed |= new.keys()
        logged = list(new.items())[:_MOST_LOGGED] if self._file else new.items()
        for path, reason in logged:
            say(f"warning: {path} cannot be read ({reason}): skipped")
        if len(new) > len(logged):
            say(
                f"warning: {len(new) - len(logged):,} more images cannot be read: {FILE} lists them"
            )
        if new and self._file and self._is_main:
            try:
                with open(
                    self._file, "a", encoding="utf-8", errors="surrogateescape", opener=no_link
                ) as file:
                    file.writelines(
                        _SEPARATOR.join((path, reason, split)) + "\n"
                        for path, reason in new.items()
                    )
            except OSError as error:
                say(f"warning: {FILE} cannot be written ({error.strerror})")

    def excluding_unreadable(
        self, result: Evaluation, names: Sequence[str] | None = None
    ) -> Evaluation:
        """Return an evaluation with the number of unreadable images, and the classes without any
        readable one, and the classes named. ``names``: by label (default: those of the data)."""
        names = self.data.classes or [] if names is None else names
        unreadable = [number for number in self._numbers[VAL].values() if number is not None]
        lost: tuple[str, ...] = ()
        if unreadable:
            labels = np.asarray(self.data.splits[VAL].labels)
            counts = class_counts(labels)
            bad_counts = class_counts(labels[unreadable], len(counts))
            lost = tuple(
                names[label] if label < len(names) else f"class {label}"
                for label in np.flatnonzero(bad_counts).tolist()
                if bad_counts[label] == counts[label]
            )
        by_class = result.by_class and result.by_class.named(names)
        return replace(result, left_out=len(unreadable), lost_classes=lost, by_class=by_class)


def open_bad_images(run: Run, data: DataSource, *, is_main: bool) -> BadImages:
    """Return the tracker of unreadable images, with those listed by earlier starts. Raises
    UsageError in all processes if there are already too many."""
    listed = run.log_dir / FILE
    bad_images = BadImages(run.config.data.max_bad_images, data, listed, is_main=is_main)
    bad_images.check(f"; {run.ckpt_dir / FILE} lists them: delete that file when they are fixed")
    return bad_images
