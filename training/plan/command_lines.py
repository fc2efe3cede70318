"""Configurations as the command lines that give them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from typing import Any

from training.options.flag_rules import by_field, flat

ALWAYS = ("model", "batch_size", "precision", "grad_ckpt")
"""Fields that the command line of a plan names whatever their values."""


def words_of(
    *configs: Any, without: Collection[str] = (), always: Collection[str] = ()
) -> list[str]:
    """Return the flags that make these configurations of the defaults, but for fields ``without``.

    Fields ``always`` are there with their defaults, too. What the environment gives by a variable
    is left to it.
    """
    values, known = flat(*configs), by_field(*map(type, configs))
    return [
        word
        for name, option in known.items()
        if name not in without
        and (values[name] != option.field.default or name in always)
        and not (option.flag.env and os.environ.get(option.flag.env))
        for word in option.words(values[name])
    ]


def typed(*words: str | Sequence[str]) -> str:
    """Return words as a line that a shell takes."""
    return shlex.join(
        word for part in words for word in ([part] if isinstance(part, str) else part)
    )
