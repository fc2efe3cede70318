"""The command line: flags from configuration fields, files of flags, help.

``parse`` turns a command line into configurations. ``config_fields.flag`` declares a field as a
flag; ``training/rules.py`` checks what flags require and exclude.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import fnmatch
import functools
import os
import re
import sys
import time
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from config_fields import Flag, Word, expand_flag_files, flag_of, is_of, not_empty
from data.files import without_secrets
from training.errors import UsageError, prints_here
from training.feature_table import FeatureFlags, features, flag_classes
from training.foreign_flags import meanings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

PROGRAM = "run_vit_training.py"
_DESCRIPTION = "Train Vision Transformers too big for one chip, sharded over TPUs or NVIDIA GPUs."


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
            if name in given and getattr(config, name) != option.field.default:
                owners = [
                    condition.removeprefix("backend=")
                    for condition in option.flag.requires
                    if condition.startswith("backend=")
                ] or config.backends
                raise UsageError(
                    f"{option.names[0]} requires --backend {' or '.join(owners)}, not {backend}"
                )


class _Mistake(UsageError):
    """Raised for an invalid command line; the message is one line. ``see``: where to read more."""

    def __init__(self, message: str, see: str = "--help") -> None:
        super().__init__(message)
        self.see = see


# ------------------------------------------------------------------------------------------------
# The parser.

_METAVARS: dict[Any, str] = {int: "N", float: "X"}


class FlagParser(argparse.ArgumentParser):
    """A parser that raises ``_Mistake`` on an invalid word."""

    options: dict[str, FlagField]
    flags: list[Word]
    """The flags on the command line that have not been parsed yet."""
    given: dict[tuple[str, str], dict[str, Any]]
    """The values parsed, by field and file, then by flag name."""

    def error(self, message: str) -> NoReturn:
        raise _Mistake(f"{self.flags[0].place if self.flags else ''}{message}")


class _Set(argparse.Action):
    """Sets a field to the parsed value, or to the value that a name without one stands for.

    Two different flags may not set a field to different values. A flag given again overrides the
    earlier one, as does a flag after the file that contains the earlier one.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        option = parser.options[self.dest]
        if option_string in option.bare_names:
            values = option.bare_names[option_string]
        elif option.flag.several:
            values = values[0] if len(values) == 1 else tuple(values)
        given = parser.given.setdefault((self.dest, parser.flags[0].file), {})
        given[option_string] = values
        for name, value in given.items():
            if value != values:
                contradiction = " contradicts ".join(
                    " ".join([flag, *([] if flag in option.bare_names else option.words(v)[1:])])
                    for flag, v in ((name, value), (option_string, values))
                )
                parser.error(f"{contradiction}: drop one of the two")
        parser.flags.pop(0)
        setattr(namespace, self.dest, values)


def build_parser(shown: Sequence[FlagField]) -> FlagParser:
    """Return the parser of these flags; its Namespace contains only those that are set."""
    parser = FlagParser(prog=PROGRAM, description=_DESCRIPTION, allow_abbrev=False, add_help=False)
    parser.options = {option.field.name: option for option in shown}
    parser.flags, parser.given = [], {}
    hidden = argparse.SUPPRESS  # the printed text explains it
    parser.add_argument("-h", "--help", nargs="?", const="", default=hidden, help=hidden)
    groups: dict[str, Any] = {}
    for option in shown:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        group, flag = groups[option.group], option.flag
        text = help_text(option).replace("%", "%%")
        how = {"action": _Set, "dest": option.field.name, "default": argparse.SUPPRESS}
        if option.is_switch:
            group.add_argument(*option.bare_names, nargs=0, help=text, **how)
            continue
        reading: dict[str, Any] = {"type": flag.kind or not_empty}
        if flag.metavar or option.type in _METAVARS:
            reading["metavar"] = flag.metavar or _METAVARS[option.type]
        if typing.get_origin(option.type) is list:
            reading["nargs"] = "+"
        if option.choices:
            reading |= {"choices": option.choices, "type": flag.kind or str}  # argparse lists them
        elif flag.several:
            reading["nargs"] = "+"
        elif isinstance(flag.metavar, tuple):
            reading["nargs"] = len(flag.metavar)
        if flag.bare is not None:
            reading |= {"nargs": "?", "const": flag.bare}
        group.add_argument(*option.names, help=text, **reading, **how)
        for name, value in flag.shorthands.items():
            text = f"same as {option.typed(value)} (default: off)"
            group.add_argument(name, nargs=0, help=text, **how)
    return parser


def help_text(option: FlagField) -> str:
    """Return the help of a flag with its default."""
    text, default = option.flag.help, option.field.default
    if "default" in text:
        return text
    if default is None:
        default = "none"
    elif isinstance(default, bool):
        default = "on" if default and option.has_negation else "off"
    elif isinstance(default, tuple):
        default = " ".join(f"{part:.5g}" for part in default)
    return f"{text} (default: {default})"


