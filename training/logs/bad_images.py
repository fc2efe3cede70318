"""Keeps the images of a run that could not be read: listed, counted over all processes, limited."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from data.loading.loader import BatchLoader
from data.own_files import no_link
from training.errors import UsageError
from training.hosts import processes

FILE = "bad_images.txt"
_SEPARATOR = "\t"


class BadImages:
    """Knows, in every process, which images of the run's data are broken."""

    def __init__(
        self, ckpt_dir: Path, limit: int, *, is_main: bool, say: Callable[[str], None]
    ) -> None:
        self._path, self._limit, self._is_main, self._say = ckpt_dir / FILE, limit, is_main, say
        # What the first process has read, for all: they count alike.
        self._known = set(processes.gather(self._listed() if is_main else [])[0])

    def _listed(self) -> list[str]:
        try:
            lines = self._path.read_text(errors="surrogateescape").splitlines()
        except OSError:
            return []
        return [line.partition(_SEPARATOR)[0] for line in lines if line]

    def collect(self, loaders: Iterable[BatchLoader]) -> None:
        """List what the loaders have found since the last call; all processes must call it.

        Raises UsageError, in all of them, beyond the limit.
        """
        mine = [found for loader in loaders for found in loader.bad_images()]
        new: dict[str, str] = {}
        for part in processes.gather(mine):
            new |= {path: reason for path, reason in part if path not in self._known}
        if not new:
            return
        self._known |= new.keys()
        if self._is_main:
            self._write(new)
        for path, reason in new.items():
            self._say(f"note: {path} cannot be read ({reason}): left out")
        if len(self._known) > self._limit:
            raise UsageError(
                f"{len(self._known)} images cannot be read, more than --max_bad_images "
                f"{self._limit}: see {self._path}, mend or remove them",
                agreed=True,
            )

    def _write(self, new: dict[str, str]) -> None:
        try:
            with open(self._path, "a", errors="surrogateescape", opener=no_link) as file:
                file.writelines(f"{path}{_SEPARATOR}{why}\n" for path, why in new.items())
        except OSError as error:
            self._say(f"note: {FILE} cannot be written ({error.strerror})")
