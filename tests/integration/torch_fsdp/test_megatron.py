"""The real megatron_fsdp package on the CPU: the same training as FSDP2 and plain PyTorch."""

import re
import shutil

import pytest
import torch

from gpu_fsdp import resolve_gpu
from tests.fakes.filled import filled
from tests.references.plain_checkpoint import convert
from tests.references.plain_training import train_plain
from tests.support.cli import TINY_MODEL, run_program, tiny, train_tiny_gpu, train_tiny_megatron
from tests.support.curves import assert_same_curves, assert_same_training
from tests.support.marks import long
from tests.support.resolved import on_gpus
from tests.support.resuming import DROPOUT, EPOCHS_OF_5, assert_resumes_at_step_7
from torch_fsdp.devices import Cuda


@pytest.mark.parametrize(
    ("processes", "flags", "told"),
    [
        (1, "", "Megatron-FSDP ZeRO-3, one unit per block, fp32 weights, mesh"),
        long(2, "--zero_dp_strategy no_shard --no-overlap_grad_reduce", "no sharding"),
        (2, "--zero_dp_strategy 1 --no-overlap_param_gather --no-overlap_grad_reduce", "ZeRO-1"),
        (2, "--no_reshard_after_forward --no_grad_ckpt", "ZeRO-2"),
        long(2, "--zero_dp_strategy 3 --meta_init", "fp32 weights, meta init"),
        long(2, "--dp_outer 2 --zero_dp_strategy 2", "mesh dcn 2"),
        long(4, "--dp_outer 2 --outer_dp_sharding_strategy optim", "state also sharded over dcn"),
        long(4, "--dp_outer 2 --meta_init", "mesh dcn 2 x fsdp 2"),
        # Accumulating over micro-batches equals the large batch, too.
        long(2, "--zero_dp_strategy 1 --no-overlap_grad_reduce --grad_accum_steps 2", "ZeRO-1"),
        long(2, "--grad_accum_steps 2", "ZeRO-3"),
        *(
            long(*case)
            for case in (
                (2, "--dp_outer 2 --zero_dp_strategy 2 --grad_accum_steps 2", "dcn 2"),
                (
                    4,
                    "--dp_outer 2 --outer_dp_sharding_strategy 1 --grad_accum_steps 2",
                    "also sharded over dcn",
                ),
            )
        ),
    ],
)
def test_form(processes, flags, told, tiny_on_gpu, tmp_path):
    result = train_tiny_megatron(tmp_path, *flags.split(), processes=processes)
    assert told in result.run_file["backend"]
    assert_same_training(result, tiny_on_gpu)


@pytest.mark.parametrize("fsdp", [long("fsdp2"), "megatron"])
def test_clipped_like_plain_pytorch(fsdp, tmp_path):
    reference = train_plain(0.1)
    result = train_tiny_gpu(tmp_path, "--fsdp", fsdp, "--clip_grad_norm", "0.1", processes=2)
    assert min(result.column("grad_norm")) > 0.1
    assert result.column("loss") == pytest.approx(reference["loss"], rel=1e-5)
    assert result.column("grad_norm") == pytest.approx(reference["grad_norm"], rel=1e-5)
    (evaluation,) = result.evaluations
    assert evaluation["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        long(2, "--fsdp megatron"),
        (2, "--fsdp megatron --meta_init"),
        long(2, "--fsdp fsdp2"),
        long(2, "--fsdp megatron --zero_dp_strategy 0"),
        long(2, "--fsdp megatron --precision bf16"),
        # A width for which parts would begin inside rows of another parameter.
        (2, "--fsdp megatron --image_size 24 --embed_dim 140 --num_classes 70 --reg_tokens 4"),
        # Heads of widths without a common factor.
        long(
            3,
            "--batch_size 9 --fsdp megatron --objective dino --class_token --local_crop_size 8 "
            "--koleo_group 3 --dino_head_hidden 39 --dino_head_bottleneck 25 --dino_prototypes 70 "
            "--ibot_prototypes 31",
        ),
    ],
)
def test_weights_after_sharding_are_those_before(processes, flags, tmp_path):
    flags = [*flags.split(), "--backend", "cuda", "--ckpt_dir", str(tmp_path)]
    done = run_program("-m", "tests.fakes.save_initial", *flags, processes=processes)
    assert done.returncode == 0, done.stderr
    state = convert(tmp_path / "initial", tmp_path / "plain.pt")
    config = on_gpus([*TINY_MODEL, *flags, "--fsdp", "fsdp2"]).model
    for name, parameter in filled(config).named_parameters():
        assert torch.equal(state["model"][name], parameter), name
        entry = state["optimizer"]["state"][name]
        assert entry["step"] == 0
        assert not entry["exp_avg"].any()
        assert not entry["exp_avg_sq"].any()


@pytest.mark.parametrize(("flag", "width"), [long("", 4), ("--no_preserve_fp32_weights", 2)])
def test_bf16_is_near_fp32(flag, width, tiny_on_gpu, tmp_path):
    flags = f"--precision bf16 --reduce_dtype bf16 {flag}".split()
    result = train_tiny_megatron(tmp_path, *flags)
    assert result.column("loss") != pytest.approx(tiny_on_gpu.column("loss"), rel=1e-6)
    assert result.column("loss") == pytest.approx(tiny_on_gpu.column("loss"), rel=0.03)
    assert result.column("grad_norm") == pytest.approx(tiny_on_gpu.column("grad_norm"), rel=0.05)
    whole = tiny_on_gpu.run_file["state_bytes_per_device"]["parameters"]
    size = result.run_file["state_bytes_per_device"]["parameters"]
    assert size == pytest.approx(width / 4 * whole / 2, rel=0.1)


