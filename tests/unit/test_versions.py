"""Private names of other packages: in one module a package, with the versions they are of."""

import re

import pytest

from gpu_fsdp import megatron_private
from models import timm_private
from tests.support.cli import ROOT
from tests.support.launching import pins
from torch_fsdp import torch_tpu_private
from tpu_attention import jax_private as kernels_private
from training import errors
from training.flags import by_field
from xla_fsdp import jax_private, torch_xla_private
from xla_fsdp.config import XlaConfig
from xla_fsdp.tpu import NEWER_LIBTPU

MODULES = {
    "requirements-tpu.txt": (torch_xla_private, jax_private, timm_private),
    "requirements-gpu.txt": (megatron_private, timm_private),
    "requirements-gpu-cu128.txt": (megatron_private, timm_private),
    "requirements-torchtpu.txt": (torch_tpu_private, kernels_private, timm_private),
}
PRIVATE = re.compile(
    r"_XLAC|torch_xla\._(?!private)|jax\._src|jaxlib import _|cloud_tpu_init|pallas\._|_orig_name|"
    r"param_and_grad_buffer|megatron_fsdp_slice|grad_acc_hooks|torch_tpu\._|from torch_tpu import _"
)


@pytest.mark.parametrize("requirements", MODULES)
def test_they_were_written_for_what_is_pinned(requirements):
    pinned = pins(requirements)
    for module in MODULES[requirements]:
        assert module.WRITTEN_FOR
        for package, version in module.WRITTEN_FOR.items():
            assert pinned[package] == version


def test_the_page_on_platforms_names_what_is_pinned():
    files = ("requirements-tpu.txt", "requirements-torchtpu.txt", "requirements-gpu.txt")
    page = (ROOT / "docs" / "platforms.md").read_text()
    rows = re.findall(r"^\| `(\w[\w-]*)` \| (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert len(rows) >= 7
    for package, *versions in rows:
        assert [pins(file).get(package, "-") for file in files] == versions, package


FOLDERS = "tpu_attention xla_fsdp torch_fsdp gpu_fsdp training features".split()


@pytest.mark.parametrize("folder", FOLDERS)
def test_they_stand_nowhere_else(folder):
    for path in (ROOT / folder).rglob("*.py"):
        if not path.name.endswith("_private.py"):
            assert not PRIVATE.findall(path.read_text()), path


def test_make_fetches_the_libtpu_that_the_code_names():
    (named,) = re.findall(r"^LIBTPU := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    own = by_field(XlaConfig)["tpu_compiler"]
    assert named == NEWER_LIBTPU
    assert own.choices == ("auto", "installed", NEWER_LIBTPU)


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"a": "1.2.3", "b": "4.5"}, None),
        ({"a": "1.2.3+cu128", "b": None}, None),
        ({"a": "1.3.0", "b": "4.5"}, "untested versions: a is 1.3.0, not 1.2.3; this program"),
        ({"a": "1.3.0", "b": "4.6+cpu"}, "not 1.2.3, b is 4.6+cpu, not 4.5; this program"),
    ],
)
def test_what_is_told(installed, told, capsys, monkeypatch):
    monkeypatch.setattr(errors, "installed_version", installed.get)
    errors.warn_of_others({"a": "1.2.3", "b": "4.5"})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (told is not None)
    assert all(told in line for line in lines)