def parse(
    argv: Sequence[str] | None,
    configs: Mapping[str, type],
    before_flags: Callable[[list[str]], None] = lambda words: None,
) -> dict[str, Any]:
    """Parse the command line into an instance of each configuration class, keyed by the same names;
    a field ``explicitly_set`` gets the names of all fields that are set. Exits with code 2 on an
    invalid argument, and with 0 after ``--help``."""
    try:
        words = [*expand_flag_files(map(Word, sys.argv[1:] if argv is None else argv))]
        before_flags([word.text for word in words])
        known = [option for config in configs.values() for option in flag_fields(config)]
        names = {name for option in known for name in (*option.names, *option.bare_names)}
        words = _with_our_names(words, names)
        parser = build_parser(known)
        parser.flags = [word for word in words if word.text.partition("=")[0] in names]
        namespace, unknown = parser.parse_known_args([word.text for word in words])
        values = vars(namespace)
        if "help" in values:
            _print_help(values["help"], known)
        if unknown:
            raise _unknown_words(unknown, words, names)
        values["explicitly_set"] = frozenset(values)
        for option in known:
            env = option.flag.env
            if env and os.environ.get(env) and option.field.name not in values:
                try:
                    values[option.field.name] = (option.flag.kind or not_empty)(os.environ[env])
                except argparse.ArgumentTypeError as error:
                    raise _Mistake(f"environment variable {env}: {error}") from None
    except (_Mistake, UsageError, argparse.ArgumentTypeError) as error:
        mistake = error if isinstance(error, _Mistake) else _Mistake(str(error))
        tell(mistake, f" (see {mistake.see})")
        sys.exit(2)
    return {name: from_values(config, values) for name, config in configs.items()}


def _with_our_names(words: Sequence[Word], names: Collection[str]) -> list[Word]:
    """Return the words with hyphens or underscores in flags as the program has them."""
    by_plain = {name.replace("-", "_"): name for name in names}

    def named(word: Word) -> Word:
        name, equals, value = word.text.partition("=")
        if not name.startswith("--") or name in names:
            return word
        name = by_plain.get(name.replace("-", "_"), name)
        return word._replace(text=f"{name}{equals}{value}")

    return [named(word) for word in words]


def _unknown_words(
    unknown: Sequence[str], words: Sequence[Word], names: Collection[str]
) -> _Mistake:
    """Return the error of unknown words: of all flags, and of all words that are other programs';
    if there are none, of the first."""
    places = {word.text: word.place for word in words}
    foreign = meanings(unknown)
    texts = []
    for word in unknown:
        if word in foreign:
            texts.append(places[word] + foreign[word])
        elif word.startswith("--"):
            near = difflib.get_close_matches(word.partition("=")[0], sorted(names), n=1)
            meant = f": did you mean {near[0]}?" if near else ""
            texts.append(f"{places[word]}unknown flag {word}{meant}")
    if texts:
        mistake = "; ".join(dict.fromkeys(texts))
        return _Mistake(mistake, see="docs/coming_from.md") if foreign else _Mistake(mistake)
    wrong = next((word for word in unknown if word.startswith("-")), unknown[0])
    if wrong.startswith("-"):
        return _Mistake(f"{places[wrong]}unknown flag {wrong}")
    as_flag = ": settings are flags, as in --lr 1e-4" if "=" in wrong else ""
    return _Mistake(f"{places[wrong]}unrecognized argument: {wrong}{as_flag}")


def tell(error: UsageError, hint: str = "") -> None:
    """Print a usage error in one line, in the process that should print it. The others wait:
    torchrun terminates all processes as soon as one exits, and might terminate the one that
    prints."""
    if prints_here(error):
        where = f"{error.process}: " if error.process else ""
        print(f"{PROGRAM}: error: {where}{error}{hint}", file=sys.stderr)
    else:
        time.sleep(2)


def _print_help(which: str, known: Sequence[FlagField]) -> NoReturn:
    """Print the common flags, all flags, a group, or those that match a word; exit with code 0."""
    groups = {option.group.split()[0].rstrip(":,").lower(): option.group for option in known}
    word, shown = which.lower(), []
    if word == "all":
        shown = list(known)
    elif word in groups:
        shown = [option for option in known if option.group == groups[word]]
    elif word:  # in a flag's name, or at the start of a word in its help or choices
        word = word.lstrip("-")
        start = re.compile(rf"(?<![a-z0-9]){re.escape(word)}")
        for option in known:
            names = {*option.names, *option.bare_names}
            text = " ".join([option.flag.help, *map(str, option.choices)]).lower()
            if start.search(text) or any(word in name.lower() for name in names):
                shown.append(option)
    else:
        shown = [option for option in known if option.flag.common]
    if not shown:
        raise _Mistake(f"--help {which}: no flag matches; the groups are all, {', '.join(groups)}")
    text = build_parser(shown).format_help()
    rest = text.partition("\n\n")[2]  # the usage would list all flags again
    print(f"usage: {PROGRAM} [flags]   {PROGRAM} @FILE [flags]: FILE contains flags\n\n{rest}")
    print(
        "help:\n  -h, --help [WORD]  show the common flags, or those with WORD in their name or "
        f"help;\n                     all: all {len(known)} flags; GROUP: the flags of a group: "
        f"{', '.join(groups)}"
    )
    sys.exit(0)


class OneLineParser(argparse.ArgumentParser):
    """The parser of a small tool: exits with one line and code 2 on an invalid argument."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)
        self.register("type", None, not_empty)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")
