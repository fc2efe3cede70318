"""A user's own source, objective and hook by ``--extension``: no line of the program is theirs."""

import re

import pytest

from tests.support.cli import HAS_XLA, ROOT, run_program, tiny, train_tiny, train_tiny_gpu
from tests.support.marks import long
from tests.support.usage_error import told_in_one_line

EXTENSION = ["--extension", str(ROOT / "tests" / "stranger" / "gratings.py")]
NEEDS_XLA = pytest.mark.skipif(not HAS_XLA, reason="no torch_xla")
FLAGS = [*EXTENSION, *"--data_source gratings --objective angle --num_workers 1".split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train_tiny_gpu(tmp_path_factory.mktemp("whole"), *FLAGS)


def test_the_program_does_not_name_it():
    names = re.compile(r"gratings|angle_weight", re.IGNORECASE)
    for folder in ("features", "training", "data", "models", "xla_fsdp", "torch_fsdp", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not names.search(path.read_text(encoding="utf-8")), path


def test_it_trains(whole):
    losses = whole.column("loss")
    assert len(set(losses)) == len(losses)
    assert "objective: angle, weight 1" in whole.stdout
    assert "angles after step 2" in whole.stdout
    assert "angles after step 3" not in whole.stdout


@NEEDS_XLA
@pytest.mark.parametrize("devices", [long(1), 4])
def test_xla_has_the_same_losses(devices, whole, tmp_path):
    result = train_tiny(tmp_path, *FLAGS, devices=devices)
    assert result.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)


GRAPH = ["--fsdp", "simple", "--compile"]


@pytest.mark.parametrize(
    ("train", "flags", "how"),
    [
        (train_tiny_gpu, GRAPH, {"processes": 2}),
        long(train_tiny_gpu, [*GRAPH, "--no_grad_ckpt"], {}),
        long(train_tiny_gpu, ["--fsdp", "simple"], {}),
        (train_tiny_gpu, [], {}),
        pytest.param(train_tiny, [], {"devices": 2}, marks=NEEDS_XLA),
        pytest.param(train_tiny, ["--xla_fsdp", "nested"], {}, marks=[NEEDS_XLA, pytest.mark.long]),
    ],
)
def test_random_numbers_in_evaluations(train, flags, how, tmp_path):
    """They follow from the seed and the batch, not from the step or from a stop."""
    flags = [*FLAGS, *flags, "--test_step_interval", "2"]
    train(tmp_path / "run", *flags, "--max_steps", "4", "--eval_batches", "1", **how)
    resumed = train(tmp_path / "run", *flags, **how)
    whole = train(tmp_path / "whole", *flags, **how)
    assert resumed.evaluations[-1] == whole.evaluations[-1]
    drawn = [[each["val_drawn"] for each in run.evaluations] for run in (resumed, whole)]
    assert drawn[1] == [drawn[1][0]] * 3
    assert drawn[1][0] == pytest.approx(0.5, abs=0.3)  # half of the numbers, doubled
    # Of the first batch alone: the others have other numbers.
    assert drawn[0][0] == drawn[0][1] != drawn[0][2]


def test_it_continues_on_another_number_of_processes(whole, tmp_path):
    train_tiny_gpu(tmp_path, *FLAGS, "--max_steps", "3")
    result = train_tiny_gpu(tmp_path, *FLAGS, processes=2)
    assert result.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)


def test_what_it_excludes(tmp_path, capsys):
    line = told_in_one_line(capsys, *tiny(tmp_path), *FLAGS, "--vflip", "0.5")
    assert line.startswith("--objective angle is incompatible with --vflip 0.5 (it would change")


def test_help(capsys):
    done = run_program("run_vit_training.py", *EXTENSION, "--help", "angle")
    assert done.returncode == 0
    assert "--angle_log_interval N" in done.stdout
    assert "gratings: gratings of known angles" in " ".join(done.stdout.split())


def test_self_check(tmp_path):
    words = [*tiny(tmp_path), *FLAGS, "--backend", "cuda", "--self_check"]
    done = run_program("run_vit_training.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@NEEDS_XLA
def test_compile_only(tmp_path):
    words = [
        *tiny(tmp_path),
        *FLAGS,
        *"--backend xla --compile_only --tpu_topology v5e:2x2".split(),
    ]
    done = run_program("run_vit_training.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
