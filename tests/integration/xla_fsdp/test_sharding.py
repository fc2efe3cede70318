"""One model, one seed, one data order: however it is sharded, the same training."""

import json

import pytest

from tests.references.plain_training import train_plain
from tests.support.cli import TINY_MODEL, run_program, tiny, train_tiny
from tests.support.curves import assert_same_training
from tests.support.marks import long
from tools.compile_only.hlo import parse_module


@pytest.mark.parametrize("devices", [long(2), 4])
def test_spmd_on_several_devices(devices, tiny_on_xla, tmp_path):
    result = train_tiny(tmp_path, devices=devices)
    assert result.run_file["devices"] == devices
    assert_same_training(result, tiny_on_xla)


@pytest.mark.parametrize(
    "flags",
    [
        "--xla_fsdp nested",
        "--flatten_parameters --shard_on_cpu",
        long("--no_reshard_after_forward"),
        long("--xla_fsdp nested --run_without_fsdp"),
        long("--no-scan_blocks"),
        long("--no-scan_blocks --no_grad_ckpt"),
        long("--mark_step_after_forward"),
        long("--mark_step_every_n_blocks 1 --mark_step_after_forward --xla_fsdp nested"),
        long("--mark_step_every_n_blocks 1"),
    ],
)
def test_form_on_one_device(flags, tiny_on_xla, tmp_path):
    result = train_tiny(tmp_path, *flags.split())
    if "run_without" in flags:
        expected = "one process per device"
    elif any(flag in flags for flag in ("nested", "flatten", "no_reshard")):
        expected = "nested FSDP"
    else:
        expected = "SPMD FSDP"
    assert expected in result.run_file["backend"]
    assert_same_training(result, tiny_on_xla)


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        (4, "--no_reshard_after_forward --grad_accum_steps 2 --model_ema"),
        long(2, "--xla_fsdp nested --clip_grad_norm 0"),
        long(4, "--flatten_parameters --precision bf16"),
        long(4, "--xla_fsdp nested --run_without_fsdp"),
    ],
)
def test_no_sum_of_nested_fsdp_pins_its_layout(devices, flags):
    """XLA refuses a program in which some do: "a mix of layout constrained and unconstrained"."""
    words = [*TINY_MODEL, "--model", "vit_10b", "--batch_size", "16", *flags.split()]
    done = run_program("tests/fakes/traced_graphs.py", str(devices), *words, warm=False)
    assert done.returncode == 0, done.stderr
    graphs = json.loads(done.stdout)["hlo"]
    sums = [line for hlo in graphs for line in hlo.splitlines() if " all-reduce(" in line]
    assert len(sums) >= 2  # of the loss and of the gradients' norm
    assert not any("constrain_layout=true" in line for line in sums), sums


@pytest.mark.parametrize(
    "flags",
    [
        long("--run_without_fsdp"),
        "--run_without_fsdp --no-scan_blocks",
        long("--no-scan_blocks"),
        "--mark_step_every_n_blocks 1 --no_grad_ckpt",
        "--grad_accum_steps 4",
        long("--grad_ckpt selective --mesh_tensor 2"),
    ],
)
def test_form_on_two_devices(flags, tiny_on_xla, tmp_path):
    assert_same_training(train_tiny(tmp_path, *flags.split(), devices=2), tiny_on_xla)


@pytest.mark.long
def test_attention_pooling_keeps_images_sharded(tmp_path):
    """No device gets queries, keys or values, (images, heads, tokens, width), of all images."""
    flags = "--global_pool map --max_steps 1 --eval_batches 0 --cpu_devices 4".split()
    command = [str(tmp_path / "hlo"), *tiny(tmp_path / "run"), *flags]
    done = run_program("-m", "tests.fakes.dumped_hlo", *command, warm=False)
    assert done.returncode == 0, done.stderr
    gathered = {
        each.shape.partition("{")[0]
        for path in (tmp_path / "hlo").glob("*after_optimizations.txt")
        for instructions in parse_module(path.read_text())[0].values()
        for each in instructions
        if each.opcode == "all-gather"
    }
    assert "f32[96,32]" in gathered  # a weight
    assert not [shape for shape in gathered if shape.count(",") > 2]


def test_same_as_plain_pytorch_and_timm(tiny_on_xla, tmp_path):
    """Losses and gradient norms, clipping active, of timm's model trained by PyTorch alone."""
    clipped = train_tiny(tmp_path, "--clip_grad_norm", "0.1", devices=2)
    assert min(clipped.column("grad_norm")) > 0.1
    for result, max_norm in ((tiny_on_xla, 1.0), (clipped, 0.1)):
        reference = train_plain(max_norm)
        assert result.column("loss") == pytest.approx(reference["loss"], rel=1e-5)
        assert result.column("grad_norm") == pytest.approx(reference["grad_norm"], rel=1e-4)
        (evaluation,) = result.evaluations
        assert evaluation["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)
        assert evaluation["val_top1"] == pytest.approx(reference["val_top1"], abs=0.3)  # an image


def test_no_clipping(tiny_on_xla, tmp_path):
    result = train_tiny(tmp_path, "--clip_grad_norm", "0", "--max_steps", "3")
    # Before any clipping could matter the norms agree; AdamW forgives later differences.
    assert result.column("grad_norm")[:2] == pytest.approx(tiny_on_xla.column("grad_norm")[:2])


@pytest.mark.parametrize("form", ["spmd", long("nested")])
def test_bf16_computes_in_bf16_near_fp32(form, tiny_on_xla, tiny_on_xla_in_bf16, tmp_path):
    result = tiny_on_xla_in_bf16
    if form == "nested":
        result = train_tiny(tmp_path, "--precision", "bf16", "--xla_fsdp", form)
    assert result.column("loss") != pytest.approx(tiny_on_xla.column("loss"), rel=1e-6)
    assert result.column("loss") == pytest.approx(tiny_on_xla.column("loss"), rel=0.03)


def test_state_is_sharded_evenly():
    """Bytes that really lie on the first of 4 devices, after steps, against one device's."""
    measured = {}
    for devices in ("1", "4"):
        done = run_program("-m", "tests.fakes.measure_state", devices, *TINY_MODEL)
        assert done.returncode == 0, done.stderr
        measured[devices] = json.loads(done.stdout.splitlines()[-1])
    for name in ("parameters", "optimizer"):
        whole, part = measured["1"]["bytes"][name], measured["4"]["bytes"][name]
        assert 0.25 * whole <= part <= 0.27 * whole
    # What the program tells of itself is what was measured.
    for report in measured.values():
        assert report["told"] == report["bytes"]
