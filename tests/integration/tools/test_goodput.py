"""``python -m tools.goodput``: against made-up events whose truth is known, and a stopwatch."""

import math
import random
import re
import subprocess
import time

import pytest
from PIL import Image

from tests.support.cli import ROOT, command_of, tiny
from tests.support.run_records import BATCH_S, SAVE_S, goodput, two_starts, write_events
from tools.goodput import daly, draw, expected_goodput, main, young
from tools.wall_time import account_of
from training.logs.records import EVENTS_FILE, read_events

DOWN_S = 1.5


def test_made_up_events(tmp_path, capsys):
    write_events(tmp_path / "run", *two_starts())
    (found,) = goodput(capsys, tmp_path / "run")
    assert found["seconds"] == pytest.approx(
        {
            "useful steps": 180 + 180 + 198,
            "waiting for data": 18 + 20,
            "first step, compiling": 60 + 10,
            "starting and ending": 40 + 40 + 2,
            "evaluation": 50,
            "checkpoints": 60,
            "local checkpoints": 0,
            "lost work": 200,
            "down": 122,
        }
    )
    assert found["wall_s"] == pytest.approx(2180 - 1000)
    assert found["goodput"] == pytest.approx(558 / 1180)
    assert (found["starts"], found["failures"], found["checkpoints"]) == (2, 1, 2)
    assert (found["steps"], found["lost_steps"]) == (99 + 100 + 99, 100)
    running = 1180 - 122
    interval = math.sqrt(2 * 30 * running)
    assert found["suggestion"]["interval_s"] == pytest.approx(interval)
    pace = (558 + 38) / 298
    assert found["suggestion"]["ckpt_step_interval"] == round(interval / pace)


def test_only_what_was_not_done_again_is_kept(tmp_path, capsys):
    """A start that goes back into the middle of noted steps, and one after the end."""
    first = two_starts()
    goes_back = [
        ("start", 3000.0, 250, {"process_started": 2990.0}),  # nobody's time before: completed
        ("first_step", 3010.0, 251, {"seconds": 10.0}),
        ("stop", 3010.0, 251, {"how": "stopped"}),
        ("start", 3020.0, 251, {"process_started": 3015.0}),
        ("stop", 3030.0, 251, {"how": "failed"}),
    ]
    write_events(tmp_path / "run", *first, *goes_back)
    (found,) = goodput(capsys, tmp_path / "run")
    assert found["lost_steps"] == 100 + 50
    assert found["seconds"]["lost work"] == pytest.approx(200 + 198 * 50 / 99)
    assert found["seconds"]["down"] == pytest.approx(122 + 5)
    assert found["wall_s"] == pytest.approx(1180 + (3030 - 2990))
    assert found["failures"] == 2  # a stop by a signal is none


def restarted(*more, **first_step):
    """The events of two starts; the second one's first step has these parts."""
    events = two_starts()
    for number, values in ((8, dict(more)), (9, first_step)):
        *event, there = events[number]
        events[number] = (*event, there | values)
    return events


PARTS = {"imports": 8.0, "data": 1.0, "devices": 2.0, "agreed": 1.0, "model": 3.0, "loaded": 4.0}
FIRST_STEP = {"other": 21.0, "batch": 1.5, "compiled": 6.0, "step": 2.5}


def test_parts_of_a_restart(tmp_path, capsys):
    """They add up: what is not known is in the next part, or in the rest."""
    write_events(tmp_path, *restarted(("failed_at", 1785.0), parts=PARTS | FIRST_STEP))
    (found,) = goodput(capsys, tmp_path)
    (restart,) = found["restarts"]
    assert (restart["step"], restart["seconds"]) == (201, pytest.approx(1950 - 1778))
    known = PARTS | FIRST_STEP | {"noticed": 7.0, "ended": 115.0}
    assert restart["parts"] == pytest.approx(known)
    assert sum(known.values()) == pytest.approx(restart["seconds"])
    assert main([str(tmp_path)]) == 0
    (line,) = re.findall("^    201  .*", capsys.readouterr().out, re.MULTILINE)
    assert [float(each) for each in line.split()][-2:] == [21.0, 172.0]


