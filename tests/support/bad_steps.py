"""Runs with steps that are not finite, and what they must leave."""

import torch

from tests.references.plain_checkpoint import convert
from tests.support.cli import train_tiny

BAD = "2:loss 4:norm 5:loss"
COUNTS = ["0 0 0 1", "1 1 1 1", "1 0 1 1", "2 1 1 1", "3 2 2 1", "3 0 2 1"]
"""After each step: in all, in a row, longest row, steps before the first."""


def train(run, folder, monkeypatch, flags, count, **variables):
    """Train on so many devices of XLA, or in so many processes; the result and its checkpoint."""
    for name, value in {"BAD_STEPS": BAD, **variables}.items():
        monkeypatch.setenv(name, value)
    how = {"processes": count, "program": "tests.fakes.bad_step_gpu"}
    if run is train_tiny:
        how = {"devices": count, "program": "tests.fakes.bad_step"}
    result = run(folder, *flags.split(), **how)
    return result, convert(folder / "step_6", folder / "plain.pt")


def assert_bad_steps_change_nothing(run, folder, monkeypatch, flags, count):
    """Against a run whose optimizer was never called in these steps. Returns the spoiled one."""
    found, state = train(run, folder / "spoiled", monkeypatch, flags, count)
    left_out = {"BAD_STEPS_ARE": "left_out"}
    _, expected = train(run, folder / "left_out", monkeypatch, flags, count, **left_out)
    lines = [line for line in found.stdout.splitlines() if line.startswith("step ")]
    assert lines == [f"step {n} skipped {counts}" for n, counts in enumerate(COUNTS, 1)]
    assert_same_state(state, expected, steps=3)
    return found


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
