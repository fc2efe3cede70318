"""Millions of names in two arrays: processes that share the arrays share the names."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator

import numpy as np

_ENCODING = "utf-8", "surrogateescape"  # file names may hold any byte


class Strings:
    """Strings that lie in an array of bytes, a newline between each and the next.

    A list of them would be copied into each loader process, page by page: to count the references
    to a string is to write to it.
    """

    def __init__(self, content: np.ndarray, ends: np.ndarray) -> None:
        """Take the bytes (uint8), and where in them each string ends (int64)."""
        self.content, self.ends = content, ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """Return these strings. No two of them are in memory at once if ``strings`` is lazy."""
        content, ends = bytearray(), array("q")
        for string in strings:
            if ends:
                content += b"\n"
            content += string.encode(*_ENCODING)
            ends.append(len(content))
        return cls(np.frombuffer(content, np.uint8), np.frombuffer(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = self.ends[number - 1] + 1 if number else 0
        return self.content[start : self.ends[number]].tobytes().decode(*_ENCODING)

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))


class Paths:
    """The paths of files of one folder, or their URLs, made of its path and their names in it."""

    def __init__(self, top: str, names: Strings) -> None:
        self.top, self.names = top, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> str:
        return os.path.join(self.top, self.names[number])

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))
