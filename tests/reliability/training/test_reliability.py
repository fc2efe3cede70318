"""What must not spoil a run, by the real command line: damage, a full disk, two jobs, NaN, hangs.

In one process of the GPU backend where it does not matter which: it starts at once.
"""

import json
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from config_fields import count_or_percent
from data.config import DataConfig
from data.index import index_split
from data.loader import GlobalBatchSampler
from tests.support.checkpoints import flip, left
from tests.support.cli import ALL_DIGITS, Result, train_tiny, train_tiny_gpu
from tests.support.resolved import on_gpus
from tests.support.short_runs import ENDLESS, QUICK, mistake, program, start
from tests.support.usage_error import told_in_one_line
from training.logs.bad_images import TRAIN, BadImages

# -- checkpoints ----------------------------------------------------------------------


def test_stop_of_a_run_that_went_back_tells_how_to_go_on(run, monkeypatch):
    monkeypatch.setenv("SIGNAL_AT", "0 7 SIGTERM")
    flags = ["--resume", run / "step_5", "--max_steps", "9"]
    stopped = program(run, *flags, module="tests.fakes.signal_at_step")
    assert stopped.returncode == 143
    told = f"step 7, checkpoint {run}/step_7; the same command with --resume auto resumes there"
    assert told in stopped.stdout


def test_damaged_newest_checkpoint_is_named_and_passed_over(run, trained):
    flip(run / "step_10")
    resumed = train_tiny_gpu(run, *QUICK, "--max_steps", "10")
    assert f"warning: {run}/step_10 is damaged (" in resumed.stdout
    assert ": resuming step_5 instead" in resumed.stdout
    assert resumed.column("loss") == trained.column("loss")
    assert left(run) == [5, 10]
    assert left(run / "set_aside_1") == [10]


def test_second_job_in_a_folder(run):
    first = start(run, *ENDLESS, warm=True)
    try:
        while "epoch 2 step" not in first.stdout.readline():
            assert first.poll() is None
        said = mistake(program(run, "--max_steps", "30"))
        assert f"--ckpt_dir {run} is in use by process " in said
        assert first.poll() is None
    finally:
        first.terminate()
        first.communicate(timeout=60)


# -- images ---------------------------------------------------------------------------


def test_images_that_cannot_be_read(tmp_path):
    data = shutil.copytree(ALL_DIGITS, tmp_path / "data")
    broken = sorted(data.glob("train/*/*"))[:2] + sorted(data.glob("val/*/*"))[:1]
    for path in broken:
        path.write_bytes(path.read_bytes()[:60])
    flags = ["--data_dir", data, "--max_steps", "11"]
    done = program(tmp_path / "run", *flags)
    assert done.returncode == 0, done.stderr
    listed = (tmp_path / "run" / "bad_images.txt").read_text().splitlines()
    assert {line.partition("\t")[0] for line in listed} == set(map(str, broken))
    assert done.stdout.count(" cannot be read (") == 3
    (evaluation,) = Result(tmp_path / "run").evaluations
    assert evaluation["val_images"] == 358
    assert f"{broken[0]}\timage file is truncated\ttrain" in listed


FORMS = {
    "SPMD": ("--backend xla --xla_fsdp spmd --cpu_devices 2", 1, train_tiny),
    "FSDP2 in two processes": ("--backend cuda", 2, train_tiny_gpu),
}


