"""Flags as fields of configurations: their names, their values and what a user types.

``config_fields.flag`` declares a field as a flag; ``training/command_line.py`` parses a command
line; ``training/rules.py`` checks what flags require and exclude.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from config_fields import Flag, flag_of, is_of
from data.files import without_secrets
from training.errors import UsageError
from training.feature_table import FeatureFlags, features, flag_classes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


@dataclass(frozen=True)
class FlagField:
    """A configuration field that is a flag."""

    field: dataclasses.Field
    flag: Flag
    type: Any
    """The type of the field's value without None: ``int`` for ``int | None``."""
    group: str
    """The title of its group in ``--help``."""
    names: tuple[str, ...]
    """The names of the flag; messages use the first."""
    is_switch: bool
    has_negation: bool
    """Whether ``--no-x`` exists in addition to ``--x``: if the default is on, or decided later."""
    bare_names: dict[str, Any]
    """The names that take no value, and the value that each one sets."""
    choices: tuple[str, ...]
    """The allowed words; () if any word is allowed."""
    path: tuple[str | type, ...] = ()
    """What leads to the part of a configuration that has the field: names of fields, and the
    class of a feature's flags."""

    def value_in(self, config: Any) -> Any:
        """Return the field's value in an instance of the class that ``flag_fields`` was asked
        for."""
        for step in self.path:
            config = getattr(config, step) if isinstance(step, str) else config.of(step)
        return getattr(config, self.field.name)

    @property
    def names_files(self) -> bool:
        """Whether its values are paths, URLs or patterns of files."""
        words = re.split(r"[^A-Z]", str(self.flag.metavar))
        return not {"FOLDER", "FILE", "PATH", "PATTERN"}.isdisjoint(words)

    def words(self, value: Any) -> list[str]:
        """Return the command-line words that set the field to this value."""
        if isinstance(value, (list, tuple)):
            words = list(map(str, value))
            joined = ":" in (self.flag.metavar or "") and typing.get_origin(self.type) is tuple
            return [self.names[0], *([":".join(words)] if joined else words)]
        if not self.is_switch:
            return [self.names[0], str(value)]
        if self.has_negation and value is False:
            return [f"--no-{self.names[0].removeprefix('--')}"]
        return [self.names[0]]

    def typed(self, value: Any) -> str:
        """Return what a user types to set the field to this value, for messages."""
        return " ".join(self.words(value))


def flag_fields(config: type) -> tuple[FlagField, ...]:
    """Return the flags of a configuration class and of the classes nested in it, in order. The
    class attribute ``group`` is the title of their group in ``--help``.

    The flags of a feature follow the field ``after`` of its class, else all others of its group.
    """
    return _flag_fields(config, features())


@functools.cache
def _flag_fields(config: type, table: tuple[Any, ...]) -> tuple[FlagField, ...]:
    flags: list[FlagField] = []
    nested: list[FlagField] = []
    of_features: list[tuple[str, type]] = []
    for field, kind in _typed_fields(config):
        if kind is FeatureFlags:
            of_features = [(field.name, flags) for flags in flag_classes()]
        elif dataclasses.is_dataclass(kind):
            nested += _nested((field.name,), kind, table)  # type: ignore[arg-type]
        elif flag := flag_of(field):
            for feature in table:
                for word, meaning in feature.choices.get(field.name, {}).items():
                    text = f"{flag.help}; {word}: {meaning}"
                    flag = dataclasses.replace(flag, choices=(*flag.choices, word), help=text)
            flags.append(_flag_field(field, flag, kind, config.group))  # type: ignore[attr-defined]
    found = [*flags, *nested]
    for name, kind in of_features:
        place = _place_of(kind, found)
        found[place:place] = _nested((name, kind), kind, table)
    return tuple(found)


def _nested(path: tuple[str | type, ...], kind: type, table: tuple[Any, ...]) -> list[FlagField]:
    """Return the flags of the class of a part of a configuration, which is at ``path`` in it."""
    return [
        dataclasses.replace(option, path=(*path, *option.path))
        for option in _flag_fields(kind, table)
    ]


def _place_of(flags: Any, others: Sequence[FlagField]) -> int:
    """Return the index at which a feature's flags are inserted among others."""
    after = getattr(flags, "after", None)
    before = [
        index
        for index, option in enumerate(others, 1)
        if (option.field.name == after if after else option.group == flags.group)
    ]
    return max(before, default=len(others))


def _flag_field(field: dataclasses.Field, flag: Flag, kind: Any, group: str) -> FlagField:
    """Return the flag of a field whose type is ``kind``."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    parts = typing.get_args(kind) if is_union else (kind,)
    plain = next(part for part in parts if part is not type(None))
    names, is_switch = flag.names or (f"--{field.name}",), plain is bool
    turned_off = names[0].startswith("--no_") and field.default is True
    has_negation = is_switch and field.default is not False and not turned_off
    bare_names = dict.fromkeys(names, not turned_off) if is_switch else {}
    if has_negation:
        bare_names |= {f"--no-{name.removeprefix('--')}": False for name in names}
    is_literal = typing.get_origin(plain) is typing.Literal
    choices = flag.choices or (typing.get_args(plain) if is_literal else ())
    bare_names |= flag.shorthands
    return FlagField(field, flag, plain, group, names, is_switch, has_negation, bare_names, choices)


def _typed_fields(config: type) -> list[tuple[dataclasses.Field, Any]]:
    """Return the fields of a configuration class, with their types."""
    hints = typing.get_type_hints(config)
    return [(field, hints[field.name]) for field in fields(config)]


def by_field(*configs: type) -> dict[str, FlagField]:
    """Return the flags of several configuration classes, keyed by field name."""
    return {option.field.name: option for config in configs for option in flag_fields(config)}


def flat(*configs: Any) -> dict[str, Any]:
    """Return the values of configurations and of those nested in them, keyed by field name."""
    return {
        option.field.name: option.value_in(config)
        for config in configs
        for option in flag_fields(type(config))
    }


def values_without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values keyed by field name for a record: ``without_secrets``."""

    def clean(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(clean, value))
        return without_secrets(value) if isinstance(value, str) else value

    return {name: clean(value) for name, value in values.items()}


