"""What --compile_only compiles is what training runs: graph by graph, the same results live on."""

import json
import re
from collections import Counter

import pytest

from tests.support.cli import TINY_MODEL, run_program, train_tiny

DEVICES = 4


def interface(hlo):
    """Types of what a graph is given and leaves; scalars may be constants in one of the two."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->(.*)\}", hlo)
    assert layout, hlo[:300]
    given, left = (Counter(re.findall(r"\w+\[\d[\d,]*\]", side)) for side in (layout[1], layout[2]))
    return given, left


def traced(*flags):
    program = "tests/fakes/traced_graphs.py"
    done = run_program(program, str(DEVICES), "--model", "vit_10b", *flags, warm=False)
    assert done.returncode == 0, done.stderr
    return [interface(hlo) for hlo in json.loads(done.stdout)["hlo"]]


def ran(folder, monkeypatch, *flags):
    """All graphs but an evaluation's, from what torch_xla writes of each that it executes."""
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(folder / "graphs"))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
    train_tiny(folder / "ckpt", *flags, devices=DEVICES)
    graphs = (folder / "graphs.0").read_text().split("[ScheduleSyncTensorsGraph]")[1:]
    called_from = [graph.partition("Root Hashes")[0] for graph in graphs]
    return [
        interface(hlo)
        for hlo, stack in zip(graphs, called_from, strict=True)
        if "evaluate" not in stack
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ("--mark_step_every_n_blocks 1 --num_blocks 3 --grad_accum_steps 2", 11),
        ("--mark_step_after_forward --model_ema --model_ema_warmup", 2),
    ],
)
def test_same_graphs(flags, graphs, tmp_path, monkeypatch):
    found = ran(tmp_path, monkeypatch, *flags.split())[-graphs:]
    expected = traced(*TINY_MODEL, "--batch_size", "16", *flags.split())
    assert [left for _, left in found] == [left for _, left in expected]
    for (given, _), (given_traced, _) in zip(found, expected, strict=True):
        assert not given - given_traced
        # The head's weight transposed, that is saved: where it runs, it is transposed anew.
        assert given_traced - given <= Counter({"f32[32,10]": 1})