@pytest.mark.parametrize("noticed", [1700.0, 1950.0, "soon", math.nan, True, None])
def test_a_time_that_cannot_be_is_not_used(noticed, tmp_path, capsys):
    """Of another restart, of a clock that goes wrong, of a damaged file."""
    wrong = {"imports": "long", "data": -1.0, "unknown": 3.0, "step": 2.0}
    write_events(tmp_path, *restarted(("failed_at", noticed), parts=wrong))
    ((restart,),) = (each["restarts"] for each in goodput(capsys, tmp_path))
    assert restart["parts"] == pytest.approx({"ended": 122.0, "step": 2.0, "other": 48.0})


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """The folder of a run of 14 steps, killed after the 10th, and what a stopwatch says."""
    folder = tmp_path_factory.mktemp("run")
    flags = "--ckpt_step_interval 4 --log_step_interval 3 --max_steps 14 --backend cuda".split()
    flags.append("--no_async_checkpoint")  # so that training stands for each of them
    words, variables = command_of("-m", "tests.fakes.slow_on_purpose", *tiny(folder), *flags)
    began = time.time()
    killed = subprocess.run(
        words, cwd=ROOT, env=variables | {"KILLED_AT": "11"}, capture_output=True
    )
    assert killed.returncode == -9, killed.stderr
    time.sleep(DOWN_S)
    process = subprocess.Popen(words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("training completed"):
            ended = time.time()
    assert process.wait() == 0
    return folder, ended - began


def test_a_stopwatch_says_the_same(killed_and_resumed, capsys):
    folder, wall = killed_and_resumed
    (found,) = goodput(capsys, folder)
    seconds = found["seconds"]
    assert found["wall_s"] == pytest.approx(wall, rel=0.01, abs=1)
    assert sum(seconds.values()) == pytest.approx(found["wall_s"])
    assert (found["starts"], found["failures"]) == (2, 1)
    # Steps 2 to 8 and, resumed after 8, 10 to 14; of those after 8 the 9th was noted.
    assert (found["steps"], found["lost_steps"]) == (7 + 5, 1)
    assert found["checkpoints"] == 2 + 2
    assert seconds["checkpoints"] >= 4 * SAVE_S
    assert found["suggestion"]["save_s"] >= SAVE_S
    assert seconds["waiting for data"] >= 12 * BATCH_S
    assert seconds["lost work"] >= BATCH_S
    assert seconds["down"] >= DOWN_S + BATCH_S
    assert seconds["evaluation"] > 0
    assert min(seconds["useful steps"], seconds["first step, compiling"]) > 0
    (restart,) = found["restarts"]
    parts = restart["parts"]
    assert sum(parts.values()) == pytest.approx(restart["seconds"])
    assert restart["step"] == 9
    assert parts["ended"] >= DOWN_S
    assert parts["batch"] >= BATCH_S
    assert {"imports", "data", "devices", "agreed", "model", "loaded", "step"} < parts.keys()
    saved = found["storage_checkpoints"]
    assert saved["number"] == found["checkpoints"]
    files = [f for f in (folder / "step_14").iterdir() if f.name != "manifest.json"]
    size = sum(f.stat().st_size for f in files)
    assert saved["bytes"] == pytest.approx(size, rel=0.01)
    assert saved["write_s"] > 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) < 10  # that one is cut


