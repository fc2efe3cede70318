"""``python -m tests.support.flags_page``: write docs/flags.md, the page of all flags."""

from pathlib import Path

from run_vit_training import CONFIGS
from training.flags import FlagField, flag_fields, help_text

PAGE = Path(__file__).resolve().parents[2] / "docs/flags.md"
_INTRODUCTION = """# All flags

This page answers: what does each flag of `run_vit_training.py` do, and what is its default?

The groups and their order are those of `--help all`. [options.md](options.md) says which flag is
for what. `tests/support/flags_page.py` writes this page from the flags' fields, and a test compares
the two: to change a text here, change the `help` of the field.

Messages use the first name of a flag. `@FILE` stands for the flags in that file. If a flag is given
twice, the last value counts.
"""


def page() -> str:
    """Return the text of the page: a table a group."""
    groups: dict[str, list[FlagField]] = {}
    for config in CONFIGS.values():
        for option in flag_fields(config):
            groups.setdefault(option.group, []).append(option)
    parts = [_INTRODUCTION]
    for title, options in groups.items():
        parts.append(f"\n## {title[0].upper()}{title[1:]}\n\n| flag | what it does |\n|---|---|\n")
        parts += [f"| {_names(option)} | {_escaped(help_text(option))} |\n" for option in options]
    return "".join(parts)


def _names(option: FlagField) -> str:
    """Return the names of a flag, with its values, as code."""
    metavar = option.flag.metavar
    if option.is_switch:
        values = ""
    elif metavar:
        values = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    elif option.choices:
        values = "|".join(word or "''" for word in option.choices)
    else:
        values = {int: "N", float: "X"}.get(option.type, option.field.name.upper())
    values = values.replace("|", "\\|")
    names = [f"`{f'{name} {values}'.strip()}`" for name in option.names]
    names += [f"`{name}`" for name in option.bare_names if name.startswith("--no-")]
    names += [f"`{name}` (= {value})" for name, value in option.flag.shorthands.items()]
    return ", ".join(names)


def _escaped(text: str) -> str:
    for character in ("\\", "|", "*"):
        text = text.replace(character, f"\\{character}")
    return text.replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
