"""The output that README.md and docs/ quote, and whether the program prints such lines.

A quoted line is compared with the messages in the program's source, so that no run is needed: an
f-string's placeholders may be filled by values or by other messages. ``same_form`` compares it with
the output of a run.
"""

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.cli import ROOT
from tests.support.documented_commands import (
    DOCUMENTS,
    FENCE,
    IN_A_SENTENCE,
    SPAN,
    Command,
)

# -- what documents quote -------------------------------------------------------------

_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
_OTHER_CODE = re.compile(
    r"-|\$|\w+=|[\w.]+\(|struct<|(launch[/.]|hf-hub:)\S+ |"
    r"Ran out of memory in |Used \S+ of \S+ hbm|\[SPMD\] |"  # libtpu's
    r"(apt|convert|df|export|gcloud|hf|openssl|pip|pkill|rsync|scancel|scontrol|source|sudo|tail"
    r"|tensorboard|tmux|umask) "
)
"""What else has several words: flags, variables, calls; messages and programs that are not ours."""


class Quote(NamedTuple):
    document: str
    line: str


def quotes() -> list[Quote]:
    """Each line of an indented block, and each span of several words that is no other code."""
    found = []
    for document in DOCUMENTS:
        text = FENCE.sub("", document.read_text())
        spans = [" ".join(span.split()) for span in SPAN.findall(_INDENTED.sub("", text))]
        messages = [
            span
            for span in spans
            if " " in span and not IN_A_SENTENCE.match(span) and not _OTHER_CODE.match(span)
        ]
        name = str(document.relative_to(ROOT))
        found += [Quote(name, line) for line in [*quoted_lines(text), *messages]]
    return found


def quoted_lines(text: str) -> list[str]:
    """Those of its indented blocks, but for "..." alone, which stands for more lines."""
    lines = [line.strip() for block in _INDENTED.findall(text) for line in block.splitlines()]
    return [line for line in lines if line.strip(".")]


def quoted_after(command: Command) -> list[str]:
    """The lines of the block that follows a command in its document."""
    _, _, after = (ROOT / command.document).read_text().partition(command.typed)
    block = _INDENTED.search(FENCE.sub("", after[after.index("```") + 3 :]))
    assert block, command
    return quoted_lines("\n\n" + block[0])


# -- what the program prints ----------------------------------------------------------

PROGRAM = (
    "benchmarks data features gpu_fsdp launch models tools "
    "torch_fsdp tpu_attention training xla_fsdp"
).split()
_HOLE = "\0"
_FORMATTED = re.compile(r"%[\d.]*[dfgs]|\{\w*(?::[^{}]*)?\}")
_CUT = re.compile(r"[,;:](?=\s|$)|[()\[\]]|\s{2,}|[\n|]")
"""Messages are put together of parts, mostly at these places."""
_FUNCTION_WORDS = frozenset("a an are as at for from in is not of on over than the to with".split())
"""A message of these alone says little: values must be around them."""


def unprintable(line: str) -> list[str]:
    """The phrases of a quoted line that the program does not print."""
    return [phrase for phrase in _phrases(line) if not _printable(phrase)]


def _phrases(text: str) -> list[str]:
    return [phrase for part in _CUT.split(text) if (phrase := part.strip())]


@functools.cache
def _printable(phrase: str) -> bool:
    """A value, a message whose placeholders are filled so, or values with their names or units."""
    if _is_value(phrase) or any(
        all(map(_printable, match.groups()))
        and (says_much or (match.groups() and all(map(_has_value, match.groups()))))
        for longest_literal, pattern, says_much in _patterns()
        if longest_literal in phrase and (match := pattern.fullmatch(phrase))
    ):
        return True
    words = phrase.split()
    return len(words) > 1 and all(
        (_is_value(a) or _is_value(b)) and _printable(a) and _printable(b)
        for a, b in itertools.pairwise(words)
    )


def _is_value(word: str) -> bool:
    return re.search(r"[\d/_]|\.\.\.|^[^a-z]+$", word) is not None and " " not in word


def _has_value(phrase: str) -> bool:
    return any(map(_is_value, phrase.split()))


@functools.cache
def _patterns() -> list[tuple[str, re.Pattern[str], bool]]:
    """By phrase of a message: its longest literal, what it looks like when printed, and whether it
    has other words than _FUNCTION_WORDS."""
    paths = [*ROOT.glob("*.py"), *(path for at in PROGRAM for path in (ROOT / at).rglob("*.py"))]
    messages = (text for path in paths for text in _messages(ast.parse(path.read_text())))
    patterns = []
    for phrase in {phrase for text in messages for phrase in _phrases(text)}:
        literals = phrase.split(_HOLE)
        if words := re.findall("[A-Za-z%]+", " ".join(literals)):
            pattern = re.compile("(.+)".join(map(re.escape, literals)))
            says_much = not _FUNCTION_WORDS.issuperset(words)
            patterns.append((max(literals, key=len), pattern, says_much))
    return patterns


def _messages(source: ast.Module) -> Iterator[str]:
    """Every string but docstrings, with a hole for each placeholder."""
    parts: set[ast.AST] = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Expr):
            parts.add(node.value)  # a docstring
        elif isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            if node.value.startswith("\nimport "):  # a program for another process
                yield from _messages(ast.parse(node.value))
            text = _FORMATTED.sub(_HOLE, node.value)
            # What begins or ends with a space is a part of a message.
            yield _HOLE * text.startswith(" ") + text + _HOLE * text.endswith(" ")


# -- what a run has printed -----------------------------------------------------------


_NUMBER = r"\d+(?:[.,]\d+)*(?:e[+-]\d+)?"


def same_form(quoted: str, output: str) -> bool:
    """Whether a line of the output is the quoted one but for its numbers and what "..." is for."""

    def form(part: str) -> str:
        if part == "...":
            return ".*"
        if part[0].isdigit():
            return _NUMBER
        return r"\s+" if part.isspace() else re.escape(part)

    parts = filter(None, re.split(rf"(\.\.\.|{_NUMBER}|\s+)", quoted))
    pattern = "".join(map(form, parts))
    return re.search(rf"^\s*{pattern}\s*$", output, re.MULTILINE) is not None
