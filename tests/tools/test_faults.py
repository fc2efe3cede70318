"""`make faults` still works: one kill of one process, and what it tells of runs that differ."""

import dataclasses
import json
import math
import re
import shutil
import sys

import pytest

from benchmarks.common import commit
from tests.cli import run_program
from tests.faults import __main__ as faults
from tests.faults import table
from tests.faults.program import SETUPS, difference
from tests.support.checkpoints import flip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder of results that has the uninterrupted run already, made without a cold start."""
    folder = tmp_path_factory.mktemp("faults")
    kept = folder / commit(*faults.CODE) / "reference-alone"
    done = run_program(*SETUPS["alone"].command(kept / "run")[1:])
    assert done.returncode == 0, done.stderr
    (kept / "seconds.json").write_text("[4.0, 8.0]")
    return folder


@pytest.mark.long
def test_one_kill(results, tmp_path, monkeypatch, capsys):
    document = tmp_path / "reliability.md"
    document.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    words = f"faults --tries 1 --faults sigkill --backends alone --results {results} --document"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(document)])
    assert faults.main() == 0
    text = document.read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| SIGKILL")]
    assert re.match(r"\| SIGKILL at a random moment .*\| FSDP2, 1 process \| 1 \| 1 \| \d", row)
    assert text.startswith(f"before\n{table.BEGIN}\n| fault |")
    assert text.endswith(f"\n{table.END}\nafter\n")
    assert "old" not in text
    assert document.with_suffix(".png").stat().st_size > 1000

    (file,) = results.glob("*/results.jsonl")
    (line,) = file.read_text().splitlines()
    assert not list(file.parent.glob("alone-*"))  # of tries that were not survived
    lost = dataclasses.replace(table.Result(**json.loads(line)), survived=False, problem="differs")
    file.write_text(json.dumps(dataclasses.asdict(lost)) + "\n")
    assert faults.main() == 1  # nothing is tried again
    assert "0 tries" in capsys.readouterr().out
    assert "| 1 | 0 |" in document.read_text()


@pytest.mark.long
def test_differences_are_seen(results, tmp_path):
    (reference,) = results.glob("*/reference-alone/run")
    run = shutil.copytree(reference, tmp_path / "run")
    assert difference(run, reference) is None
    metrics = (run / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in metrics.splitlines()]
    records[16]["loss"] = math.nextafter(records[16]["loss"], 0)
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "(17, 2, 'loss', " in difference(run, reference)
    (run / "metrics.jsonl").write_text("".join(metrics.splitlines(keepends=True)[:-1]))
    assert "values, expected" in difference(run, reference)
    (run / "metrics.jsonl").write_text(metrics)
    flip(run / "step_40")
    assert "step_40 is damaged" in difference(run, reference)
    shutil.rmtree(run / "step_36")
    assert "checkpoints of steps [39, 40]" in difference(run, reference)
