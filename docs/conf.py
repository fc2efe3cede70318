"""Sphinx's configuration for `make docs`: README.md and docs/ as a site, in site/.

The pages stay plain Markdown, which GitHub shows, too. The navigation is made from the tables of
docs/README.md, the only list of pages. A flag in the text of a page links to its row in
docs/flags.md, and the search finds that row.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/README"
FLAGS = "docs/flags"

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


def flag_name(code: nodes.literal) -> str | None:
    """Return ``ckpt_dir`` of ``--ckpt_dir FOLDER``; None if the code does not start with a flag."""
    found = re.match(r"--([\w-]+)", code.astext())
    return found[1] if found else None


def add_anchors(app: Sphinx, doctree: nodes.document) -> None:
    """Give each flag an anchor, such as ``flags.html#ckpt_dir``, which the search knows, too."""
    if app.env.docname != FLAGS:
        return
    for row in doctree.findall(nodes.row):
        for code in row[0].findall(nodes.literal):
            if name := flag_name(code):
                code["ids"].append(name)
                app.env.domains.standard_domain.note_object("flag", name, name, location=code)


def link_flags(app: Sphinx, doctree: nodes.document, page: str) -> None:
    known = app.env.domains.standard_domain.objects
    for code in list(doctree.findall(nodes.literal)):
        name = flag_name(code)
        if ("flag", name) in known and not isinstance(code.parent, nodes.reference | nodes.title):
            to = f"{app.builder.get_relative_uri(page, FLAGS)}#{name}"
            link = nodes.reference(internal=True, refuri=to, classes=["flag"])
            code.parent.replace(code, link)
            link += code


def setup(app: Sphinx) -> None:
    app.add_object_type("flag", "flag")
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", add_anchors)
    app.connect("doctree-resolved", link_flags)
