"""Keeps the images of a run that could not be read: listed, counted over all processes, limited."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from data.files import no_link, regular
from data.loader import BatchLoader
from data.source import DataSource
from training.logs.records import Evaluation
from training.processes import exchange

FILE = "bad_images.txt"
_SEPARATOR = "\t"
_SAID = 20  # images, in the log, of those found since the last log step
TRAIN, VAL = "train", "val"
_CALLED = {TRAIN: "training", VAL: "validation"}


class BadImages:
    """Knows, in every process, which images of the run's data cannot be read."""

    def __init__(
        self,
        limit: int | str,
        data: DataSource,
        file: Path | None = None,
        *,
        is_main: bool,
    ) -> None:
        """Count unreadable images of ``data`` against ``limit``, as --max_bad_images has it.

        ``file`` lists them, those of earlier starts too, which count; None: nothing is written.
        All processes must call this.
        """
        self._limit, self._file, self._is_main = limit, file, is_main
        self._sizes = {TRAIN: data.train_length, VAL: data.val_length}
        self._classes = data.classes or []
        self._labels: dict[str, dict[str, int | None]] = {TRAIN: {}, VAL: {}}
        """The label of each by its path, by split; None where an earlier start has found it."""
        # What the first process has read, for all: they count alike.
        listed = exchange.gather(_listed(file) if file and is_main else [])[0]
        self._listed = {path for path, _ in listed}
        for path, split in listed:
            if split in self._labels:  # earlier versions wrote none
                self._labels[split][path] = None

    @property
    def excess(self) -> str | None:
        """What to say if more images cannot be read than may be; alike in all processes."""
        counts = {split: len(found) for split, found in self._labels.items()}
        total = sum(counts.values())
        if isinstance(self._limit, int):
            told = f"{total:,} images cannot be read, more than --max_bad_images {self._limit}"
            return _with_advice(told, total) if total > self._limit else None
        for split, found in counts.items():
            size = self._sizes[split]
            most = math.ceil(size * Fraction(self._limit.rstrip("%")) / 100)
            if found > most:
                told = (
                    f"{found:,} {_CALLED[split]} images cannot be read, more than --max_bad_images "
                    f"{self._limit} ({most:,} of {size:,})"
                )
                return _with_advice(told, total)
        return None

    def collect(self, split: str, loader: BatchLoader, say: Callable[[str], None]) -> None:
        """List, and ``say``, what the loader of ``split`` has found since the last call.

        All processes must call this.
        """
        new: dict[str, str] = {}
        for part in exchange.gather(loader.bad_images()):
            for path, reason, label in part:
                self._labels[split][path] = label
                if path not in self._listed:
                    new[path] = reason
        self._listed |= new.keys()
        said = list(new.items())[:_SAID] if self._file else new.items()
        for path, reason in said:
            say(f"note: {path} cannot be read ({reason}): left out")
        if len(new) > len(said):
            say(f"note: nor can {len(new) - len(said):,} others be read: {FILE} lists them")
        if new and self._file and self._is_main:
            try:
                with open(self._file, "a", errors="surrogateescape", opener=no_link) as file:
                    file.writelines(
                        _SEPARATOR.join((path, reason, split)) + "\n"
                        for path, reason in new.items()
                    )
            except OSError as error:
                say(f"note: {FILE} cannot be written ({error.strerror})")

    def left_out_of(self, result: Evaluation, names: Sequence[str] | None = None) -> Evaluation:
        """Return an evaluation with what could not be read: how many images, and which classes have
        none left, by ``names``, or those of the data. All processes must call it."""
        names = self._classes if names is None else names
        labels = [label for label in self._labels[VAL].values() if label is not None]
        seen = exchange.gather(sorted(result.labels.intersection(labels)))
        lost = sorted(set(labels).difference(*seen))
        told = tuple(names[each] if each < len(names) else f"class {each}" for each in lost)
        return replace(result, left_out=len(labels), lost_classes=told)


def _with_advice(told: str, count: int) -> str:
    return f"{told}: mend or remove them, or allow more with --max_bad_images {count}"


def _listed(file: Path) -> list[tuple[str, str]]:
    """Return the path and the split of each image that the file lists."""
    try:
        with open(file, errors="surrogateescape", opener=regular) as opened:
            lines = opened.read().splitlines()
    except OSError:
        return []
    parts = (line.split(_SEPARATOR) for line in lines if line)
    return [(each[0], each[-1]) for each in parts]
