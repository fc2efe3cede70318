"""``python -m tools.forecast``: against a clock that ticks, made-up events, a run with kills."""

import dataclasses
import itertools
import json
import math
import random
import re
import subprocess

import numpy as np
import pytest
from PIL import Image

from tests.cli import ROOT, command_of, tiny
from tests.tools.test_goodput import two_starts, write_events
from tools.forecast import Strategy, Tier, daly, forecast, main, measure, simulate
from tools.goodput import account_of, young
from training.logs.records import read_events

HOUR = 3600.0
STORAGE = Tier(save_s=60.0, restart_s=200.0, interval_s=1200.0)
PEERS = Tier(save_s=10.0, restart_s=90.0, interval_s=300.0)
PLAIN = Strategy("storage", 1 / (2 * HOUR), STORAGE, replace_s=400.0)
WITH_PEERS = dataclasses.replace(PLAIN, peers=PEERS, peer_share=0.8)
ELASTIC = dataclasses.replace(
    WITH_PEERS, peers=dataclasses.replace(PEERS, restart_s=500.0), replace_s=2000.0, groups=4
)
ALL = pytest.mark.parametrize("strategy", [PLAIN, WITH_PEERS, ELASTIC], ids=["1", "2", "elastic"])


def by_ticks(strategy, training_s, seed):
    """The goodput of one run, second by second; ``training_s``: a number of storage intervals."""
    draw = random.Random(seed).random
    inner = strategy.peers or strategy.storage
    clock, waits = 0, strategy.storage.restart_s
    trained, saved, stored = 0.0, 0.0, 0.0
    away = []  # when each of the groups that are away is back
    while True:
        clock += 1
        if draw() < strategy.rate:
            survived = draw() < strategy.peer_share
            trained = saved if survived else stored
            saved = trained
            waits = (inner if survived else strategy.storage).restart_s
            if strategy.groups:
                away.append(clock + strategy.replace_s)
            else:
                waits += strategy.replace_s
        elif waits > 0:
            waits -= 1
        elif any(back <= clock for back in away):
            away.remove(min(away))
            waits = inner.restart_s
        else:
            before = trained
            trained += 1 - len(away) / (strategy.groups or 1)
            if trained // inner.interval_s > before // inner.interval_s:
                waits += inner.save_s
                saved = trained
            if trained // strategy.storage.interval_s > before // strategy.storage.interval_s:
                waits += strategy.storage.save_s if strategy.peers else 0
                stored = saved = trained
            if trained >= training_s:
                return training_s / (clock + waits)


@pytest.mark.fast
@ALL
def test_the_simulation_and_the_formula_against_a_clock(strategy):
    training_s = 20 * 1200.0
    ticked = np.array([by_ticks(strategy, training_s, seed) for seed in range(80)])
    error = 100 * ticked.std() / math.sqrt(len(ticked))
    simulated = simulate(strategy, training_s)
    assert 100 * simulated.mean() == pytest.approx(100 * ticked.mean(), abs=3 * error + 0.3)
    assert simulated.std() == pytest.approx(ticked.std(), rel=0.5)
    assert error < 1.2


@pytest.mark.fast
@ALL
@pytest.mark.parametrize("mtbf_hours", [2, 8, 50])
def test_the_formula_against_a_thousand_runs(strategy, mtbf_hours):
    strategy = dataclasses.replace(strategy, rate=1 / (mtbf_hours * HOUR))
    found = forecast(strategy, 400 * HOUR, chips=10, step_share=1.0)
    assert len(found.simulated) == 1000
    assert 100 * found.goodput == pytest.approx(100 * found.simulated_mean, abs=1.0)
    assert found.hours == pytest.approx(400 / found.goodput)
    assert found.chip_hours == pytest.approx(10 * found.hours)


@pytest.mark.fast
@pytest.mark.parametrize("mtbf_hours", [1, 10, 1000])
def test_the_best_interval_is_the_best(mtbf_hours):
    """Daly's is within a hundredth of the best of a fine grid; Young's is its limit."""
    mtbf_s = mtbf_hours * HOUR

    def goodput(interval_s):
        tier = dataclasses.replace(STORAGE, interval_s=interval_s)
        return dataclasses.replace(PLAIN, rate=1 / mtbf_s, storage=tier).goodput(1000 * HOUR)

    grid = np.geomspace(20, 1e6, 4000)
    best = max(grid, key=goodput)
    found = daly(STORAGE.save_s, mtbf_s)
    assert found == pytest.approx(best, rel=0.02)
    assert goodput(found) == pytest.approx(goodput(best), rel=1e-4)
    assert found < young(STORAGE.save_s, mtbf_s)
    assert daly(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-3)


@pytest.mark.fast
def test_more_tiers_are_better_and_limits_hold():
    fewer = dataclasses.replace(WITH_PEERS, groups=4)
    goodputs = [each.goodput(400 * HOUR) for each in (PLAIN, WITH_PEERS, fewer)]
    assert goodputs == sorted(goodputs)
    rare = dataclasses.replace(PLAIN, rate=1e-12)
    assert rare.goodput(400 * HOUR) == pytest.approx(1200 / 1260, rel=1e-3)
    hopeless = dataclasses.replace(PLAIN, rate=1.0)
    assert hopeless.goodput(HOUR) == 0


# -- the command -----------------------------------------------------------------------------------

FLAGS = "--chips 4096 --save_s 60 --load_s 120 --restart_s 300".split()


def run_main(capsys, *words):
    assert main(list(map(str, words))) == 0
    return capsys.readouterr().out


