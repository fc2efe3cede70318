"""The queue of measurements on a GPU: rehearsed on the CPU with small models."""

import importlib.util
import json
import shlex
import time
from pathlib import Path

import pytest

from benchmarks import gpu_queue, gpu_step
from benchmarks.gpu_queue import ROWS, Row
from tests.support.cli import run_program

NOT_ON_CPU = {
    "megatron": "--fsdp megatron requires CUDA",
    "fp8": "--fp8 requires CUDA",
    "cudagraph": "cudagraph requires CUDA",
}
if not importlib.util.find_spec("open_clip"):  # its own environment has it
    NOT_ON_CPU["open_clip"] = "open_clip's step requires open_clip_torch"
STEPS = [name for name, row in ROWS.items() if "gpu_step" in row.command]


def run_queue(folder, monkeypatch, *flags):
    """The result of each row, as the table at the end names it."""
    monkeypatch.setattr("sys.argv", ["gpu_queue.py", "--folder", str(folder), *flags])
    gpu_queue.main()
    lines = (folder / "queue.txt").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    return {name: result for name, _, result in cells}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_row_that_fails_or_hangs_does_not_end_the_others(tmp_path, monkeypatch):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    rows = {
        "fails": Row("", 1, "-c 'raise SystemExit(3)'"),
        "hangs": Row("", 0.05, shlex.join(["-c", hangs])),
        "works": Row("", 1, "-c 'print(6 * 7)'"),
    }
    monkeypatch.setattr(gpu_queue, "ROWS", rows)
    results = run_queue(tmp_path, monkeypatch)
    assert results["fails"].startswith("exit code 3 after ")
    assert results["hangs"] == "stopped after 3 s"
    child_id, deadline = int((tmp_path / "hangs.txt").read_text()), time.monotonic() + 30
    while alive(child_id):  # nor its child, which is killed, and ends when it has the processor
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert results["works"].endswith(" s")
    assert (tmp_path / "works.txt").read_text() == "42\n"
    late = run_queue(tmp_path, monkeypatch, "--minutes", "0.1", "--rows", "works")
    assert late == {"works": "not started: no time left"}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("tiny", [False, True])
def test_flags_of_rows(name, tiny, monkeypatch):
    _, _, module, *words = gpu_queue.words_of(name, Path("figures"), tiny=tiny)
    assert module == "benchmarks.gpu_step"
    monkeypatch.setattr("sys.argv", ["gpu_step.py", *words])
    options, _ = gpu_step.parse()
    assert len(options.variants) >= 2
    assert options.repeats == 1 or not tiny


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("torch+compile", "must start with timm, fsdp2, megatron"),
        ("timm+bias", "'bias' is not one of compile, max-autotune"),
        ("fsdp2+compile+fast", "'fast' is not one of compile, te"),
        ("fsdp2+compile+fp8+bias", "bias changes the blocks that fp8 replaces"),
        ("", "must start with"),
    ],
)
def test_unknown_variants(typed, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_step.py", "--variants", "timm", typed])
    with pytest.raises(SystemExit) as end:
        gpu_step.parse()
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_rehearsal(name, tmp_path):
    """Each row runs whole. What the CPU lacks says so, and nothing else fails."""
    done = run_program(
        *f"-m benchmarks.gpu_queue --tiny --minutes 15 --rows {name} --folder".split(),
        str(tmp_path),
        warm=False,
    )
    assert done.returncode == 0, done.stderr
    assert "exit code" not in (tmp_path / "queue.txt").read_text(), done.stdout
    assert "stopped" not in (tmp_path / "queue.txt").read_text(), done.stdout
    if name not in STEPS:
        return
    for row in json.loads((tmp_path / f"{name}.json").read_text())["rows"]:
        words = row["variant"].split("+")
        reason = next((why for what, why in NOT_ON_CPU.items() if what in words), "")
        assert row["failure"].startswith(reason), row["failure"]
        assert bool(row["results"]) != bool(reason)