def test_table_and_picture(killed_and_resumed, tmp_path, capsys):
    folder, _ = killed_and_resumed
    write_events(tmp_path / "other", *two_starts())
    assert main([str(tmp_path / "other"), str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'other'}: 19 min 40 s, 2 starts, 1 ended by a failure" in out
    assert re.search(r"^  useful steps +9 min 18 s +47\.29%$", out, re.MULTILINE)
    assert "298 steps, 2 s each; 100 lost and repeated" in out
    assert "save every 4 min 11 s, --ckpt_step_interval 126" in out
    with Image.open(tmp_path / "other" / "goodput.png") as picture:
        assert picture.width > 800


def test_odd_names_in_the_picture(tmp_path):
    """Of folders whose names are no text, and mathematics to matplotlib."""
    folder = tmp_path / "$x^{$ \udcff"
    write_events(folder, *two_starts())
    draw({folder: account_of(read_events(folder))}, tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").stat().st_size > 10_000


def test_mistakes(tmp_path, capsys):
    def said(*words):
        assert main(list(map(str, words))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "is not a folder" in said(tmp_path / "none")
    with pytest.raises(SystemExit, match="2"):
        main(["gs://bucket/run"])
    assert "gs://bucket/run is a URL: give a local path" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert f"{tmp_path} has no events.jsonl, which earlier versions did not" in said(tmp_path)
    (tmp_path / EVENTS_FILE).write_text('{"event": "start", "time": 3}\n')
    assert "events.jsonl cannot be read" in said(tmp_path)
    write_events(tmp_path / "run", *two_starts()[:1])
    assert "cannot write" in said(tmp_path / "run", "--picture", tmp_path / "none" / "x.png")


# -- the forecast ----------------------------------------------------------------------------------

HOUR = 3600.0


def goodput_by_ticks(interval_s, save_s, restart_s, mtbf_s, training_s, seed):
    """The goodput of one run, second by second; ``training_s``: a number of intervals."""
    draw = random.Random(seed).random
    clock, waits, trained, saved = 0, 0.0, 0.0, 0.0
    while trained < training_s or waits > 0:
        clock += 1
        if draw() < 1 / mtbf_s:
            trained, waits = saved, restart_s
        elif waits > 0:
            waits -= 1
            if waits <= 0:
                saved = trained  # a save that ends, or a restart, which changes nothing
        else:
            trained += 1
            if trained % interval_s == 0:
                waits = save_s
    return training_s / clock


def test_the_closed_form_against_a_clock():
    times = (1200, 60, 600, 2 * HOUR)
    runs = [goodput_by_ticks(*times, 20 * 1200, seed) for seed in range(60)]
    mean = len(runs) / sum(1 / run for run in runs)  # training over the mean time
    assert expected_goodput(*times) == pytest.approx(mean, abs=0.02)


@pytest.mark.parametrize("mtbf_hours", [1, 10, 1000])
def test_dalys_interval_is_the_best(mtbf_hours):
    mtbf_s, save_s = mtbf_hours * HOUR, 60.0
    best = daly(save_s, mtbf_s)
    grid = [20 * 1.003**number for number in range(3600)]
    assert best == pytest.approx(
        max(grid, key=lambda s: expected_goodput(s, save_s, 600, mtbf_s)), rel=0.02
    )
    assert best < young(save_s, mtbf_s)
    assert daly(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-3)
    assert expected_goodput(best, save_s, 600, 1.0) == 0


def test_a_forecast_of_flags(capsys):
    words = "--chips 4096 --save_s 60 --restart_s 1620".split()
    ((found,),) = (each.values() for each in goodput(capsys, *words))
    # 419 failures in 54 days on 16,384 GPUs: on a quarter of them, one in 4 x 54 / 419 days.
    assert found["mtbf_s"] == pytest.approx(4 * 54 * 86400 / 419)
    assert found["interval_s"] == daly(60, found["mtbf_s"])
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "4,096 chips, 0.173 failures per chip and year: one every 12 h 22 min" in out
    assert f"expected goodput {found['goodput']:.2%}" in out


def test_a_run_gives_what_the_flags_leave_out(tmp_path, capsys):
    """Of ``two_starts``: checkpoints of 30 s, one restart of 172 s; without it the first start."""
    write_events(tmp_path, *two_starts())
    (found,) = goodput(capsys, tmp_path, "--chips", 8)
    assert (found["forecast"]["save_s"], found["forecast"]["restart_s"]) == (30, 172)
    (found,) = goodput(capsys, tmp_path, "--chips", 8, "--save_s", 5)
    assert found["forecast"]["save_s"] == 5
    write_events(tmp_path, *two_starts()[:6])
    (found,) = goodput(capsys, tmp_path, "--chips", 8)
    assert found["forecast"]["restart_s"] == 100  # the first start


def test_mistakes_of_a_forecast(tmp_path, capsys):
    def error(*words):
        assert main(list(map(str, words))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("tools.goodput: error: ")

    assert error() == "give a RUN_DIR, or --chips, --save_s and --restart_s for a forecast"
    assert error("--save_s", 3) == "--save_s and --restart_s require --chips"
    missing = "set --save_s and --restart_s, or give a RUN_DIR with measurements"
    assert error("--chips", 8) == missing
    write_events(tmp_path, *two_starts()[:2])
    assert error(tmp_path, "--chips", 8) == missing
    hopeless = error("--chips", 10**6, "--save_s", 60, "--restart_s", 10**5)
    assert "the run makes no progress: lower --restart_s or --chips" in hopeless
    for words in (["--chips", "0"], ["--chips", "8", "--save_s", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
