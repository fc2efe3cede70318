"""The command line of a small program beside the training itself."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import shlex
import stat
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from config_fields import Flag, flag_of, not_empty
from training.config import PlanConfig
from training.errors import UsageError

if TYPE_CHECKING:
    from training.config import RunConfig


# ------------------------------------------------------------------------------------------------
# Looks at configurations as flags: their names, which need which, their plain values.


@dataclass(frozen=True)
class Option:
    """A field that is a flag, with what its type says of it."""

    field: dataclasses.Field
    flag: Flag
    type: Any
    """The type of the field's value without None: ``int`` for ``int | None``."""
    group: str
    """The title of the group in ``--help`` that it belongs to."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.flag.names or (f"--{self.field.name}",)

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def has_negation(self) -> bool:
        """Tell whether there is ``--no-x`` beside ``--x``: for what is on, or decided by the
        program, by default."""
        turned_off = self.names[0].startswith("--no_") and self.field.default is True
        return self.is_switch and self.field.default is not False and not turned_off

    @property
    def switch_names(self) -> dict[str, bool]:
        """Return a switch's names, with what each sets."""
        names = dict.fromkeys(self.names, self.field.default is not True or self.has_negation)
        if self.has_negation:
            names |= {f"--no-{name.removeprefix('--')}": False for name in self.names}
        return names

    @property
    def bare_names(self) -> dict[str, Any]:
        """Return the names that take no value, with what each sets."""
        return {**(self.switch_names if self.is_switch else {}), **self.flag.shorthands}

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*dict.fromkeys([*self.names, *self.bare_names]),)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the words that can be given; none where it is not one of a few."""
        of_type = (
            typing.get_args(self.type) if typing.get_origin(self.type) is typing.Literal else ()
        )
        return self.flag.choices or of_type

    def typed(self, value: Any) -> str:
        """Return how a person gives the field this value, for messages."""
        return " ".join(self.words(value))

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that give the field this value."""
        if isinstance(value, (list, tuple)):
            words = list(map(str, value))
            joined = ":" in (self.flag.metavar or "")
            return [self.names[0], *([":".join(words)] if joined else words)]
        if not self.is_switch:
            return [self.names[0], str(value)]
        if self.has_negation and value is False:
            return [f"--no-{self.names[0].removeprefix('--')}"]
        return [self.names[0]]


def options(config: type) -> Iterator[Option]:
    """Yield the flags of a configuration's class and of those nested in it, in their order.

    Its class attribute ``group`` is their group's title in ``--help``.
    """
    hints = typing.get_type_hints(config)
    nested = []
    for field in dataclasses.fields(config):
        kind, told = hints[field.name], flag_of(field)
        if dataclasses.is_dataclass(kind):
            nested.append(kind)
        elif told:
            is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
            parts = typing.get_args(kind) if is_union else (kind,)
            plain = next(part for part in parts if part is not type(None))
            yield Option(field, told, plain, config.group)  # type: ignore[attr-defined]
    for each in nested:
        yield from options(each)  # type: ignore[arg-type]


def by_field(*configs: type) -> dict[str, Option]:
    """Return the flags of several configurations by their fields' names."""
    return {option.field.name: option for config in configs for option in options(config)}


# -- instances as plain values, and back ------------------------------------------------


def flat(*configs: Any) -> dict[str, Any]:
    """Return the values of configurations, and of those nested in them, by fields' names."""
    values: dict[str, Any] = {}
    for config in configs:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if dataclasses.is_dataclass(value):
                values |= flat(value)
            elif flag_of(field):
                values[field.name] = value
    return values


def from_values(config: type, values: Mapping[str, Any]) -> Any:
    """Make a configuration of the values that ``flat`` or JSON has of it, and of the defaults.

    Names that it does not know are passed over.
    """
    known, hints = {o.field.name: o for o in options(config)}, typing.get_type_hints(config)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            chosen[field.name] = from_values(hints[field.name], values)
        elif field.name in values:
            value, option = values[field.name], known.get(field.name)
            is_tuple = option and (typing.get_origin(option.type) is tuple or option.flag.several)
            chosen[field.name] = tuple(value) if is_tuple and isinstance(value, list) else value
    return config(**chosen)


# -- what goes with what ----------------------------------------------------------------


def check_needs(config: RunConfig, own: Any) -> None:
    """Raise UsageError for a flag that was given without what it needs, or with what it excludes.

    The configurations must be resolved: conditions are on final values.
    """
    values, known = flat(config, own), by_field(type(config), type(own))
    for name, option in known.items():
        if values[name] != option.field.default:
            _check_one(option, values, known, config.given)


_PLANNING = tuple(field.name for field in dataclasses.fields(PlanConfig))


