"""The GPU backend knows its device by one small class: another one needs nothing else."""

import importlib.util
import json

import pytest
import torch

from tests.fakes.made_up_device import Abacus
from tests.support.cli import VAL_IMAGES, Result, run_program, tiny, train_tiny_gpu
from tests.support.curves import assert_same_training
from tests.support.usage_error import told_in_one_line
from torch_fsdp import devices
from torch_fsdp.optimizers import adamw

PROGRAM = "tests.fakes.made_up_device"


def test_a_run_on_another_device(tiny_on_gpu, tmp_path):
    """FSDP2 over two processes on a device that only this test knows."""
    result = train_tiny_gpu(tmp_path, processes=2, program=PROGRAM)
    assert_same_training(result, tiny_on_gpu)
    assert "abacus: 2 Abacus 13 device(s), beads, FSDP2 ZeRO-3" in result.run_file["backend"]
    for record in result.steps.values():
        found = [record[f"memory_{name}"] for name in ("used", "peak", "limit")]
        assert found == [13, 26, 39]
    assert all(record["mfu"] > 0 for step, record in result.steps.items() if step > 1)
    for rank in (0, 1):
        calls = json.loads((tmp_path / f"calls_{rank}.json").read_text())
        assert calls.pop("put") >= 6 + VAL_IMAGES // 16
        assert calls.pop("read") >= 6 + 1
        assert calls == {f"start {rank}": 1, "TF32 False": 1, "seed": 6 + -(-VAL_IMAGES // 16)}


@pytest.mark.long
def test_its_checkpoint_is_resumed_on_the_cpu(tiny_on_gpu, tmp_path):
    """AdamW's state without the fused kernel is the same, by name and by number."""
    stop = ("--max_steps", "3")
    train_tiny_gpu(tmp_path, *stop, processes=2, program=PROGRAM)
    resumed = train_tiny_gpu(tmp_path, "--ckpt_dir", str(tmp_path))
    assert resumed.column("loss") == pytest.approx(tiny_on_gpu.column("loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "processes", "words"),
    [
        ("--precision fp16", 2, "an abacus has no fp16"),
        ("--reduce_dtype bf16 --tf32", 2, "--tf32 requires CUDA"),
        ("--fsdp megatron", 2, "--fsdp megatron requires CUDA"),
        ("", 3, "processes on this node, which has 2 x abacus: "),
    ],
)
def test_what_it_refuses(flags, processes, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(devices.KINDS, "cuda", [Abacus])
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(processes))
    given = ["--backend", "cuda", *tiny(tmp_path / "run"), *flags.split()]
    assert words in told_in_one_line(capsys, *given)


@pytest.mark.parametrize("first_is_skipped", [False, True])
def test_adamw_is_the_fused_one(first_is_skipped):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(7, 5, generator=generator)
    plain, fused = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = []
    for parameter in (plain, fused):
        optimizer = torch.optim.AdamW([parameter], weight_decay=0.1, fused=parameter is fused)
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(start),
            "exp_avg_sq": torch.zeros_like(start),
        }
        optimizers.append(optimizer)
    ours, theirs = optimizers
    for number in range(6):
        skipped = torch.tensor(float(number == 3 or (number == 0 and first_is_skipped)))
        grad = torch.randn(7, 5, generator=generator)
        if skipped:
            grad[2, 3], grad[1] = torch.nan, torch.inf
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 * number
        plain.grad, fused.grad = grad.clone(), grad.clone()
        before = [plain.detach().clone(), *(t.clone() for t in ours.state[plain].values())]
        names = ("lr", "weight_decay", "betas", "eps")
        settings = {name: ours.param_groups[0][name] for name in names}
        weights, state = plain.detach(), ours.state[plain]
        adamw([weights], [plain.grad], [state], [None], skipped, **settings)
        theirs.found_inf = skipped
        theirs.step()
        after = [plain.detach(), *ours.state[plain].values()]
        if skipped:
            assert all(map(torch.equal, before, after))
        torch.testing.assert_close(plain, fused, rtol=1e-5, atol=1e-6)
        for name, value in ours.state[plain].items():
            torch.testing.assert_close(value, theirs.state[fused][name], rtol=1e-5, atol=1e-8)


def test_a_host_without_a_tpu_trains_beside_torch_tpu(tmp_path, monkeypatch):
    """Imported, it would look for Google's metadata server in the first backward pass."""
    if importlib.util.find_spec("torch_tpu") is None:
        pytest.skip("torch_tpu is not installed here: make test-gpu-path")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    done = run_program("run_vit_training.py", *tiny(tmp_path), "--max_steps", "1", warm=False)
    assert done.returncode == 0, done.stderr
    assert "TorchTpu" not in done.stderr
    assert Result(tmp_path).run_file["backend"].startswith("CPU: ")
