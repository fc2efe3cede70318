"""Captions as data sets store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.files import BrokenImageError
from data.source import Split

NAMES = ("caption", "captions", "text", "txt")
"""What captions are called in data sets, unless ``--caption_key`` says so."""


def captions_of(values: Mapping[str, Any]) -> list[str]:
    """Return the captions in the ``values`` of a sample (``Split.value``), those that are empty
    left out. Raises BrokenImageError if none is left, and for values that are no text."""
    found, is_there = list[str](), False
    for name, value in values.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is None:
                continue
            is_there = True
            text = _text(each, name)
            if text.strip():
                found.append(text)
    if not found:
        names = " and ".join(values)
        raise BrokenImageError(f"its {names} is empty" if is_there else f"it has no {names}")
    return found


def read_captions(split: Split, number: int) -> list[str]:
    """Return the captions of an image. Raises BrokenImageError."""
    names = split.request.view.values
    return captions_of({name: split.value(number, name) for name in names})


def _text(value: Any, name: str) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            raise BrokenImageError(f"its {name} is not text, but of type {type(value).__name__}")
        text.encode()  # not half of a surrogate pair, which JSON may have
    except UnicodeError:
        raise BrokenImageError(f"its {name} is not valid Unicode") from None
    return text
