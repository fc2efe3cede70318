"""Declare fields of configuration dataclasses as command-line flags.

    @dataclass(frozen=True)
    class DataConfig:
        num_workers: int = flag(4, "number of loader processes", kind=count)

``training/command_line.py`` builds the parser from these fields. This module imports no other
module of the project, so ``data/`` and ``models/`` can declare flags, too. It also reads files of
flags, for the program and its launchers.
"""

import argparse
import dataclasses
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

_KEY = "flag"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The arguments of ``flag`` for one field; see there."""

    help: str
    kind: Callable[[str], Any] | None = None
    names: tuple[str, ...] = ()
    metavar: str | tuple[str, ...] | None = None
    shorthands: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env: str | None = None
    bare: Any = None
    several: bool = False
    choices: tuple[str, ...] = ()
    common: bool = False
    backends: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    requires_at_default: bool = False
    incompatible_with: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()


def flag(default: Any, help: str, **properties: Any) -> Any:
    """Declare a field of a frozen dataclass that is set by a flag of the same name.

    The field's type determines what is parsed: ``bool`` is a switch (with a ``--no-`` form if it is
    on, or None, by default), ``Literal`` one of its values, ``tuple[float, float]`` two numbers,
    ``list[str]`` one or more words. If an empty word has a meaning, "" is one of the values of a
    ``Literal``.

    ``help`` starts with a verb or noun that says what the flag does or sets. The default is
    appended unless the text mentions it.

    properties
    ----------
    kind: argparse type that converts a word; required for numbers and for paths.
    names: the flag's names, if not the field's; messages use the first. A switch that is on by
        default and named ``--no_...`` turns it off.
    metavar: what ``--help`` shows for the value.
    shorthands: flags without a value, and the value that each one sets.
    env: environment variable with the default.
    bare: the value if the flag is given without one.
    several: takes one or more values; a single one is stored as is, more as a tuple.
    choices: the allowed words, if the type does not list them.
    common: shown by plain ``--help``.
    backends: the backends that use it, if they are not those of its class.
    requires: conditions that must hold if the value is not the default, each "field" or
        "field=value", with "|" between alternatives.
    requires_at_default: whether the conditions must also hold if the flag is set to its default.
        Use this for a setting of a feature whose default does not mean "off". Other flags may be
        set to their defaults anywhere, to turn off what a file of flags has turned on.
    incompatible_with: fields that must be at their defaults if this one is not.
    replaces: fields with the same meaning, whose flags must not be set together with this one, not
        even to their defaults.
    """
    return dataclasses.field(default=default, metadata={_KEY: Flag(help=help, **properties)})


def flag_of(field: dataclasses.Field) -> Flag | None:
    """Return the ``Flag`` of a field; None if the field is not a flag."""
    return field.metadata.get(_KEY)


# Kinds of values: argparse types.


def not_empty(word: str) -> str:
    """Parse a word: the default kind. An empty word is usually an unset shell variable."""
    if not word.strip():
        raise argparse.ArgumentTypeError("must not be empty (is a shell variable unset?)")
    return word


def bounded(kind: type, low: float, high: float, *, open_high: bool = False) -> Callable:
    """Return an argparse type for a finite number from ``low`` to (with ``open_high``: below)
    ``high``."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not {name}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not a finite number")
        if not low <= value <= high or (open_high and value == high):
            limit = "below" if open_high else "at most"
            raise argparse.ArgumentTypeError(
                f"{shortened(text)} must be at least {low} and {limit} {high}"
            )
        return value + 0  # -0.0 becomes 0.0

    return convert


def shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


_MAX_COUNT, _MAX_NUMBER = 10**9, 10**4  # above any useful value

positive = bounded(int, 1, _MAX_COUNT)
count = bounded(int, 0, _MAX_COUNT)
seed = bounded(int, 0, 2**63 - 1)  # PyTorch's generators take 64 bits
rate = bounded(float, 0, 1, open_high=True)
fraction = bounded(float, 0, 1)
number = bounded(float, -1e30, 1e30)  # in fp32's range
non_negative = bounded(float, 0, _MAX_NUMBER)
positive_number = bounded(float, 1e-12, _MAX_NUMBER)
seconds = bounded(float, 0, 1e8)


def count_or_percent(text: str) -> int | str:
    """Parse a count, or a percentage with its sign."""
    number, sign, rest = text.partition("%")
    if sign and not rest:
        return f"{bounded(float, 0, 100)(number):.10g}%"
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (or a percentage such as 1%)") from None


def positive_or_slices(text: str) -> int | str:
    """Parse a number of at least 1, or the word "slices"."""
    try:
        return text if text == "slices" else positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (or slices)") from None


def height_by_width(text: str) -> str:
    """Parse HxW, the size of an image in pixels; return it without leading zeros."""
    try:
        height, width = map(bounded(int, 1, 16384), text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not HxW, height and width in pixels, such as 192x256"
        ) from None
    return f"{height}x{width}"


