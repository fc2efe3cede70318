"""``python -m tests.support.flags_page``: write docs/flags.md, the page of all flags."""

import re
from pathlib import Path

from run_vit_training import CONFIGS
from training.command_line import help_text
from training.flags import FlagField, flag_fields

PAGE = Path(__file__).resolve().parents[2] / "docs/flags.md"
_INTRODUCTION = """# All flags

Every flag of `run_vit_training.py`, with its default, in the groups of `--help all`.
[options.md](options.md) explains which flag to use for what.

`@FILE` inserts the flags in that file. If a flag is given twice, the last value counts. If a flag
has several names, messages use the first.

This page is generated from the flags' `help` by `tests/support/flags_page.py`.
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
    if option.flag.bare is not None:
        values = f"[{values}]"
    values = values.replace("|", "\\|")
    names = [f"`{f'{name} {values}'.strip()}`" for name in option.names]
    names += [f"`{name}`" for name in option.bare_names if name.startswith("--no-")]
    names += [f"`{name}` (= {value})" for name, value in option.flag.shorthands.items()]
    return ", ".join(names)


def _escaped(text: str) -> str:
    for character in ("\\", "|", "*"):
        text = text.replace(character, f"\\{character}")
    ours = r"--\w+(?![\w-])"  # timm's have hyphens
    text = re.sub(ours, r"`\g<0>`", text.replace("<", "&lt;"))
    return re.sub(r"\bdocs/([\w/]+\.md)", lambda found: f"[{_title(found[1])}]({found[1]})", text)


def _title(page: str) -> str:
    """Return the title of a page of docs/."""
    with (PAGE.parent / page).open() as lines:
        return next(lines).removeprefix("# ").strip()


if __name__ == "__main__":
    PAGE.write_text(page())
