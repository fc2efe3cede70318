"""``--print_config``: the resolved configuration of a training, as a file of flags or as JSON."""

from __future__ import annotations

import json
import re
import shlex
from decimal import Decimal
from typing import Any

from training.errors import UsageError, is_first_of_torchrun
from training.flags import FlagField, flag_fields, flat
from training.resolve import Run

_OWN = ("print_config", "json")
"""Fields of the flags that ask for the configuration, which are not part of it."""


def print_run(run: Run) -> tuple[Run, None]:
    """Print the configuration in the first process; return the run, and nothing to start.

    Raises UsageError for a value that a file of flags cannot hold.
    """
    if is_first_of_torchrun():
        print(_json(run) if run.config.use.json else _file_of_flags(run))
    return run, None


def _options(run: Run) -> list[FlagField]:
    configs = (type(run.config), type(run.backend_config))
    options = [option for config in configs for option in flag_fields(config)]
    return [option for option in options if option.field.name not in _OWN]


def _json(run: Run) -> str:
    groups: dict[str, dict[str, Any]] = {}
    for option in _options(run):
        name = option.field.name
        groups.setdefault(option.group, {})[name] = run.values[name]
    return json.dumps(groups, indent=2)


def _file_of_flags(run: Run) -> str:
    """Return the flags that are set or have another value than their default, one a line, after
    comments about the run."""
    comments = [
        f"# {run.model.name}, {run.model.parameter_count:,} parameters",
        f"# {run.mesh.devices} device(s), {run.mesh}, {run.global_batch_line}",
    ]
    values = run.values
    secret = {
        name
        for name, value in flat(run.config, run.backend_config).items()
        if value != values[name]
    }
    changed = [
        option for option in _options(run) if values[option.field.name] != option.field.default
    ]
    replaced = {name for option in changed for name in option.flag.replaces}
    flags = []
    for option in _options(run):
        name, value = option.field.name, values[option.field.name]
        # A switch that is off by default, and None, cannot be typed.
        has_words = value is not None and (not option.is_switch or option.has_negation)
        is_typed = name in run.config.explicitly_set and has_words
        if (option in changed or is_typed) and name not in replaced:
            flags.append(_line(option, value))
            if name in secret:
                comments.append(
                    f"# {option.names[0]} is printed without passwords and signatures: add them"
                )
    return "\n".join([*comments, *flags])


def _line(option: FlagField, value: Any) -> str:
    """Return a line of a file of flags that sets the value."""
    name, *words = map(_plain_number, option.words(value))
    if len(words) == 1 and re.match(r"@|-[^\d.]", words[0]):  # neither a file nor a flag
        name, words = f"{name}={words[0]}", []
    line = shlex.join([name, *words])
    if len(line.splitlines()) > 1:
        raise UsageError(
            f"{option.names[0]} has a line break, which a file of flags cannot hold: use --json"
        )
    return line


def _plain_number(word: str) -> str:
    """Return a negative number without an exponent, with which argparse takes it for a flag."""
    return f"{Decimal(word):f}" if re.fullmatch(r"-[\d.]+e[-+]?\d+", word) else word
