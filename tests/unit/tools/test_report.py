"""``python -m tools.report``: its page, beside what the runs have written."""

import html
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.ticker import MaxNLocator

from tests.support.cli import ROOT
from tests.support.run_records import goodput, write_run
from tools.report import Curve, _percentile, _ticks, main, thinned
from tools.wall_time import PARTS, account_of, shares_by_pixel
from training.logs.records import read_events

pytestmark = pytest.mark.fast

MALICIOUS = '<script>document.title = "harmed"<'
"""A name of a folder, and of other things: what would run if it were not escaped."""


def report(capsys, *words):
    """The text of the page, and what the program prints before its last line."""
    assert main(list(map(str, words))) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    with open(last.removeprefix("report: ")) as file:
        return file.read(), lines


def refused(capsys, *words):
    assert main(list(map(str, words))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("tools.report: error: ")


def test_names_are_escaped(tmp_path, capsys):
    """Of folders and of settings: nothing of them runs."""
    first = write_run(tmp_path / "first", steps=30)
    second = write_run(tmp_path / MALICIOUS, steps=30, lr=2e-3, note="</script><img src=x>")
    text, _ = report(capsys, first, second, "--output", tmp_path / "page.html")
    assert MALICIOUS not in text
    assert html.escape(MALICIOUS) in text
    assert "<img" not in text
    assert text.count("<script") == text.count("</script>") == 1


# -- what is on it ---------------------------------------------------------------------------------


def test_goodput_is_that_of_its_own_tool(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (values,) = goodput(capsys, folder)
    text, lines = report(capsys, folder)
    assert lines == ["left out: run: events.jsonl: 1 damaged line"]
    assert f"<td>{values['goodput']:.2%}</td>" in text
    account = account_of(read_events(folder))
    shares = np.array(shares_by_pixel(account, 1000.0, 7.0, 200))
    by_part = dict(zip(PARTS, shares.sum(axis=1), strict=True))
    seconds = values["seconds"]
    steps = seconds["useful steps"] + seconds.pop("waiting for data")
    assert by_part.pop("waiting for data") == 0
    assert by_part == pytest.approx(seconds | {"useful steps": steps})
    assert np.allclose(shares.sum(axis=0)[: 1180 // 7], 7.0)
    # The failure is at the last sign of life, 1778 s, and the next start at 1900 s.
    assert "failure (last sign of life), 1970-01-01 00:29:38 UTC" in text
    assert "start after step 200, 1970-01-01 00:31:40 UTC" in text
    assert "checkpoint at step 200, 1970-01-01 00:25:28 UTC" in text


def test_differences_are_marked(tmp_path, capsys):
    runs = [write_run(tmp_path / f"r{n}", steps=30, lr=lr) for n, lr in enumerate((1, 1, 3))]
    text, _ = report(capsys, *runs)
    differing, same = text[text.index("Settings that differ") :].split("<details>")
    assert '<td>arguments.lr</td><td>1</td><td>1</td><td class="differs">3</td>' in differing
    assert "arguments.model" not in differing
    assert "<td>arguments.model</td><td>vit</td><td>vit</td><td>vit</td>" in same
    assert "differs" not in same


def test_long_runs_are_thinned(tmp_path, capsys):
    """A million points become hundreds, with their extremes; the page of a long run is small."""
    generator = np.random.default_rng(0)
    curve = Curve(np.arange(1e6), generator.normal(size=1_000_000))
    few = thinned(curve)
    few = Curve(np.array(few.steps), np.array(few.values))
    assert 300 < len(few.steps) <= 602
    assert np.isin(few.steps, curve.steps).all()
    assert (curve.values[few.steps.astype(int)] == few.values).all()
    assert (few.steps[0], few.steps[-1]) == (0, 999_999)
    assert (few.values.min(), few.values.max()) == (curve.values.min(), curve.values.max())
    short, _ = report(capsys, write_run(tmp_path / "short", steps=10_000))
    long, _ = report(capsys, write_run(tmp_path / "long", steps=60_000))
    assert len(long) < 1.2 * len(short) < 500_000
    assert "60,000" in long


def test_percentiles_and_ticks_are_those_of_others():
    values = sorted(np.random.default_rng(0).normal(size=777))
    for percent in (0.0, 0.5, 50.0, 99.5, 100.0):
        assert _percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    for low, high, count in [(0, 7.3, 5), (0.11, 0.113, 5), (-3e8, 5e9, 12), (0, 1, 5), (0, 99, 4)]:
        theirs = MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        inside = [tick for tick in theirs if low <= tick <= high]
        assert _ticks(low, high, count) == pytest.approx(inside)


def test_without_packages(tmp_path):
    """Both tools run in a Python that has none, as a laptop's: it reads only the folder."""
    folder = write_run(tmp_path / "run")

    def ran(*words):  # -S: without site-packages
        command = [sys.executable, "-S", "-m", *words]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done

    assert "report.html" in ran("tools.report", str(folder)).stdout
    assert "<svg" in (folder / "report.html").read_text()
    done = ran("tools.goodput", str(folder))
    assert "  useful steps  " in done.stdout
    assert "goodput.png: it requires the package matplotlib" in done.stderr


# -- damaged and missing files, and where the page goes --------------------------------------------


def test_what_is_damaged_is_left_out(tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=30)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "many"}\n{"step": -1, "loss": 1}\n[[[\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"step": 31, "loss": null, "lr": "fast", "grad_norm": 1e400, "x": true}\n')
        file.write(b'{"step": 32, "loss": ' + b"9" * 5000 + b'}\n\xff\xfe\n{"step": 33, "lo')
    with (folder / "events.jsonl").open("a") as file:
        file.write('\n{"event": "steps", "time": null}\n{"event": "save", "time": 1e300}\n')
        file.write('{"event": ["start"], "time": 2200.0}\n')
    (folder / "run.json").write_text('{"arguments": ' + "[" * 900 + "]" * 900 + "}")
    _, lines = report(capsys, folder)
    assert lines[2] == "left out: run: run.json: cannot be read: it is nested too deeply"
    (folder / "run.json").write_text('{"arguments": {"lr": 1')
    text, lines = report(capsys, folder)
    assert lines[:2] == [
        "left out: run: metrics.jsonl: 8 damaged lines",
        "left out: run: events.jsonl: 4 damaged lines",
    ]
    assert lines[2].startswith("left out: run: run.json: cannot be read: ")
    assert "<td>30</td>" in text  # the last step
    assert all(line.removeprefix("left out: ") in html.unescape(text) for line in lines)


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "run.json"])
def test_a_file_that_is_empty_or_missing_or_a_pipe(file, tmp_path, capsys):
    others = {"metrics.jsonl": "summary", "events.jsonl": "loss", "run.json": "loss"}
    assert others[file]
    folder = write_run(tmp_path / "run", steps=30)
    (folder / file).write_text("")
    _, lines = report(capsys, folder)
    assert len([line for line in lines if line.startswith(f"left out: run: {file}: ")]) == 1
    (folder / file).unlink()
    _, lines = report(capsys, folder)
    assert f"left out: run: {file}: not found" in lines
    os.mkfifo(folder / file)  # reading it would wait for ever
    _, lines = report(capsys, folder)
    assert any(line.startswith(f"left out: run: {file}: cannot be read: ") for line in lines)


def test_mistakes(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=30)
    none = f"{tmp_path} is not a run's folder: it has none of metrics.jsonl, events.jsonl, run.json"
    assert refused(capsys, tmp_path) == none
    assert refused(capsys, run, tmp_path) == none
    assert not (run / "report.html").exists()
    assert "none is not a folder" in refused(capsys, tmp_path / "none")
    assert "is given twice" in refused(capsys, run, tmp_path / "run" / ".." / "run")
    assert refused(capsys, *[run] * 9) == "9 runs given: a report shows at most 8"
    assert "cannot write" in refused(capsys, run, "--output", tmp_path / "none" / "page.html")
    with pytest.raises(SystemExit, match="2"):
        main(["s3://bucket/run"])


def test_nothing_but_a_report_is_overwritten(tmp_path, capsys):
    run, page = write_run(tmp_path / "run", steps=30), tmp_path / "page.html"
    page.write_text("mine")
    assert "is not a report and will not be overwritten" in refused(capsys, run, "--output", page)
    assert page.read_text() == "mine"
    page.unlink()
    first, _ = report(capsys, run, "--output", page)
    write_run(run, steps=60)
    second, _ = report(capsys, run, "--output", page)
    assert first != second
    link = tmp_path / "link.html"
    link.symlink_to(page)
    assert "it is a symbolic link" in refused(capsys, run, "--output", link)
    assert page.read_text() == second