@pytest.mark.fast
def test_table_and_picture(tmp_path, capsys):
    picture = tmp_path / "picture.png"
    more = "--peer_save_s 5 --peer_load_s 20 --groups 8 --price 4 --replace_s 1200".split()
    out = run_main(capsys, *FLAGS, *more, "--picture", picture)
    # 419 failures in 54 days on 16,384 GPUs: on a quarter of them, one in 4 x 54 / 419 days.
    assert "4,096 chips, 0.173 failures a chip and year: one every 12 h 22 min; 30 d of" in out
    young_s = math.sqrt(2 * 60 * 4 * 54 * 86400 / 419)
    assert f"best interval of storage alone: {young_s // 60:.0f} min" in out
    rows = re.findall(r"^(storage|peers and storage|fewer machines)  .*", out, re.MULTILINE)
    assert rows == ["storage", "peers and storage", "fewer machines"]
    with Image.open(picture) as image:
        assert image.width > 1000
    values = json.loads(run_main(capsys, *FLAGS, *more, "--picture", picture, "--json"))
    for each in values:
        low, high = each["simulated_5_to_95"]
        assert low < each["goodput"] < high
        assert each["chip_hours"] == pytest.approx(4096 * 720 / each["goodput"])
        assert each["usd"] == pytest.approx(4 * each["chip_hours"])
    assert (
        run_main(capsys, *FLAGS, *more, "--picture", picture, "--json")
        == json.dumps(values, indent=2) + "\n"
    )  # the simulation is the same each time


@pytest.mark.fast
def test_a_run_corrects_it(tmp_path, capsys):
    """What is known of ``two_starts``: a failure in 1058 s of running, checkpoints of 30 s."""
    write_events(tmp_path, *two_starts())
    (tmp_path / "run.json").write_text('{"devices": 8}')
    out = run_main(capsys, tmp_path, "--hours", 10)
    per_year = 365.25 * 86400 / 1058 / 8
    assert out.startswith(
        f"8 chips, {per_year:.3g} failures a chip and year: one every 17 min 38 s"
    )
    # Its restart: 122 s down, 40 s of starting, 10 s of a first step.
    assert "stops it for 30 s, a restart takes 2 min 52 s" in out
    # Of 558 s of steps, 38 s of waiting and 50 s of evaluation; and 200 s of lost work.
    assert f"1 failure(s) in 17 min 38 s of running, {558 / 646:.1%} of training in steps" in out
    assert re.search(r"^storage, as the run  5 min 23 s  ", out, re.MULTILINE)  # 2 saves
    assert (tmp_path / "forecast.png").exists()
    double = run_main(capsys, tmp_path, "--hours", 10, "--chips", 16, "--save_s", 5)
    assert "one every 8 min 49 s" in double
    assert "stops it for 5 s" in double


@pytest.mark.fast
def test_a_run_without_failures_has_the_published_rate(tmp_path, capsys):
    write_events(tmp_path, *two_starts()[:6])
    (tmp_path / "run.json").write_text('{"devices": 8}')
    out = run_main(capsys, tmp_path)
    assert out.startswith("8 chips, 0.173 failures a chip and year: ")
    assert "a restart takes 1 min 40 s" in out  # the first start
    assert ": 0 failure(s) in 9 min 38 s of running" in out


@pytest.mark.fast
def test_mistakes(tmp_path, capsys):
    def refused(*words):
        assert main(list(map(str, words))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("tools.forecast: error: ")

    given = "give --chips and --save_s and --restart_s, or a RUN_DIR that has measured it"
    assert refused() == given
    assert "events.jsonl cannot be read: No such file" in refused(tmp_path)
    write_events(tmp_path, *two_starts())
    assert "run.json cannot be read: No such file" in refused(tmp_path)
    write_events(tmp_path, *two_starts()[:2])
    assert "has no useful step yet" in refused(tmp_path)
    assert "require each other" in refused(*FLAGS, "--peer_save_s", 1)
    hopeless = refused(*FLAGS, "--failures_per_chip_year", 10_000)
    assert "the run would have more than 20,000: lower --hours, --restart_s or --chips" in hopeless
    assert "cannot write" in refused(*FLAGS, "--picture", tmp_path / "none" / "x.png")
    for words in (["--chips", "0"], ["--save_s", "0"], ["--peer_percent", "100"], ["gs://a/b"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
    assert list(tmp_path.glob("*.png")) == []


# -- a run with kills ------------------------------------------------------------------------------

MTBF_S, KILLS = 20.0, 12


@pytest.mark.long
def test_a_run_that_is_killed_at_random(tmp_path, capsys):
    """Its goodput is within 2 points of what the forecast makes of its measured times.

    The moments of the kills are quantiles of the exponential distribution, in a random order, so
    that a few of them are like many.
    """
    folder = tmp_path / "run"
    flags = "--backend cuda --no_async_checkpoint --ckpt_step_interval 10 --max_steps 500".split()
    more = "--num_epochs 50 --test_epoch_interval 50 --keep_checkpoints 2".split()
    program = ("-m", "tests.stand_ins.slow_on_purpose", *tiny(folder), *flags, *more)
    moments = [-MTBF_S * math.log(1 - (i + 0.5) / KILLS) for i in range(KILLS)]
    random.Random(0).shuffle(moments)
    for number in itertools.count():
        words, variables = command_of(*program)
        variables["KILLED_AFTER_S"] = str(moments[number % KILLS])
        done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -9, done.stderr
    account = account_of(read_events(folder))
    assert account.failures >= 3
    training_s = measure(account).training_s
    found = run_main(capsys, folder, "--hours", training_s / HOUR, "--json")
    as_run = json.loads(found)[-1]
    assert as_run["strategy"] == "storage, as the run"
    assert 100 * as_run["goodput"] == pytest.approx(100 * account.goodput, abs=2)