def from_values(config: type, values: Mapping[str, Any]) -> Any:
    """Make a configuration from values keyed by field name, as returned by ``flat`` or read from
    JSON. Missing fields get their defaults; unknown names are ignored."""
    known = by_field(config)
    chosen: dict[str, Any] = {}
    for field, kind in _typed_fields(config):
        if kind is FeatureFlags:
            chosen[field.name] = FeatureFlags(from_values(each, values) for each in flag_classes())
        elif dataclasses.is_dataclass(kind):
            chosen[field.name] = from_values(kind, values)  # type: ignore[arg-type]
        elif field.name in values:
            value, option = values[field.name], known.get(field.name)
            is_tuple = option and (typing.get_origin(option.type) is tuple or option.flag.several)
            chosen[field.name] = tuple(value) if is_tuple and isinstance(value, list) else value
    return config(**chosen)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with these values, keyed by field name, in it and in those nested in
    it."""
    changed: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, FeatureFlags):
            changed[field.name] = FeatureFlags(with_values(flags, values) for flags in value)
        elif dataclasses.is_dataclass(value):
            changed[field.name] = with_values(value, values)  # type: ignore[type-var]
        elif field.name in values:
            changed[field.name] = values[field.name]
    return dataclasses.replace(config, **changed)


def check_values(config: type, values: Mapping[str, Any]) -> None:
    """Raise ValueError if a value for ``from_values``, read from JSON, is of another type than its
    field, or outside of the range of its flag."""
    known = by_field(config)
    for field, kind in _typed_fields(config):
        name = field.name
        if kind is FeatureFlags:
            for flags in flag_classes():
                check_values(flags, values)
        elif dataclasses.is_dataclass(kind):
            check_values(kind, values)  # type: ignore[arg-type]
        elif name in values and name in known:
            value, flag = values[name], known[name]
            parts = value if isinstance(value, list | tuple) else [value]
            is_chosen = not flag.choices or all(
                part in flag.choices for part in parts if isinstance(part, str)
            )
            if not is_of(value, kind) or not is_chosen:
                added = "" if is_chosen else ": pass the --extension that adds it, if one does"
                raise ValueError(f"{flag.names[0]} cannot be {repr(value)[:100]}{added}")
            for number in parts:
                if isinstance(number, int | float) and flag.flag.kind:
                    try:
                        flag.flag.kind(str(number))
                    except argparse.ArgumentTypeError as error:
                        raise ValueError(f"{flag.names[0]}: {error}") from None


# ------------------------------------------------------------------------------------------------
# Checks of values (for rules between flags: training/rules.py).


def typed_if_set(words: str, *configs: Any) -> str | None:
    """Return what a user types to set the flag in ``words``, such as "--buckets", "--grad_ckpt
    auto" or "--model timm/naflexvit_*", to its value in these configurations; None if ``words``
    have another value or, if they have none, if it has its default or is turned off by
    ``--no-``."""
    name, _, wanted = words.partition(" ")
    for config in configs:
        own: type = type(config)
        if option := _by_name(own, features()).get(name):
            value = option.value_in(config)
            if wanted:
                values = value if isinstance(value, list | tuple) else [value]
                found = (each for each in map(str, values) if fnmatch.fnmatchcase(each, wanted))
                return next((f"{name} {each}" for each in found), None)
            is_off = value == option.field.default or (option.has_negation and value is False)
            return None if is_off else option.typed(value)
    return None  # another backend's


@functools.cache
def _by_name(config: type, table: tuple[Any, ...]) -> dict[str, FlagField]:
    """Return the flags of a configuration class, keyed by each of their names."""
    return {name: option for option in _flag_fields(config, table) for name in option.names}


def check_range(flag: str, low: float, high: float) -> None:
    """Raise UsageError if the two values of ``flag`` are not in order."""
    if low > high:
        raise UsageError(f"{flag} {low:g} {high:g}: the minimum must not exceed the maximum")


def check_foreign(others: Iterable[Any], backend: str, given: Collection[str]) -> None:
    """Raise UsageError for a flag of another backend than ``backend``, which would have no effect.
    ``others``: the configurations of all backends; ``given``: the fields set on the command
    line."""
    for config in others:
        if backend in config.backends:
            continue
        for option in by_field(type(config)).values():
            name = option.field.name
            if backend in option.flag.backends:
                continue
            if name in given and getattr(config, name) != option.field.default:
                owners = (
                    option.flag.backends
                    or [
                        condition.removeprefix("backend=")
                        for condition in option.flag.requires
                        if condition.startswith("backend=")
                    ]
                    or config.backends
                )
                raise UsageError(
                    f"{option.names[0]} requires --backend {' or '.join(owners)}, not {backend}"
                )
