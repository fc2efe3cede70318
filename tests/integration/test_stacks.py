"""The table of docs/platforms.md that says which flags each stack of a TPU has, against the code.

Every value of every flag is resolved for four TPU devices by each stack, as far as that goes before
a device starts. A flag that one of them takes and another refuses must be a row.
"""

import re
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest

import run_vit_training
from gpu_fsdp import resolve_gpu
from run_vit_training import BACKEND_CONFIGS, check_mode_flags, read_flags
from tests.support.cli import ROOT, train_tiny
from tests.support.every_flag import ELSEWHERE, Item, complaint_of, items
from tests.support.flag_values import BASE, write_sources
from tools.compile_only import command, torchtpu
from tools.plan import tpu as plan
from torch_fsdp import torch_tpu_private
from training.config import RunConfig
from training.flags import by_field, check_foreign
from xla_fsdp import resolve_xla
from xla_fsdp.config import XlaConfig

pytestmark = pytest.mark.long

STACKS = {
    "PyTorch/XLA": {"backend": "--backend xla"},
    "FSDP2": {"backend": "--backend torchtpu", "fsdp": "--fsdp fsdp2"},
    "SimpleFSDP": {"backend": "--backend torchtpu", "fsdp": "--fsdp simple"},
}
"""The table's columns, and the flags that choose each."""
FORM = {"backend", "fsdp"}
OF_LAUNCHERS = {
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "4"),
    **dict.fromkeys(("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"), "set"),
}
"""The variables of TorchTPU's processes."""
COMPILED = {"compile_only": "--compile_only", "tpu_topology": "--tpu_topology v5e:2x2"}
NOT_SWEPT = {
    "compile_only": COMPILED,
    "tpu_topology": COMPILED,
    "explain": COMPILED | {"explain": "--explain"},
    "hlo_dir": COMPILED | {"hlo_dir": "--hlo_dir hlo"},
    "tpu_compiler": COMPILED | {"tpu_compiler": "--tpu_compiler 0.0.52"},
    "plan": {"plan": "--plan", "tpu_topology": "--tpu_topology v5e:2x2"},
    "cpu_devices": {"cpu_devices": "--cpu_devices 2"},
}
"""What is typed for flags that the sweeps of other tests leave out, by field."""


@pytest.fixture
def data(digits, tmp_path, monkeypatch):
    """Data of every source, a teacher, and a host with four TPU devices, none of which starts."""
    write_sources(digits, tmp_path)
    train_tiny(tmp_path / "teacher")
    monkeypatch.setenv("WANDB_MODE", "offline")
    # Of PyTorch/XLA.
    host = {"version": 5, "num_expected_global_devices": 4, "num_available_devices": 4}
    answers = {name: (lambda value=value: value) for name, value in host.items()}
    monkeypatch.setattr(resolve_xla, "host_tpu", lambda: SimpleNamespace(**answers))
    monkeypatch.setattr(resolve_xla, "slice_count", lambda: 1)
    monkeypatch.setattr(resolve_xla, "device_type", lambda: "TPU")
    monkeypatch.setattr(resolve_xla, "check_device", lambda: None)
    monkeypatch.setattr(resolve_xla.tpu, "kind_here", lambda: "v5p")
    # Of TorchTPU.
    monkeypatch.setattr(torch_tpu_private, "tpus_of_host", lambda: 4)
    # What would take minutes.
    monkeypatch.setattr(command, "compile_step", lambda *flags: 0)
    monkeypatch.setattr(torchtpu, "check_installed", lambda mode: None)
    monkeypatch.setattr(torchtpu, "_plugin_variables", lambda *where: {})
    monkeypatch.setattr(torchtpu, "_record", lambda *what: "Used 2.00G of 1.00G hbm")
    monkeypatch.setattr(plan, "plan_slices", lambda *flags: 0)
    return tmp_path


def resolve(words):
    flags = read_flags(words)
    if flags.xla.compile_only or flags.run.plan:
        run_vit_training._run(flags)
        return
    check_mode_flags(flags)
    check_foreign(flags.backend_configs, flags.run.backend, flags.run.explicitly_set)
    if flags.run.backend == "torchtpu":
        with pytest.MonkeyPatch.context() as patched:
            for name, value in OF_LAUNCHERS.items():
                patched.setenv(name, value)
            resolve_gpu.resolve(flags.run, flags.torch)
    else:
        resolve_xla.resolve(flags.run, flags.xla)


def values_of_flags(folder):
    """Every value but defaults, by field."""
    found = defaultdict(dict)
    known = by_field(RunConfig, *BACKEND_CONFIGS.values())
    for own in BACKEND_CONFIGS.values():
        for item in items(own, folder):
            (field,) = [name for name, typed in item.words.items() if typed == item.name][-1:]
            # Of several stacks that have it, the item names one.
            of_several = {
                each.partition("=")[0]
                for condition in known[field].flag.requires
                if "|" in condition
                for each in condition.split("|")
            } & {*FORM, "xla_fsdp"}
            others = {name: word for name, word in item.words.items() if name not in of_several}
            item = replace(item, words=others)
            found[field][item.name] = item
    for field, words in NOT_SWEPT.items():
        name = known[field].names[0]
        found[field][name] = Item(name, words)
    for field, option in known.items():
        if not option.is_switch:
            found[field].pop(option.typed(option.field.default), None)
    return {field: [*found[field].values()] for field in known.keys() - FORM}


def has(item, chosen):
    """Whether a stack, chosen by these flags, takes the value."""
    words = BASE | item.words | chosen
    if any(item.words.get(field, word) != word for field, word in chosen.items()):
        return False  # it requires another stack
    return complaint_of(resolve)(" ".join(words.values())) is None


def rows(folder):
    """What the table must say: by flag, or by value where its values differ."""
    known, found = by_field(RunConfig, *BACKEND_CONFIGS.values()), {}
    for field, values in values_of_flags(folder).items():
        which = {
            item.name: tuple(has(item, chosen) for chosen in STACKS.values()) for item in values
        }
        differ = {name: each for name, each in which.items() if len(set(each)) > 1}
        if len(set(differ.values())) == 1 and not any(map(all, which.values())):
            differ = {known[field].names[0]: next(iter(differ.values()))}
        found |= differ
    return found


def documented():
    """What the table says, and the reasons."""
    text = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| flag \| PyTorch/XLA \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M)
    found, reasons = {}, {}
    for line in table.splitlines():
        flags, *marks, reason = (cell.strip() for cell in line.strip("|").split("|"))
        assert set(marks) <= {"yes", "no"}, line
        for flag in re.findall(r"`(.*?)`", flags):
            assert flag not in found, flag
            found[flag], reasons[flag] = tuple(mark == "yes" for mark in marks), reason
    return found, reasons


def test_every_flag_that_not_all_stacks_have(data):
    left_out = {field for field in by_field(XlaConfig) if field in ELSEWHERE} - {*NOT_SWEPT}
    assert not left_out, "say in NOT_SWEPT what is typed for these"
    for chosen in STACKS.values():
        assert complaint_of(resolve)(" ".join((BASE | chosen).values())) is None
    told, reasons = documented()
    wrong = [
        f"| `{flag}` | {' | '.join('yes' if each else 'no' for each in which)} |"
        for flag, which in rows(data).items()
        if told.pop(flag, None) != which
    ]
    assert not wrong, "the table must say:\n" + "\n".join(wrong)
    assert not told, "all stacks, or none, have these"
    assert all(reasons.values())
