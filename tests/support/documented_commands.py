"""The commands that README.md, docs/ and ``make help`` tell a user to type."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from run_vit_training import CONFIGS
from tests.support.cli import ROOT
from training.flags import by_field

PAGES = sorted((ROOT / "docs").rglob("*.md"))
"""Those of docs/evidence/ tell what was done once: their commands may be gone since."""
DOCUMENTS = [ROOT / "README.md", *(page for page in PAGES if page.parent.name != "evidence")]
DOCUMENTS.remove(ROOT / "docs" / "release_notes.md")  # which names what is gone
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""Its language and its text. Commands have no language; output is indented, not fenced."""
SPAN = re.compile(r"`((?:[^`\n]|\n(?!\n))+)`")
# What a sentence names with its arguments; "..." stands for something that the reader fills in.
IN_A_SENTENCE = re.compile(r"(make|python3?|gcloud|docker|sbatch|launch/\S+\.sh) (?!.*\.\.\.)\S")
_QUOTED_OR_COMMENT = re.compile(r"""('[^']*'|"[^"]*")|(?:(?<=\s)|^)#.*""")


@dataclass(frozen=True)
class Command:
    """What a user types: ``typed`` to the letter, ``text`` on one line and without comments."""

    typed: str
    text: str
    document: str
    settings: str = ""
    """The lines with ``export`` that stand before it in its document."""

    @property
    def script(self) -> str:
        return self.settings + self.typed + "\n"


def documented_commands() -> list[Command]:
    """Each once, where it is first named."""
    found: dict[str, Command] = {}
    for document in DOCUMENTS:
        for command in commands_of(document):
            found.setdefault(command.text, command)
    for target in re.findall(r'@echo "(make \S+)', (ROOT / "Makefile").read_text()):
        found.setdefault(target, Command(target, target, "make help"))
    return list(found.values())


def commands_of(document: Path) -> list[Command]:
    """Those in its fences in their order, then those in its sentences."""
    text, name = document.read_text(), str(document.relative_to(ROOT))
    return [*_in_fences(text, name), *_in_sentences(FENCE.sub("", text), name)]


def _in_fences(text: str, document: str) -> Iterator[Command]:
    settings = ""
    for block in (body for language, body in FENCE.findall(text) if not language):
        for typed in re.findall(r"(?:.*\\\n)*.+", block):
            command = one_line(typed)
            if command.startswith("export "):
                settings += command + "\n"
            elif command:
                yield Command(typed, command, document, settings)


def _in_sentences(text: str, document: str) -> Iterator[Command]:
    for span in (" ".join(found.split()) for found in SPAN.findall(text)):
        if IN_A_SENTENCE.match(span):
            yield Command(span, span, document)


def one_line(typed: str) -> str:
    """Continued lines joined, comments left out."""
    lines = [
        _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", line.removesuffix("\\")).strip()
        for line in typed.split("\n")
    ]
    return " ".join(filter(None, lines))


_OF_OTHERS = re.compile(r"torch_xla/|configs/tpu/|timm/|(proctrack|select|preempt|task)/")
"""Files of torch_xla and MaxText, names of timm's models, and Slurm's names of its plugins."""


def flags_and_paths() -> tuple[set[str], set[str]]:
    """Every ``--flag`` in code, and every file that code or a link names, by its path in ROOT."""
    flags: set[str] = set()
    paths: set[str] = set()
    for document in DOCUMENTS:
        text = document.read_text()
        fences = [body for _, body in FENCE.findall(text)]
        code = [*fences, *SPAN.findall(FENCE.sub("", text))]
        flags |= {flag for span in code for flag in re.findall(r"(?<![\w-])--\w[\w-]+", span)}
        paths |= {
            span
            for span in code
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span) and not _OF_OTHERS.match(span)
        }
        links = re.findall(r"\]\(([^):#]+)(?:#[\w-]+)?\)", text)
        paths |= {str((document.parent / link).relative_to(ROOT)) for link in links}
    return flags, paths


def broken_anchors() -> list[str]:
    """Links to a heading that its document does not have."""

    def slug(heading: str) -> str:
        return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

    broken = []
    for document in [ROOT / "README.md", *PAGES]:
        for link, anchor in re.findall(r"\]\(([^):#]*)#([\w-]+)\)", document.read_text()):
            target = document.parent / link if link else document
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", Path(target).read_text()), re.M)
            if anchor not in map(slug, headings):
                broken.append(f"{document.name}: {link}#{anchor}")
    return broken


def known_flags() -> set[str]:
    """Every flag of the program, in all its spellings."""
    known = {"--help", "-h"}
    for option in by_field(*CONFIGS.values()).values():
        known |= {*option.names, *option.flag.shorthands}
        known |= {f"--no-{name[2:]}" for name in option.names if option.has_negation}
    return known
