"""The errors that say what is wrong with a user's folder or image, in one line each."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` on one line that any terminal takes: file names may hold any byte."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class DataFolderError(Exception):
    """Raised for a folder or file that cannot be used; the message says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class BrokenImageError(Exception):
    """Raised for one image file of many that cannot be used; the message is the reason."""


def reason_of(error: Exception) -> str:
    """Return in one line why a file cannot be read, as what a package has raised says."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(" ".join(str(error).split()))[:200] or type(error).__name__