@pytest.mark.long
def test_evaluation_between_steps(tiny_on_gpu, tmp_path):
    result = train_tiny_megatron(tmp_path, "--test_step_interval", "2", "--ckpt_step_interval", "3")
    assert [record["step"] for record in result.evaluations] == [2, 4, 6]
    assert result.column("loss") == pytest.approx(tiny_on_gpu.column("loss"), rel=1e-5)


@pytest.mark.long
def test_mid_epoch_resume_is_exact(tmp_path):
    flags = [*EPOCHS_OF_5, *DROPOUT, "--max_steps", "9"]
    whole, resumed = assert_resumes_at_step_7(train_tiny_megatron, tmp_path, *flags)
    assert "at step 7, epoch 2" in resumed.stdout
    assert resumed.evaluations[-1] == whole.evaluations[-1]


@pytest.mark.long
def test_checkpoint_moves_between_forms(tiny_on_gpu, tmp_path):
    """HSDP with a sharded outer dimension, FSDP2 in 3 processes, ZeRO-1: no loss changes."""
    flags = ["--batch_size", "48", "--max_steps"]
    reference = train_tiny_gpu(tmp_path / "reference", *flags, "6")
    run = tmp_path / "run"
    train_tiny_megatron(
        run, *flags, "2", "--dp_outer", "2", "--outer_dp_sharding_strategy", "1", processes=4
    )
    train_tiny_gpu(run, *flags, "4", processes=3)
    moved = train_tiny_megatron(run, *flags, "6", "--zero_dp_strategy", "1")
    assert_same_curves(moved, reference, rel=1e-5)
    evaluated = shutil.copytree(run, tmp_path / "evaluated")
    again = train_tiny_megatron(evaluated, *flags, "6", "--zero_dp_strategy", "2")
    assert again.evaluations[-1]["val_loss"] == pytest.approx(
        moved.evaluations[-1]["val_loss"], rel=1e-6
    )


def test_a_mistake_found_before_there_is_a_model(tiny_on_gpu, tmp_path):
    run = shutil.copytree(tiny_on_gpu.ckpt_dir, tmp_path / "run")
    shard = next((run / "step_6").glob("*.distcp"))
    *rest, last = shard.read_bytes()
    shard.write_bytes(bytes([*rest, last ^ 1]))
    flags = ["--backend", "cuda", "--fsdp", "megatron", "--resume", str(run / "step_6")]
    done = run_program("run_vit_training.py", *tiny(tmp_path / "new"), *flags)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{run / 'step_6'} is damaged" in line


@pytest.fixture
def gpu(monkeypatch):
    """As if this host had one H200."""
    monkeypatch.setattr(Cuda, "count", lambda self: 1)
    monkeypatch.setattr(Cuda, "name", "NVIDIA H200")
    monkeypatch.setattr(Cuda, "lacks", lambda self, precision: None)
    monkeypatch.setattr(resolve_gpu, "check_megatron_runs_here", lambda: None)
    return monkeypatch


SMALL, LARGE = "--model vit_small_patch16_224", "--model vit_large_patch16_224"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{LARGE} --batch_size 256", "megatron"),  # as measured: 213 ms, the host has 79
        (f"{LARGE} --batch_size 256 --grad_accum_steps 2", "fsdp2"),
        (f"{LARGE} --batch_size 256 --forward_prefetch 2", "fsdp2"),
        (f"{LARGE} --batch_size 256 --cpu_offload", "fsdp2"),
        (f"{LARGE} --batch_size 256 --precision fp16", "fsdp2"),
        (f"{LARGE} --batch_size 256 --objective dino", "fsdp2"),
        (f"{LARGE} --batch_size 256 --fsdp fsdp2", "fsdp2"),
        (f"{SMALL} --batch_size 128", "fsdp2"),
        (f"{SMALL} --batch_size 128 --fsdp megatron", "megatron"),
        (f"{SMALL} --batch_size 128 --zero_dp_strategy optim", "megatron"),
        (f"{SMALL} --batch_size 128 --no-meta_init", "megatron"),
        (f"{SMALL} --batch_size 128 --zero_dp_strategy 2 --no-overlap_param_gather", "megatron"),
        ("--batch_size 4", "fsdp2"),
        ("--batch_size 64", "megatron"),  # vit_10b
    ],
)
def test_form_of_auto(flags, expected, gpu):
    run = on_gpus(f"--backend cuda --precision bf16 {flags}")
    assert run.backend_config.fsdp == expected
    if run.why:
        (pass_ms, host_ms) = map(int, re.findall("[0-9]+(?= ms)|(?<=host )[0-9]+", run.why["fsdp"]))
        assert pass_ms > 2 * host_ms


def test_the_expected_pass_is_the_measured_one(gpu):
    """0.2125 s, with Megatron-FSDP and torch.compile (docs/evidence/benchmarks.md)."""
    why = on_gpus(f"--backend cuda --precision bf16 {LARGE} --batch_size 256").why["fsdp"]
    (milliseconds,) = re.findall("takes ([0-9]+) ms", why)
    assert int(milliseconds) == pytest.approx(212.5, rel=0.03)


def test_a_gpu_of_unknown_speed_gets_fsdp2(gpu):
    gpu.setattr(Cuda, "name", "NVIDIA X1")
    run = on_gpus(f"--backend cuda --precision bf16 {LARGE} --batch_size 256")
    assert run.backend_config.fsdp == "fsdp2"
