"""Sphinx's configuration for `make docs`: README.md and docs/ as a site, in site/.

The pages stay plain Markdown, which GitHub shows, too. The navigation is made from the tables of
docs/README.md, the only list of pages.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/README"

project = "vit-fsdp"
html_title = project
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["README.md", "docs/*.md", "docs/*/*.md"]
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
smartquotes = False  # would make a dash of the two hyphens of a flag


def navigation() -> str:
    """Return a hidden ``toctree`` for each section of docs/README.md, with its table's pages."""
    parts = [f"```{{toctree}}\n:hidden:\n\n{INDEX}\n```\n"]
    for section in re.split(
        r"^## ", (ROOT / f"{INDEX}.md").read_text(encoding="utf-8"), flags=re.M
    )[1:]:
        caption = section.partition("\n")[0]
        pages = re.findall(r"^\| \[[^]]*\]\(([\w/]+)\.md\) \|", section, re.M)
        names = "\n".join(f"docs/{page}" for page in pages)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n")
    return "\n".join(parts)


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        app.env.note_dependency(ROOT / f"{INDEX}.md")
        source[0] += "\n\n" + navigation()


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
