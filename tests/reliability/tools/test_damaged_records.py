"""Tools on damaged and hostile records: numbers, or one line; no traceback, whatever is in a file.

The damages are those of ``tests/support/hostile.py``, by a fixed seed.
"""

import json
import math
import re

import pytest

from tests.support.hostile import VALUES, damaged
from tests.support.marks import long
from tests.support.run_records import write_run
from tools import goodput, report
from tools.wall_time import account_of
from training.logs.figures import plot_curves
from training.logs.records import METRICS_FILE, read_events, read_lines, read_metrics
from training.logs.sinks import JsonLines

TOOLS = {
    "goodput": (goodput.main, ["--json"]),
    "goodput, a table": (goodput.main, []),
    "forecast": (goodput.main, ["--chips", "8", "--json"]),
    "report": (report.main, []),
}


def run(tool, folder, capsys):
    """Run a tool in this process; return its exit code and what it printed."""
    main, flags = TOOLS[tool]
    code = main([str(folder), *flags])
    out, err = capsys.readouterr()
    assert code in (0, 2), out + err
    if code:
        assert re.fullmatch(r"tools\.\w+: error: .*\n", err), err
        assert not out
    elif "--json" in flags:
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no number"))
    return code, out, err


QUICK, MORE = 10, 1000


@pytest.mark.parametrize(
    ("tool", "file", "count"),
    [
        ("goodput", "events.jsonl", QUICK),
        ("goodput, a table", "events.jsonl", QUICK),
        ("forecast", "events.jsonl", 5),
        ("report", "events.jsonl", QUICK),
        ("report", "metrics.jsonl", QUICK),
        ("report", "run.json", QUICK),
        long("goodput", "events.jsonl", 300),
        long("goodput, a table", "events.jsonl", 300),
        long("forecast", "events.jsonl", 100),
        long("report", "events.jsonl", MORE),
        long("report", "metrics.jsonl", MORE),
        long("report", "run.json", MORE),
    ],
)
def test_a_damaged_file(tool, file, count, tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=30)
    whole = (folder / file).read_bytes()
    codes = []
    for content in damaged(whole, count, count):
        (folder / file).write_bytes(content)
        codes.append(run(tool, folder, capsys)[0])
    assert codes.count(0) > len(codes) / 10


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:20])
@pytest.mark.parametrize("name", ["time", "step", "steps", "waited", "seconds", "process_started"])
def test_a_value_that_cannot_be(name, value, tmp_path):
    """What is left of a value in any event is a number that can be computed with, in its place."""
    folder = write_run(tmp_path / "run", steps=30)
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines()
    numbers = [n for n, line in enumerate(lines) if f'"{name}": ' in line]
    number = numbers[-2 if name == "time" else -1]  # the last event may be years after the others
    lines[number] = re.sub(rf'("{name}": )[^,}}]*', lambda found: found[1] + value, lines[number])
    path.write_text("\n".join(lines) + "\n")
    events = read_events(folder)
    assert all(math.isfinite(event["time"]) for event in events)
    account = account_of(events) if events[0]["event"] == "start" else None
    if account:
        assert 0 <= account.wall_s < 1e5
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s)


def test_left_out_lines_are_counted_and_said(tmp_path, capsys):
    """A line that has another's time, or a year's, and the two of an editor of Windows."""
    folder = write_run(tmp_path / "run", steps=30)
    path = folder / "events.jsonl"
    expected = run("goodput", folder, capsys)
    assert expected[2] == f"left out: {path}: 1 damaged line\n"  # its last one is cut off
    lines = path.read_text().splitlines()
    lies = (
        '{"event": "steps", "time": 3e7, "step": 100, "steps": 99, "waited": 1.0}',
        '{"event": "steps", "time": 1200, "step": 100, "steps": 101, "waited": 1.0}',
        '{"event": "steps", "time": 1200, "step": 100, "steps": 0, "waited": 1.0}',
        '{"event": "steps", "time": 1200, "step": 100, "steps": 1.5, "waited": 1.0}',
        '{"event": "steps", "time": 1200, "step": 1, "steps": true, "waited": 1.0}',
        '{"event": "start", "time": 1200, "step": 100, "process_started": 3e9}',
        '{"event": "stop", "time": 1200, "how": ["completed"]}',
        '{"event": "steps", "time": 1' + "0" * 400 + ', "step": 9, "steps": 9, "waited": 1}',
        "x" * 5_000_000,
    )
    for line in lies:
        lines.insert(3, line)
    path.write_text("\ufeff" + "\r\n".join(lines))
    found = run("goodput", folder, capsys)
    assert found[1] == expected[1]
    assert found[2] == f"left out: {path}: {len(lies) + 1} damaged lines\n"
    assert run("forecast", folder, capsys)[2] == found[2]


def test_metrics_of_a_run_that_is_resumed(tmp_path):
    """What is read can be written again, and drawn."""
    folder = write_run(tmp_path / "run", steps=30)
    whole = (folder / METRICS_FILE).read_bytes()
    for number, content in enumerate(damaged(whole, 1, 60)):
        (folder / METRICS_FILE).write_bytes(content)
        kept = [record for record in read_metrics(folder) if record["step"] <= 20]
        JsonLines(folder / METRICS_FILE, 20).close()
        assert list(read_lines(folder / METRICS_FILE, lambda _: True)) == kept
        if kept and number % 20 == 0:
            plot_curves(kept, tmp_path / "curves.png")