def check_switches(config: RunConfig, *own: Any) -> None:
    """Raise UsageError where flags that choose what the program does lack what they need or exclude
    each other; this comes before anything is resolved."""
    values, known = flat(config, *own), by_field(type(config), *map(type, own))
    for name in (
        "predict",
        "json",
        "use_ema",
        "eval_report",
        "resume_epoch",
        "init_from",
        "self_check",
        "plan",
        "teacher",
        "tpu_topology",
        "explain",
        "hlo_dir",
        *_PLANNING,
    ):
        if values[name] != known[name].field.default:
            _check_one(known[name], values, known, config.given)


def _check_one(
    option: Option,
    values: Mapping[str, Any],
    known: Mapping[str, Option],
    given_fields: Collection[str],
) -> None:
    given = option.typed(values[option.field.name])
    for condition in option.flag.needs:
        alternatives = condition.split("|")
        if not any(_holds(each, values, known) for each in alternatives):
            raise UsageError(f"{given} requires {_needed(alternatives, values, known)}")
    for other in option.flag.conflicts:
        if other in known and values[other] != known[other].field.default:
            excluded = known[other].typed(values[other])
            raise UsageError(f"{given} is incompatible with {excluded}: drop one of the two")
    for other in option.flag.instead_of:
        if other in given_fields:
            excluded = known[other].typed(values[other])
            raise UsageError(f"{given} replaces {excluded}: drop one of the two")


def _holds(condition: str, values: Mapping[str, Any], known: Mapping[str, Option]) -> bool:
    name, asks_value, wanted = condition.partition("=")
    if name not in known:  # of a backend that this run is not on
        return False
    if asks_value:
        return str(values[name]) == wanted
    return values[name] != known[name].field.default


def _needed(alternatives: list[str], values: Mapping[str, Any], known: Mapping[str, Option]) -> str:
    texts = []
    for condition in alternatives:
        name, asks_value, wanted = condition.partition("=")
        texts.append(known[name].names[0] + (f" {wanted}" if asks_value else ""))
    if len(texts) > 1:
        return f"{', '.join(texts[:-1])} or {texts[-1]}"
    return texts[0] + (f", this is {values[name]}" if asks_value else "")


def check_foreign(others: Mapping[str, Any], backend: str, given: Collection[str]) -> None:
    """Raise UsageError for a flag of another backend than ``backend``: it would do nothing.

    ``others`` are the configurations of all backends by their names, ``given`` the fields whose
    flags were given: the environment may be made for several programs. The default does no harm.
    """
    for owner, config in others.items():
        if owner == backend:
            continue
        for option in options(type(config)):
            name = option.field.name
            if name in given and getattr(config, name) != option.field.default:
                raise UsageError(f"{option.names[0]} requires --backend {owner}, this is {backend}")


# ------------------------------------------------------------------------------------------------
# Makes the command line from the fields of configurations, and reads it.


PROGRAM = "run_vit_training.py"
_DESCRIPTION = (
    "Train Vision Transformers too big for one chip: on TPUs (PyTorch/XLA FSDP) and on NVIDIA GPUs "
    "(Megatron-FSDP, FSDP2)."
)


class _Mistake(Exception):
    """Raised for a command line that cannot be read; the message is one line."""


# -- files of flags ---------------------------------------------------------------------

_LARGEST_FILE = 2**20  # bytes


class _Word(NamedTuple):
    """A word of the command line; of one from a file, the file and its line."""

    text: str
    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        return f"@{self.file}, line {self.line}: " if self.file else ""


def _words(argv: Sequence[str]) -> Iterator[_Word]:
    """Yield the words of a command line, in the place of each ``@FILE`` those in the file."""
    for word in argv:
        if word.startswith("@"):
            yield from _words_of_file(word[1:], ())
        else:
            yield _Word(word)


def _words_of_file(name: str, inside: tuple[Path, ...]) -> Iterator[_Word]:
    """Yield the words in a file of flags, which the files ``inside`` include.

    Words are quoted as in a shell, # begins a comment, and a backslash at the end of a line
    continues it.
    """
    path = Path(os.path.realpath(name))
    if path in inside:
        raise _Mistake(f"@{name} includes itself: remove the @ line that closes the circle")
    continued = ""
    for number, text in enumerate([*_text(name).splitlines(), ""], 1):
        # Blanks after a backslash do not count; after a blank it only says that more words follow.
        line = continued + re.sub(r"\s\\$", "", text.rstrip())
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            if str(error) == "No escaped character":
                continued = line[:-1]
                continue
            raise _Mistake(f"@{name}, line {number}: {error}: {line}") from None
        continued = ""
        for word in words:
            if word.startswith("@"):
                yield from _words_of_file(word[1:], (*inside, path))
            else:
                yield _Word(word, name, number)


