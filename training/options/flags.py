"""Makes the command line from the fields of configurations, and reads it."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from training.options.flag_rules import Option, from_values, options

PROGRAM = "run_vit_training.py"
_DESCRIPTION = (
    "Train Vision Transformers too big for one chip: on TPUs (PyTorch/XLA FSDP) and on NVIDIA GPUs "
    "(Megatron-FSDP, FSDP2)."
)


# -- the parser -----------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Ends on a wrong argument with one line; ``@file`` stands for the flags in a file.

    In such a file a line holds any number of words, quoted as in a shell, and # begins a comment.
    """

    def __init__(self) -> None:
        super().__init__(
            prog=PROGRAM,
            description=_DESCRIPTION,
            allow_abbrev=False,
            add_help=False,
            fromfile_prefix_chars="@",
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"a file of flags has a line that cannot be read ({error}): {arg_line}")


def build_parser(shown: Sequence[Option], groups: str = "") -> Parser:
    """Return the parser of these flags; ``groups`` names those of ``--help GROUP``.

    What is not given is not in its Namespace.
    """
    parser = Parser()
    general = parser.add_argument_group("help")
    general.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="all|GROUP",
        default=argparse.SUPPRESS,
        help=f"the flags that most runs need; all: every flag; or one group of {groups}",
    )
    titles: dict[str, Any] = {}
    for option in shown:
        if option.group not in titles:
            titles[option.group] = parser.add_argument_group(option.group)
        _add(titles[option.group], option)
    return parser


def _add(group: Any, option: Option) -> None:
    flag, rest = option.flag, {"dest": option.field.name, "default": argparse.SUPPRESS}
    text = f"{flag.help}{_default_text(option)}".replace("%", "%%")
    if option.has_negation:
        group.add_argument(*option.names, action=argparse.BooleanOptionalAction, help=text, **rest)
    elif option.is_switch:
        on = "store_false" if option.field.default is True else "store_true"
        group.add_argument(*option.names, action=on, help=text, **rest)
    else:
        group.add_argument(*option.names, help=text, **_reading(option), **rest)
    for name, value in flag.shorthands.items():
        text = f"the same as {option.typed(value)} (default: off)"
        group.add_argument(name, action="store_const", const=value, help=text, **rest)


class _OneOrSeveral(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else tuple(values))


_METAVARS: dict[Any, str] = {int: "N", float: "X"}


def _reading(option: Option) -> dict[str, Any]:
    """Return argparse's options for how a flag's value is read from its words."""
    origin, metavar = typing.get_origin(option.type), option.flag.metavar
    how: dict[str, Any] = {"type": option.flag.kind or str}
    if metavar or option.type in _METAVARS:
        how["metavar"] = metavar or _METAVARS[option.type]
    if origin is list:
        how["nargs"] = "+"
    if origin is typing.Literal or option.flag.choices:
        how["choices"] = option.flag.choices or typing.get_args(option.type)
    elif option.flag.several:
        how |= {"nargs": "+", "action": _OneOrSeveral}
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

    Ends the program with exit code 2 on a wrong argument, and with 0 after ``--help``.
    """
    known = [option for config in configs.values() for option in options(config)]
    groups = {_key(option.group): option.group for option in known}
    parser = build_parser(known, ", ".join(groups))
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except (RecursionError, UnicodeDecodeError) as error:
        parser.error(f"a file of flags cannot be read ({type(error).__name__})")
    given = vars(namespace)
    if "help" in given:
        _print_help(parser, given["help"], known, groups)
    if unknown:
        parser.error(_unknown(unknown, known))
    try:
        for option in known:
            if option.flag.env and os.environ.get(option.flag.env):
                given.setdefault(option.field.name, _from_environment(option))
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return {name: from_values(config, given) for name, config in configs.items()}


def _key(title: str) -> str:
    """Return the word that names a group of flags: "checkpoints", "xla"."""
    return title.split()[0].rstrip(":,").lower()


def _print_help(
    parser: Parser, which: str, known: Sequence[Option], groups: Mapping[str, str]
) -> NoReturn:
    if which not in ("", "all", *groups):
        parser.error(f"--help {which}: there is no such group; there are all, {', '.join(groups)}")
    if which == "all":
        shown = list(known)
    elif which:
        shown = [option for option in known if option.group == groups[which]]
    else:
        shown = [option for option in known if option.flag.common]
    text = build_parser(shown, ", ".join(groups)).format_help()
    rest = text.partition("\n\n")[2]  # the usage would be all flags once more
    print(f"usage: {PROGRAM} [flags]   {PROGRAM} @FILE [flags]: FILE holds flags\n\n{rest}")
    if not which:
        print(f"--help all: all {len(known)} flags. --help GROUP: one of {', '.join(groups)}")
    sys.exit(0)


def _unknown(words: Sequence[str], known: Sequence[Option]) -> str:
    """Return what to say of words that no flag takes: the nearest flag, if one is near."""
    word = next((word for word in words if word.startswith("-")), words[0])
    if not word.startswith("-"):
        return f"unrecognized argument: {word}"
    names = {name for option in known for name in (*option.names, *option.flag.shorthands)}
    names |= {f"--no-{name[2:]}" for o in known if o.has_negation for name in o.names}
    nearest = difflib.get_close_matches(word.partition("=")[0], sorted(names), n=1, cutoff=0.6)
    return f"unknown flag {word}" + (f": did you mean {nearest[0]}?" if nearest else "")


def _from_environment(option: Option) -> Any:
    name = option.flag.env
    assert name is not None
    try:
        return (option.flag.kind or str)(os.environ[name])
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name} of the environment: {error}") from None