def side_and_share(text: str) -> str:
    """Parse SIDE:SHARE, pixels and a fraction, or just SIDE; return it without leading zeros."""
    side, sign, share = text.partition(":")
    try:
        pixels = bounded(int, 1, 16384)(side)
        return f"{pixels}:{bounded(float, 1e-6, 1)(share):.10g}" if sign else f"{pixels}"
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not SIDE:SHARE, a side in pixels and a fraction of training, "
            "such as 192:0.4"
        ) from None


def step_range(text: str) -> tuple[int, int]:
    """Parse FIRST:LAST, a range of steps counted from 1, both included."""
    try:
        first, last = map(positive, text.split(":"))
    except (ValueError, argparse.ArgumentTypeError):
        first, last = 1, 0
    if first > last:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not FIRST:LAST, steps counted from 1, such as 10:12"
        )
    return first, last


def path_or_url(word: str) -> str:
    """Parse a path or URL, and expand a leading ``~`` or ``~user``: a shell does not expand it
    after ``=``, as in ``--ckpt_dir=~/runs``, or in an @FILE."""
    expanded = os.path.expanduser(not_empty(word))
    if expanded.startswith("~"):
        user = word.partition("/")[0]
        missing = f"no user {user[1:]}" if user[1:] else "HOME is not set"
        raise argparse.ArgumentTypeError(
            f"{shortened(word)}: {missing}; for a folder with this name, use ./{shortened(word)}"
        )
    return expanded


def local_name(word: str) -> str:
    """Parse a local path; refuse a URL."""
    return str(local_path(word))


def local_path(word: str) -> Path:
    """Parse a local path as a ``Path``; refuse a URL."""
    if "://" in word:
        raise argparse.ArgumentTypeError(
            f"{shortened(word)} is a URL: give a local path, and copy the files from or to the URL"
        )
    return Path(path_or_url(word))


# Values that a file contains.


def is_of(value: Any, hint: Any) -> bool:
    """Return True if a value from JSON, where tuples are lists, has the type ``hint``: a plain
    type, a Literal of words, or a union, list, tuple or dict of them."""
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(is_of(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is dict:
        return isinstance(value, dict) and all(is_of(each, parts[1]) for each in value.values())
    if kind in (list, tuple):
        if not isinstance(value, list | tuple):
            return False
        each = parts[:1] * len(value) if kind is list or parts[1:] == (...,) else parts
        return len(value) == len(each) and all(map(is_of, value, each))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


# Files of flags: @FILE stands for the words in the file.

_LARGEST_FILE = 2**20  # bytes


class Word(NamedTuple):
    """A word of the command line, with its file and line if it is from a file."""

    text: str
    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.line}: " if self.file else ""


def expand_flag_files(
    words: Iterable[Word], folder: str = "", including: tuple[Path, ...] = ()
) -> Iterator[Word]:
    """Yield words, with each ``@FILE`` replaced by the words in the file. ``folder``: what relative
    files are in, if not the working directory; ``including``: the files that include these words.
    Raises ArgumentTypeError."""
    for word in words:
        file = word.text
        if not file.startswith("@"):
            yield word
            continue
        name = os.path.join(folder, os.path.expanduser(file[1:]))
        path = Path(os.path.realpath(name))
        if path in including:
            raise argparse.ArgumentTypeError(
                f"{file} includes itself: remove the @FILE line that makes it circular"
            )
        try:
            with open(name, "rb") as opened:  # may be a pipe, as in @<(...)
                content = opened.read(_LARGEST_FILE + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise argparse.ArgumentTypeError(
                f"{file}: {reason} (@FILE stands for the flags in FILE)"
            ) from None
        if len(content) > _LARGEST_FILE:
            raise argparse.ArgumentTypeError(
                f"{file} is larger than {_LARGEST_FILE:,} bytes: is it a file of flags?"
            )
        try:
            lines = content.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            number = content.count(b"\n", 0, error.start) + 1
            raise argparse.ArgumentTypeError(
                f"{file}, line {number}: not UTF-8 text: save the file as UTF-8"
            ) from None
        # Quoting works as in a shell, # starts a comment, a backslash at the end continues a line.
        continued = ""
        for number, text in enumerate([*lines, ""], 1):
            # Blanks after a backslash are ignored. A backslash after a blank only means that more
            # words follow.
            line = continued + re.sub(r"\s\\$", "", text.rstrip())
            continued = ""
            try:
                in_line = [Word(text, file, number) for text in shlex.split(line, comments=True)]
            except ValueError as error:
                if str(error) != "No escaped character":
                    raise argparse.ArgumentTypeError(
                        f"{file}, line {number}: {error}: {line}"
                    ) from None
                continued = line[:-1]
            else:
                yield from expand_flag_files(in_line, folder, (*including, path))