def _text(name: str) -> str:
    """Return the text of a file of flags, which may be a pipe (of a shell's ``@<(...)``)."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody writes to has an end
        with open(file, "rb") as opened:
            os.set_blocking(file, True)
            content = opened.read(_LARGEST_FILE + 1)
            is_pipe = stat.S_ISFIFO(os.fstat(file).st_mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _Mistake(f"@{name}: {reason} (@FILE stands for the flags in FILE)") from None
    if is_pipe and not content:
        raise _Mistake(f"@{name} is a pipe that holds nothing: give a file of flags")
    if len(content) > _LARGEST_FILE:
        raise _Mistake(f"@{name} has more than {_LARGEST_FILE:,} bytes: it is no file of flags")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _Mistake(f"@{name}, line {line}: not UTF-8 text: save the file as UTF-8") from None


# -- the parser -----------------------------------------------------------------------


class _Setting(NamedTuple):
    """What a flag on the command line sets."""

    field: str
    name: str
    """The one of the flag's names that was typed."""
    value: Any


class Parser(argparse.ArgumentParser):
    """Reads words; on a wrong one raises ``_Mistake``."""

    def __init__(self) -> None:
        super().__init__(prog=PROGRAM, description=_DESCRIPTION, allow_abbrev=False, add_help=False)
        self.settings: list[_Setting] = []
        """One for each flag that was read, in their order."""

    def error(self, message: str) -> NoReturn:
        raise _Mistake(message)


class _Set(argparse.Action):
    """Sets a field: to what is read, or to what a name without a value stands for."""

    def __init__(
        self, *args: Any, stands_for: Mapping[str, Any] | None = None, several: bool = False, **how
    ) -> None:
        super().__init__(*args, **how)
        self.stands_for, self.several = stands_for, several

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if self.stands_for is not None:
            values = self.stands_for[option_string]
        elif self.several:
            values = values[0] if len(values) == 1 else tuple(values)
        setattr(namespace, self.dest, values)
        parser.settings.append(_Setting(self.dest, option_string, values))


_HELP = ("-h", "--help")


def build_parser(shown: Sequence[Option]) -> Parser:
    """Return the parser of these flags; what is not given is not in its Namespace."""
    parser = Parser()
    general = parser.add_argument_group("help")
    general.add_argument(
        *_HELP,
        action=_Set,
        nargs="?",
        const="",
        metavar="all|GROUP|WORD",
        default=argparse.SUPPRESS,
        help="flags that most runs need; or all, a group's, or those with a word",
    )
    titles: dict[str, Any] = {}
    for option in shown:
        if option.group not in titles:
            titles[option.group] = parser.add_argument_group(option.group)
        _add(titles[option.group], option)
    return parser


def _add(group: Any, option: Option) -> None:
    flag = option.flag
    how = {"action": _Set, "dest": option.field.name, "default": argparse.SUPPRESS}
    text = f"{flag.help}{_default_text(option)}".replace("%", "%%")
    if option.is_switch:
        names = option.switch_names
        group.add_argument(*names, nargs=0, stands_for=names, help=text, **how)
    else:
        group.add_argument(*option.names, help=text, **_reading(option), **how)
    for name, value in flag.shorthands.items():
        text = f"the same as {option.typed(value)} (default: off)"
        group.add_argument(name, nargs=0, stands_for={name: value}, help=text, **how)


_METAVARS: dict[Any, str] = {int: "N", float: "X"}


def _reading(option: Option) -> dict[str, Any]:
    """Return argparse's options for how a flag's value is read from its words."""
    origin, metavar = typing.get_origin(option.type), option.flag.metavar
    how: dict[str, Any] = {"type": option.flag.kind or not_empty}
    if metavar or option.type in _METAVARS:
        how["metavar"] = metavar or _METAVARS[option.type]
    if origin is list:
        how["nargs"] = "+"
    if option.choices:
        how["choices"] = option.choices
        how["type"] = option.flag.kind or str  # the list tells what there is
    elif option.flag.several:
        how |= {"nargs": "+", "several": True}
    elif isinstance(metavar, tuple):
        how["nargs"] = len(metavar)
    elif option.flag.bare is not None:
        how |= {"nargs": "?", "const": option.flag.bare}
    return how


def _default_text(option: Option) -> str:
    if "default" in option.flag.help or option.field.default is None:
        return ""
    default = option.field.default
    if option.is_switch and not option.has_negation:
        return " (default: off)"
    if isinstance(default, tuple):
        return f" (default: {' '.join(f'{part:.5g}' for part in default)})"
    return f" (default: {default})"


# -- parsing --------------------------------------------------------------------------


