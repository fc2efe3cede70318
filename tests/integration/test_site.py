"""The site of ``make docs``, built from a few pages: its search, and the anchors of flags."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.search.en import SearchEnglish

from run_vit_training import CONFIGS
from tests.support.cli import ROOT
from training.flags import by_field

SEARCHED = [  # what users type, and a page that they must find
    ("dicom", "intensity"),
    ("16-bit", "intensity"),
    ("csv", "tables"),
    ("imbalance", "unbalanced_classes"),
    ("unbalanced", "unbalanced_classes"),
    ("recall", "unbalanced_classes"),
    ("resume", "reliability"),
    ("OOM", "options"),
    ("out of memory", "options"),
]
PAGES = ["README", "docs/flags", *sorted({f"docs/{page}" for _, page in SEARCHED})]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pages = ",".join(f"{page}.md" for page in PAGES)
    subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-q", "-b", "html", "-c", "docs"),
            *("-D", f"include_patterns={pages}", ".", str(folder)),
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


def test_the_search_finds_what_users_type(site):
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    language = SearchEnglish({})

    def words(query: str) -> list[str]:
        """Return what searchtools.js looks for: neither numbers nor stop words."""
        typed = re.findall(r"\w+", query.lower())
        return [word for word in typed if word not in language.stopwords and not word.isdigit()]

    def pages_with(word: str) -> set[str]:
        stem = language.stem(word)
        of = [index[terms].get(stem, []) for terms in ("terms", "titleterms")]
        numbers = {number for each in of for number in (each if isinstance(each, list) else [each])}
        return {index["docnames"][number] for number in numbers}

    for query, page in SEARCHED:
        assert f"docs/{page}" in set.intersection(*map(pages_with, words(query))), query


def test_each_flag_has_an_anchor_and_is_linked(site):
    page = (site / "docs" / "flags.html").read_text()
    anchors = re.findall(r'<code [^>]*\bid="([\w-]+)"', page)
    names = {name for option in by_field(*CONFIGS.values()).values() for name in option.names}
    assert names <= {f"--{anchor}" for anchor in anchors}
    assert len(anchors) == len(set(anchors))
    for html in (site / "docs").glob("*.html"):
        linked = re.findall(r'<a class="flag [^>]*href="([\w.]*)#([\w-]+)"', html.read_text())
        assert linked, html
        assert {file for file, _ in linked} == {"" if html.name == "flags.html" else "flags.html"}
        assert {anchor for _, anchor in linked} <= set(anchors)