@pytest.fixture
def spoiled(tmp_path):
    """Digits, two images of which, that the second of two processes reads in step 5, are broken."""
    data = shutil.copytree(ALL_DIGITS, tmp_path / "data")
    sampler = GlobalBatchSampler(1438, 128, shuffle=True, shard=1, shards=2)
    images = index_split(str(data / "train")).paths
    for _, index in list(sampler)[4][7:9]:
        Path(images[index]).write_text("hello")
    return data


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_too_many_unreadable_images(form, spoiled, tmp_path):
    """A checkpoint is written before the run ends; with another limit it goes on as if it had not
    ended. With the same one it is refused at once: a restart would not help."""
    flags, processes, train = FORMS[form]
    flags = [*flags.split(), "--data_dir", str(spoiled), "--max_steps", "9"]
    how = {"processes": processes} if processes > 1 else {}
    ended = program(tmp_path / "run", *flags, "--max_bad_images", "1", **how)
    (line,) = [each for each in ended.stderr.splitlines() if each.startswith("run_vit_training.py")]
    assert "error: 2 images cannot be read, more than --max_bad_images 1: fix or remove" in line
    assert "or allow more with --max_bad_images 2" in line
    (step,) = left(tmp_path / "run")
    assert line.endswith(f"the same command then resumes {tmp_path}/run/step_{step}")
    if processes == 1:
        assert (ended.returncode, step) == (5, 5)
    else:  # the other one learns of it a step later
        assert re.search(r"exitcode *: 5 ", ended.stderr)
        assert step in (5, 6, 7)

    if processes == 1:
        said = mistake(program(tmp_path / "run", *flags, "--max_bad_images", "1"))
        assert f"{tmp_path}/run/bad_images.txt lists them" in said
        assert left(tmp_path / "run") == [step]
    more = [*QUICK, *flags, "--max_bad_images"]
    resumed = train(tmp_path / "run", *more, "2", **how)
    whole = train(tmp_path / "whole", *more, "1%", **how)
    assert resumed.column("loss") == whole.column("loss")
    assert resumed.evaluations == whole.evaluations


def test_too_many_unreadable_images_in_an_evaluation(tmp_path):
    data = shutil.copytree(ALL_DIGITS, tmp_path / "data")
    for path in sorted(data.glob("val/3/*")):
        path.write_text("hello")
    count = len(list(data.glob("val/3/*")))
    flags = ["--data_dir", data, "--test_step_interval", "3", "--max_steps", "4"]
    ended = program(tmp_path / "run", *flags)
    assert ended.returncode == 5
    told = f"{count} validation images cannot be read, more than --max_bad_images 1% (4 of 359)"
    assert told in ended.stderr
    assert left(tmp_path / "run") == [3]
    assert Result(tmp_path / "run").evaluations == []
    assert ended.stdout.count(" cannot be read (") == 20
    assert f"{count - 20} more images cannot be read: bad_images.txt lists them" in ended.stdout
    assert len((tmp_path / "run" / "bad_images.txt").read_text().splitlines()) == count
    done = program(tmp_path / "run", *flags, "--max_bad_images", count)
    assert done.returncode == 0, done.stderr
    assert [each["step"] for each in Result(tmp_path / "run").evaluations] == [3, 4]
    assert (
        done.stdout.count(f" % of {359 - count} of 359 images, none readable of class 3, top") == 2
    )


def test_images_that_have_gone(tmp_path):
    data, run = shutil.copytree(ALL_DIGITS, tmp_path / "data"), tmp_path / "run"
    flags = ["--data_dir", data, "--batch_size", "16", "--num_workers", "1"]
    gone = threading.Thread(target=take_away, args=(data / "train", run / "metrics.jsonl"))
    gone.start()
    ended = program(run, *flags, "--max_steps", "80", module="tests.fakes.slow_on_purpose")
    gone.join()
    assert "and neither can 10 images tried in its place: saving a checkpoint and" in ended.stderr
    (step,) = left(run)
    assert f"(see the warning above): the same command resumes {run}/step_{step}" in ended.stderr
    assert ended.returncode == 1
    (tmp_path / "away").rename(data / "train")
    more = [*QUICK, *map(str, flags), "--max_steps", str(step + 2)]
    resumed = train_tiny_gpu(run, *more)
    whole = train_tiny_gpu(tmp_path / "whole", *more)
    assert resumed.column("loss") == whole.column("loss")


def take_away(folder, metrics):
    """Rename a folder once a run has logged some steps."""
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        time.sleep(0.01)
    folder.rename(folder.parent.parent / "away")


@pytest.mark.parametrize(
    ("limit", "size", "allowed"),
    [
        ("0", 300, 0),
        ("7", 3, 7),
        ("1%", 1, 1),
        ("1%", 100, 1),
        ("1%", 101, 2),
        ("1%", 1_281_167, 12_812),
        ("0.07%", 10_000, 7),  # in floating point it is more
        ("100%", 359, 359),
    ],
)
def test_limit_of_unreadable_images(limit, size, allowed):
    limit = count_or_percent(limit)
    assert DataConfig(max_bad_images=limit).max_bad_images == limit
    data = SimpleNamespace(train_length=size, val_length=0, classes=None)
    for count in {allowed, allowed + 1}:
        bad_images = BadImages(limit, data, is_main=True)
        found = [(f"{number}.jpg", "it is text", 0) for number in range(count)]
        bad_images.collect(TRAIN, SimpleNamespace(bad_images=lambda found=found: found), print)
        assert bool(bad_images.excess) == (count > allowed)


