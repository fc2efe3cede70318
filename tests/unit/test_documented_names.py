"""Every flag, file and heading that README.md and docs/ name is there, and docs/ has an index."""

import re

import pytest

from tests.support.cli import ROOT
from tests.support.documented_commands import (
    DOCUMENTS,
    PAGES,
    broken_anchors,
    flags_and_paths,
    known_flags,
)

pytestmark = pytest.mark.fast


def test_flags_and_files_that_documents_name_are_there():
    flags, paths = flags_and_paths()
    known = known_flags()
    folders = (ROOT / "tools", ROOT / "benchmarks", ROOT / "tests" / "reliability" / "faults")
    programs = [ROOT / "data" / "pack.py", *(path for at in folders for path in at.rglob("*.py"))]
    for path in [*(ROOT / "launch").iterdir(), *programs]:
        if path.is_file():
            known |= set(re.findall(r"--\w[\w-]+", path.read_text()))
    ours = (ROOT / "xla_fsdp" / "tpu.py").read_text()
    known |= {flag for flag in flags if f'"{flag[2:]}"' in ours}  # libtpu's, which we set
    known |= {"--node-count", "--node-prefix", "--recursive", "--tee", "--tpu-topology"}  # others'
    known |= {"--clear-soft-delete", "--foreground", "--logdir", "--valid-until-duration"}
    assert not flags - known
    packages = [ROOT, *(path for path in ROOT.iterdir() if path.is_dir())]
    missing = {path for path in paths if not any((at / path).exists() for at in packages)}
    assert {path for path in missing if not path.startswith("runs/")} == set()
    assert broken_anchors() == []


def test_each_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        name = page.relative_to(ROOT / "docs")
        assert page.name == "README.md" or f"]({name}) |" in index, name


def test_functions_that_documents_name_are_there():
    """As ``path.py::Class.function``; "module" stands for lines outside of all functions."""
    for document in DOCUMENTS:
        for path, name in re.findall(r"`([\w/]+\.py)::([\w.]+)`", document.read_text()):
            source = (ROOT / path).read_text()
            for part in name.split("."):
                defined = re.search(rf"(def|class) {part}\b", source)
                assert defined or part == "module", f"{document.name}: {path}::{name}"
