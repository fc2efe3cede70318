"""What a step on the GPU backend leaves and what it must not do, on the CPU under torchrun."""

import gzip
import json

import pytest

from tests.support.cli import train_tiny_gpu
from tests.support.marks import long


@pytest.mark.parametrize("fsdp", ["fsdp2", long("megatron")])
def test_no_value_is_read_in_a_step_and_no_thread_is_left(fsdp, tmp_path):
    flags = f"--fsdp {fsdp} --grad_accum_steps 2 --fake_data --max_steps 4".split()
    program = {"processes": 2, "program": "tests.fakes.count_at_work"}
    small = "--image_size 8 --batch_size 2000".split()  # the evaluation at the end is short, too
    train_tiny_gpu(tmp_path, *flags, *small, **program)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"counts_{rank}.json").read_text())
        assert found["reads"] == [0] * 8  # 4 steps: forward and backward, then the optimizer
        assert found["threads"] == 0  # gloo's, which may abort while Python shuts down


@pytest.mark.long
def test_profile(tmp_path):
    result = train_tiny_gpu(tmp_path, "--profile", "2:3", "--max_steps", "4", processes=2)
    assert f"profile of steps 2 to 3: {tmp_path}/profile" in result.stdout
    for rank in (0, 1):
        with gzip.open(tmp_path / "profile" / f"trace_{rank}.json.gz") as file:
            events = {event.get("name", "") for event in json.load(file)["traceEvents"]}
        assert "FSDP::all_gather" in events
        assert any("AdamW.step" in name for name in events)
        assert "aten::addmm" in (tmp_path / "profile" / f"operators_{rank}.txt").read_text()


def test_profile_of_steps_that_were_not_run(tmp_path):
    result = train_tiny_gpu(tmp_path, "--profile", "5:6", "--max_steps", "2")
    assert "no profile: this run did not reach any of the steps 5 to 6" in result.stdout
    assert not (tmp_path / "profile").exists()


@pytest.mark.long
def test_weights_and_biases(tmp_path, monkeypatch):
    """Offline, as no account is at hand: the real package writes its run file."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = ["--wandb", "vit", "--max_steps"]
    train_tiny_gpu(tmp_path, *flags, "2", processes=2)
    train_tiny_gpu(tmp_path, *flags, "4")
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2  # one process of each start
    assert files[0].name == files[1].name  # the same run, resumed
    assert all(b"train/grad_norm" in file.read_bytes() for file in files)