@pytest.mark.parametrize("value", "-1 100.5% nan% % 1.5 1%2".split())
def test_limits_that_cannot_be(value, capsys):
    assert "argument --max_bad_images: " in told_in_one_line(capsys, f"--max_bad_images={value}")


# -- disks ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB; a checkpoint takes 0.6."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, free):
    """Leave about ``free`` bytes."""
    stat = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        file.write(bytes(max(0, stat.f_bavail * stat.f_frsize - free)))


def test_disk_full(small_disk):
    run = small_disk / "run"
    flags = "--ckpt_step_interval 2 --max_steps".split()
    first = program(run, *flags, 4)
    assert first.returncode == 0, first.stderr
    fill(small_disk, 30_000)
    full = program(run, *flags, 20, "--max_failed_saves", 3)
    assert full.returncode == 4, full.stdout + full.stderr
    assert "Traceback" not in full.stderr
    assert full.stdout.count("training continues, ") == 2
    assert "step_6 could not be written" in full.stdout
    assert "; 0.0 MB free)" in full.stdout
    (line,) = [each for each in full.stderr.splitlines() if each.startswith("run_vit_training.py")]
    assert f"3 saves in a row have failed: the newest checkpoint is {run}/step_4" in line
    assert left(run) == [2, 4]
    records = Result(run).records  # whole lines
    assert [r["step"] for r in records if "loss" in r][:4] == [1, 2, 3, 4]
    (small_disk / "filler").unlink()
    again = program(run, *flags, 8)
    assert again.returncode == 0, again.stderr
    assert f"resuming {run}/step_4" in again.stdout
    assert left(run) == [2, 4, 6, 8]


