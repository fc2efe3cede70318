"""How a field of a configuration's dataclass says which flag of the command line it is.

    @dataclass(frozen=True)
    class DataConfig:
        num_workers: int = flag(4, "loader processes", kind=count)

``training/flags.py`` makes the parser from such fields. This module knows no other of the
project, so that ``data/`` and ``models/`` can describe what they take.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEY = "flag"


@dataclass(frozen=True)
class Flag:
    """A ``Flag`` holds what the function ``flag`` was told of a field."""

    help: str
    kind: Callable[[str], Any] | None
    names: tuple[str, ...]
    metavar: str | tuple[str, ...] | None
    shorthands: Mapping[str, Any]
    env: str | None
    bare: Any
    several: bool
    choices: tuple[str, ...]
    common: bool
    needs: tuple[str, ...]
    conflicts: tuple[str, ...]
    instead_of: tuple[str, ...]


def flag(
    default: Any,
    help: str,
    *,
    kind: Callable[[str], Any] | None = None,
    names: Sequence[str] = (),
    metavar: str | tuple[str, ...] | None = None,
    shorthands: Mapping[str, Any] | None = None,
    env: str | None = None,
    bare: Any = None,
    several: bool = False,
    choices: Sequence[str] = (),
    common: bool = False,
    needs: Sequence[str] = (),
    conflicts: Sequence[str] = (),
    instead_of: Sequence[str] = (),
) -> Any:
    """Make a field of a frozen dataclass that is set by a flag of its name.

    The field's type says what is read: ``bool`` a switch (with ``--no-`` if it is on, or None, by
    default), ``Literal`` one of its values, ``tuple[float, float]`` two numbers, ``list[str]`` one
    word or more; ``kind`` converts a word, and is needed for numbers. Where an empty word has a
    meaning, "" is one of the values of a ``Literal``.

    ``names``: the flag's names if not the field's, messages use the first one; a switch that is
    on by default and named ``--no_...`` is turned off by it. ``shorthands``: flags without a value
    that set a value. ``env``: the variable of the environment that gives the default. ``bare``: the
    value where the flag is given without one. ``several``: it takes one value or more, of which one
    alone stands for itself, more are a tuple. ``choices``: the words that can be given, where they
    are not in the type. ``common``: shown by ``--help`` alone. ``needs``: conditions that must hold
    where the value is not the default, each "field" or "field=value", with "|" between
    alternatives. ``conflicts``: fields that must then be at their defaults. ``instead_of``: fields
    that say the same in another way, whose flags must then not be given, not even at their
    defaults.
    """
    told = Flag(
        help,
        kind,
        tuple(names),
        metavar,
        dict(shorthands or {}),
        env,
        bare,
        several,
        tuple(choices),
        common,
        tuple(needs),
        tuple(conflicts),
        tuple(instead_of),
    )
    return dataclasses.field(default=default, metadata={_KEY: told})


def flag_of(field: dataclasses.Field) -> Flag | None:
    """Return what ``flag`` was told of this field; None if the field is no flag."""
    return field.metadata.get(_KEY)


# -- kinds of values -------------------------------------------------------------------


def not_empty(word: str) -> str:
    """Read a word, as an argparse type: the one of all flags without a ``kind``.

    An empty one is refused: as a rule it is a variable of the shell that is not set.
    """
    if not word.strip():
        raise argparse.ArgumentTypeError("it must not be empty: is a variable of the shell unset?")
    return word


def bounded(kind: type, low: float, high: float, *, open_high: bool = False) -> Callable:
    """Return an argparse type that reads a finite number from ``low`` to ``high`` (or below it)."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{_shown(text)!r} is not {name}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{_shown(text)!r} is not a finite number")
        if not low <= value <= high or (open_high and value == high):
            limit = "below" if open_high else "at most"
            raise argparse.ArgumentTypeError(
                f"{_shown(text)} must be at least {low} and {limit} {high}"
            )
        return value + 0  # -0.0 becomes 0.0

    return convert


def _shown(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


_MOST, _LARGEST = 10**9, 10**4  # what nobody needs more of

positive = bounded(int, 1, _MOST)
count = bounded(int, 0, _MOST)
seed = bounded(int, 0, 2**63 - 1)  # PyTorch's generators take 64 bits
rate = bounded(float, 0, 1, open_high=True)
fraction = bounded(float, 0, 1)
number = bounded(float, -1e30, 1e30)  # in fp32's range
non_negative = bounded(float, 0, _LARGEST)
positive_number = bounded(float, 1e-12, _LARGEST)
seconds = bounded(float, 0, 1e8)


def count_or_percent(text: str) -> int | str:
    """Read, as an argparse type, a number of things, or a percentage of them with its sign."""
    number, sign, rest = text.partition("%")
    if sign and not rest:
        return f"{bounded(float, 0, 100)(number):.10g}%"
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (or a percentage, as 1%)") from None


def height_by_width(text: str) -> str:
    """Read, as an argparse type, HxW: the pixels of an image; return it without leading zeros."""
    height, cross, width = text.partition("x")
    try:
        side = bounded(int, 1, 16384)
        sides = side(height), side(width)
    except argparse.ArgumentTypeError:
        cross = ""
    if not cross:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)!r} is not HxW, height and width in pixels, as 192x256"
        )
    return f"{sides[0]}x{sides[1]}"


def step_range(text: str) -> tuple[int, int]:
    """Read, as an argparse type, FIRST:LAST: steps counted from 1, both included."""
    first, colon, last = text.partition(":")
    try:
        steps = positive(first), positive(last)
    except argparse.ArgumentTypeError:
        steps = 1, 0
    if not colon or steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"{_shown(text)!r} is not FIRST:LAST, two steps from 1 on")
    return steps


def local_path(word: str) -> Path:
    """Read a file or folder of this machine, as an argparse type; a URL is none."""
    if "://" in not_empty(word):
        raise argparse.ArgumentTypeError(
            f"{_shown(word)} is a URL: give a place on this machine, and copy from or to there"
        )
    return Path(word)
