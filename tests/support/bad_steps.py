"""Runs with steps that are not finite, and what they must leave."""

import torch

from tests.references.plain_checkpoint import convert
from tests.support.cli import train_tiny_gpu

BAD = "2:loss 4:norm 5:loss"
COUNTS = ["0 0 0", "1 1 1", "1 0 1", "2 1 1", "3 2 2", "3 0 2"]  # total, in a row, longest row


def train(folder, monkeypatch, flags, processes, **variables):
    for name, value in {"BAD_STEPS": BAD, **variables}.items():
        monkeypatch.setenv(name, value)
    program = {"processes": processes, "program": "tests.fakes.bad_step_gpu"}
    result = train_tiny_gpu(folder, *flags.split(), **program)
    return result, convert(folder / "step_6", folder / "plain.pt")


def assert_same_state(state, expected, steps):
    assert_equal(state["model"], expected["model"])
    assert state["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for name, entries in state["optimizer"]["state"].items():
        assert entries.get("step", steps) == steps  # Lion has no counter, nor has Muon
        assert_equal(entries, expected["optimizer"]["state"][name])


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, expected[name]), name
