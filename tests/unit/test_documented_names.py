"""What README.md and docs/ name is there: flags and their values, files, headings, functions."""

import re

import pytest

from run_vit_training import CONFIGS
from tests.support.cli import ROOT
from tests.support.documented_commands import (
    DOCUMENTS,
    PAGES,
    broken_anchors,
    flags_and_paths,
    known_flags,
)
from training.flags import by_field
from training.foreign_flags import TABLES

pytestmark = pytest.mark.fast


def test_flags_and_files_that_documents_name_are_there():
    flags, paths = flags_and_paths()
    known = known_flags()
    folders = (ROOT / "tools", ROOT / "benchmarks", ROOT / "tests" / "reliability" / "faults")
    programs = [ROOT / "data" / "pack.py", *(path for at in folders for path in at.rglob("*.py"))]
    for path in [*(ROOT / "launch").iterdir(), *programs]:
        if path.is_file():
            known |= set(re.findall(r"--\w[\w-]+", path.read_text()))
    ours = (ROOT / "tpu_machines.py").read_text()
    known |= {flag for flag in flags if f'"{flag[2:]}"' in ours}  # libtpu's, which we set
    known |= {
        "--node-count",
        "--node-prefix",
        "--recurse",
        "--recursive",
        "--tee",
        "--tpu-topology",
    }  # others'
    known |= {"--clear-soft-delete", "--foreground", "--logdir", "--valid-until-duration"}
    known |= {"--ckpt_prefix", "--ckpt_suffix", "--save_path"}
    known |= {word for table in TABLES for word in table}  # with what to type in their place
    known |= {flag.replace("_", "-") for flag in known}  # which is accepted
    assert not flags - known
    packages = [ROOT, *(path for path in ROOT.iterdir() if path.is_dir())]
    missing = {path for path in paths if not any((at / path).exists() for at in packages)}
    assert {path for path in missing if not path.startswith("runs/")} == set()
    assert broken_anchors() == []


def test_choices_and_defaults_that_documents_name():
    options = {name: each for each in by_field(*CONFIGS.values()).values() for name in each.names}
    for document in DOCUMENTS:
        text = document.read_text().replace("\\|", "|")
        for name, listed in re.findall(r"`(--[\w-]+) ([\w-]+(?:\|[\w-]+)+)`", text):
            if option := options.get(name):  # else another program's
                choices = option.choices or option.flag.metavar.split("|")
                assert set(listed.split("|")) == set(choices), (document.name, name)
        for name, value in re.findall(r"`(--[\w-]+) (\S+)` \(default\)", text):
            default = options[name].field.default  # None: decided later
            assert default is None or str(default) == value, (document.name, name)


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