def test_logs_on_a_full_disk_end_nothing(run, small_disk):
    subprocess.run(["mount", "--bind", small_disk, run / "tensorboard"], check=True)
    (run / "curves.png").unlink()
    (run / "curves.png").mkdir()
    fill(small_disk, 0)
    try:
        done = program(run, "--max_steps", "12")
    finally:
        subprocess.run(["umount", "-l", run / "tensorboard"], check=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "training completed: step 12" in done.stdout
    assert "warning: TensorBoard's file cannot be written" in done.stdout
    assert "warning: curves.png cannot be written" in done.stdout
    assert left(run) == [5, 10, 11, 12]


@pytest.mark.long
def test_an_old_checkpoint_that_cannot_be_removed(run):
    (run / "step_1").touch()  # no folder: nothing can be removed from it
    flags = ["--keep_checkpoints", "1", "--ckpt_step_interval", "2", "--max_steps"]
    for steps, kept in (("14", 14), ("14", 14), ("15", 15)):
        done = program(run, *flags, steps)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        warned = [line for line in done.stdout.splitlines() if line.startswith("warning: an old")]
        assert warned
        assert f"cannot be removed (Not a directory: {run}/step_1/manifest.json)" in warned[0]
        assert left(run) == [1, kept]


@pytest.mark.parametrize("folder", ["/proc/vit", "/dev/null/run"])
def test_folder_that_cannot_be_written(folder, capsys):
    told = told_in_one_line(capsys, "--fake_data", "--backend", "cuda", "--ckpt_dir", folder)
    assert f"cannot write to --ckpt_dir {folder}" in told or "is a file" in told


# -- steps ----------------------------------------------------------------------------


def test_not_finite_steps_are_skipped_counted_and_end_the_run(run, monkeypatch):
    monkeypatch.setenv("FAULT_AT", "loss 12 12")
    flags = ["--max_bad_steps", "3", "--max_steps"]
    once = program(run, *flags, "13", module="tests.fakes.fault_at_step")
    assert once.returncode == 0, once.stderr
    assert "warning: 1 step(s) since the last log were skipped" in once.stdout
    text = (run / "metrics.jsonl").read_text()
    records = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    steps = {r["step"]: r for r in records if "loss" in r}
    assert steps[12]["loss"] is None
    assert steps[12]["skipped_steps"] == steps[13]["skipped_steps"] == 1
    assert steps[13]["loss"] is not None
    monkeypatch.setenv("FAULT_AT", "loss 15 99")
    ended = program(run, *flags, "30", module="tests.fakes.fault_at_step")
    assert ended.returncode == 3, ended.stderr
    (line,) = [each for each in ended.stderr.splitlines() if each.startswith("run_vit_training.py")]
    # Told by what has arrived: a busy host is a step or two ahead of it.
    assert re.search("[3-5] consecutive steps had a loss or gradient norm that is not finite", line)
    assert f"the last good checkpoint is {run}/step_13" in line
    assert left(run) == [5, 10, 11, 13]
    never = ["--max_bad_steps", "0", "--max_steps", "19"]  # not before the last step, bad as well
    ended = program(run, *never, module="tests.fakes.fault_at_step")
    assert ended.returncode == 3
    assert "so step_19 was set aside in" in ended.stderr


def test_a_step_that_hangs(run, monkeypatch):
    monkeypatch.setenv("FAULT_AT", "hang 12 12")
    hung = program(
        run, "--step_timeout_s", "2", "--max_steps", "20", module="tests.fakes.fault_at_step"
    )
    assert hung.returncode == 1
    assert "Timeout (0:00:02)!" in hung.stderr
    assert "tests/fakes/fault_at_step.py" in hung.stderr
    assert left(run) == [5, 10, 11]


def test_a_first_batch_that_is_never_read(run, monkeypatch):
    """The wait for it is counted, however short the time is that a step may take."""
    monkeypatch.setenv("FAULT_AT", "read 3 3")
    flags = "--step_timeout_s 0.1 --max_steps 20".split()
    hung = program(run, *flags, module="tests.fakes.fault_at_step")
    assert hung.returncode == 1
    assert "Timeout (0:00:03)!" in hung.stderr
    assert "tests/fakes/fault_at_step.py" in hung.stderr


def test_a_compilation_that_never_ends(run, monkeypatch):
    monkeypatch.setenv("FAULT_AT", "compile 3 3")
    flags = "--fsdp simple --compile --step_timeout_s 0.1 --max_steps 20".split()
    hung = program(run, *flags, module="tests.fakes.fault_at_step")
    assert hung.returncode == 1
    assert "compiling the training step" in hung.stdout
    assert "Timeout (0:00:03)!" in hung.stderr
    assert "tests/fakes/fault_at_step.py" in hung.stderr


# -- evaluations ----------------------------------------------------------------------

EVALUATED = ["--data_dir", str(ALL_DIGITS), *"--test_epoch_interval 1 --max_steps".split()]


@pytest.mark.long
def test_signal_in_an_evaluation_and_the_evaluation_that_is_owed(tmp_path, monkeypatch):
    whole = train_tiny_gpu(tmp_path / "whole", *QUICK, *EVALUATED, "13")
    assert [e["step"] for e in whole.evaluations] == [11, 13]
    run, last_flags = tmp_path / "run", [*EVALUATED, "13"]
    monkeypatch.setenv("FAULT_AT", "evaluation 2 2")
    stopped = program(run, *last_flags, module="tests.fakes.fault_at_step")
    assert stopped.returncode == 143, stopped.stderr
    assert f"training stopped by SIGTERM: step 11, checkpoint {run}/step_" in stopped.stdout
    assert Result(run).evaluations == []
    resumed = train_tiny_gpu(run, *QUICK, *last_flags)
    assert resumed.evaluations == whole.evaluations
    assert resumed.column("loss") == whole.column("loss")


def test_crash_between_saving_and_evaluating(trained, run):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("".join(text.splitlines(keepends=True)[:-1]))
    again = train_tiny_gpu(run, *QUICK, "--max_steps", "10")
    assert again.records == trained.records


def test_eval_batches(tmp_path):
    flags = ["--data_dir", str(ALL_DIGITS), "--eval_batches", "2", "--max_steps", "1"]
    done = train_tiny_gpu(tmp_path, *QUICK, *flags)
    assert [e["val_images"] for e in done.evaluations] == [256]
    for flags, batches in (("", 0), ("--fake_data", 3), ("--fake_data --eval_batches 2", 2)):
        run = on_gpus(f"--backend cuda --max_steps 3 {flags}")
        assert run.config.log.eval_batches == batches
