"""The command line: parse it into configurations, files of flags, help."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import time
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from config_fields import Word, expand_flag_files, not_empty
from training.errors import UsageError, prints_here
from training.flags import FlagField, flag_fields, from_values
from training.foreign_flags import meanings

PROGRAM = "run_vit_training.py"
_DESCRIPTION = "Train Vision Transformers too big for one chip, sharded over TPUs or NVIDIA GPUs."


class _Mistake(UsageError):
    """Raised for an invalid command line; the message is one line. ``see``: where to read more."""

    def __init__(self, message: str, see: str = "--help") -> None:
        super().__init__(message)
        self.see = see


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
        try:
            namespace, unknown = parser.parse_known_args([word.text for word in words])
        except _Mistake as error:  # of one value: say at once which flags are other programs'
            unknown = _unknown_flags(words, names)
            if not meanings(unknown):
                raise
            others = _unknown_words(unknown, words, names)
            raise _Mistake(f"{others}; {error}", others.see) from None
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


def _unknown_flags(words: Sequence[Word], names: Collection[str]) -> list[str]:
    """Return the flags among the words that the program does not have, each with its values."""
    found, is_known = list[str](), True
    for word in words:
        if word.text.startswith("-"):
            is_known = word.text.partition("=")[0] in names
        if not is_known:
            found.append(word.text)
    return found


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