def parse(argv: Sequence[str] | None, configs: Mapping[str, type]) -> dict[str, Any]:
    """Read the command line into one instance of each of the configurations.

    One with a field ``given`` has the names there of all fields that the command line sets. Ends
    the program with exit code 2 on a wrong argument, and with 0 after ``--help``.
    """
    known = [option for config in configs.values() for option in options(config)]
    groups = {_key(option.group): option.group for option in known}
    parser = build_parser(known)
    try:
        values = _read(parser, list(_words(sys.argv[1:] if argv is None else argv)), known, groups)
        values["given"] = frozenset(values)
        for option in known:
            if option.flag.env and os.environ.get(option.flag.env):
                values.setdefault(option.field.name, _from_environment(option))
    except (_Mistake, argparse.ArgumentTypeError) as mistake:
        parser.exit(2, f"{PROGRAM}: error: {mistake} (see --help)\n")
    return {name: from_values(config, values) for name, config in configs.items()}


def _read(
    parser: Parser, words: Sequence[_Word], known: Sequence[Option], groups: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values that words give, by fields' names. Raises ``_Mistake``."""
    names = {name for option in known for name in option.all_names} | {*_HELP}
    flags = [word for word in words if word.text.partition("=")[0] in names]
    try:
        namespace, unknown = parser.parse_known_args([word.text for word in words])
    except _Mistake as mistake:  # of the first flag that set nothing
        place = next((word.place for word in flags[len(parser.settings) :]), "")
        raise _Mistake(f"{place}{mistake}") from None
    values = vars(namespace)
    if "help" in values:
        _print_help(values["help"], known, groups)
    if unknown:
        wrong = next((word for word in unknown if word.startswith("-")), unknown[0])
        place = next(word.place for word in words if word.text == wrong)
        raise _Mistake(f"{place}{_unknown(wrong, names)}")
    _check_agree(parser.settings, flags, known)
    return values


def _check_agree(
    settings: Sequence[_Setting], flags: Sequence[_Word], known: Sequence[Option]
) -> None:
    """Raise ``_Mistake`` where two different flags set one field to different values.

    The same flag once more, and one after the file that has the other, takes its place.
    """
    by_field = {option.field.name: option for option in known}
    last: dict[tuple[str, str], dict[str, tuple[_Setting, _Word]]] = {}
    for setting, word in zip(settings, flags, strict=True):
        last.setdefault((setting.field, word.file), {})[setting.name] = setting, word
    for (field, _), by_name in last.items():
        (first, _), *others = by_name.values()
        for other, word in others:
            if other.value != first.value:
                one, two = (_typed(by_field[field], each) for each in (first, other))
                raise _Mistake(f"{word.place}{one} contradicts {two}: drop one of the two")


def _typed(option: Option, setting: _Setting) -> str:
    words = [] if setting.name in option.bare_names else option.words(setting.value)[1:]
    return " ".join([setting.name, *words])


def _key(title: str) -> str:
    """Return the word that names a group of flags: "checkpoints", "xla"."""
    return title.split()[0].rstrip(":,").lower()


def _print_help(which: str, known: Sequence[Option], groups: Mapping[str, str]) -> NoReturn:
    word = which.lower()
    if word == "all":
        shown = list(known)
    elif word in groups:
        shown = [option for option in known if option.group == groups[word]]
    elif word:
        shown = [option for option in known if _mentions(option, word.lstrip("-"))]
    else:
        shown = [option for option in known if option.flag.common]
    if not shown:
        raise _Mistake(
            f"--help {which}: no flag has this word; there are the groups all, {', '.join(groups)}"
        )
    text = build_parser(shown).format_help()
    rest = text.partition("\n\n")[2]  # the usage would be all flags once more
    print(f"usage: {PROGRAM} [flags]   {PROGRAM} @FILE [flags]: FILE holds flags\n\n{rest}")
    if not which:
        print(f"--help all: all {len(known)} flags. --help GROUP: one of {', '.join(groups)}")
    sys.exit(0)


def _mentions(option: Option, word: str) -> bool:
    """Tell whether a word is in a flag's names, or in its help or values at a word's beginning."""
    if any(word in name.lower() for name in option.all_names):
        return True
    text = " ".join([option.flag.help, *map(str, option.choices)]).lower()
    return re.search(rf"(?<![a-z0-9]){re.escape(word)}", text) is not None


def _unknown(word: str, names: Collection[str]) -> str:
    """Return what to say of a word that no flag takes: the nearest flag, if one is near."""
    if not word.startswith("-"):
        return f"unrecognized argument: {word}"
    nearest = difflib.get_close_matches(word.partition("=")[0], sorted(names), n=1, cutoff=0.6)
    return f"unknown flag {word}" + (f": did you mean {nearest[0]}?" if nearest else "")


def _from_environment(option: Option) -> Any:
    name = option.flag.env
    assert name is not None
    try:
        return (option.flag.kind or not_empty)(os.environ[name])
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name} of the environment: {error}") from None


# ------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """A parser that ends on a wrong argument with one line and exit code 2."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)
        self.register("type", None, not_empty)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")
