"""--mesh_tensor for timm's other blocks than the plain one: Eva's, gated MLPs, post-norm."""

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.cli import run_program, tiny, train_tiny
from tests.support.curves import assert_same_curves, assert_same_training
from tests.support.divided_blocks import DROPOUT, MODELS, PACKED, SPLIT, flags_of
from tests.support.marks import long, spread
from tools.compile_only.hlo import group_of, parse_module


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("one_device"), *flags_of(PACKED))


def assert_no_replicas(result):
    # XLA's warning where it replicates a tensor to shard it otherwise.
    assert "Involuntary full rematerialization" not in result.stderr


def test_same_training(one_device, tmp_path):
    flags = flags_of(PACKED)
    result = train_tiny(tmp_path, *flags, "--mesh_tensor", "2", devices=4)
    assert "mesh fsdp 2 x tensor 2" in result.run_file["backend"]
    assert_same_training(result, one_device)
    assert_no_replicas(result)


@pytest.mark.long
def test_checkpoint_moves_between_meshes(one_device, tmp_path):
    """Both halves of a packed SwiGLU, whose biases' parts "fsdp" shards, of stacked and of single
    blocks."""
    flags = flags_of(PACKED)
    train_tiny(tmp_path, *flags, "--mesh_tensor", "2", "--max_steps", "2", devices=4)
    unrolled = "--mesh_dcn 2 --mesh_tensor 2 --no-scan_blocks --max_steps 4".split()
    train_tiny(tmp_path, *flags, *unrolled, devices=4)
    for step, sizes in ((2, [(96, 24)] * 8), (4, [(96, 48)] * 4)):
        read = dcp.FileSystemReader(tmp_path / f"step_{step}").read_metadata().state_dict_metadata
        found = read["model.blocks.1.mlp.fc1.weight"]
        assert found.size == (384, 48)
        assert [tuple(chunk.sizes) for chunk in found.chunks] == sizes
    assert_same_curves(train_tiny(tmp_path, *flags, devices=2), one_device, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("model", "form"), spread(MODELS, ["scanned", "no-scan_blocks"], every=2))
def test_every_block(model, form, tmp_path):
    flags = flags_of(model)
    plain = train_tiny(tmp_path / "plain", *flags)
    given = ["--mesh_tensor", "2", *([f"--{form}"] if form != "scanned" else [])]
    result = train_tiny(tmp_path / "sharded", *flags, *given, devices=4)
    assert_same_training(result, plain)
    assert_no_replicas(result)


@pytest.mark.long
@pytest.mark.parametrize("how", ["selective", "none", "none --no-scan_blocks"])
@pytest.mark.parametrize("model", [PACKED, SPLIT])
def test_policies_with_dropout(model, how, tmp_path):
    """Masks are those of one device, too; and in bf16 training is near it."""
    flags = [*flags_of(model), *DROPOUT, "--max_steps", "3", "--grad_ckpt", *how.split()]
    if "none" in how:
        flags += ["--grad_accum_steps", "2"]
    plain = train_tiny(tmp_path / "plain", *flags)
    flags += ["--mesh_tensor", "2"]
    sharded = train_tiny(tmp_path / "sharded", *flags, devices=2)
    lower = train_tiny(tmp_path / "bf16", *flags, "--precision", "bf16", devices=2)
    assert_same_curves(sharded, plain, rel=1e-5)
    assert lower.column("loss") != pytest.approx(plain.column("loss"), rel=1e-6)
    assert lower.column("loss") == pytest.approx(plain.column("loss"), rel=0.03)


@pytest.mark.parametrize("form", ["whole", long("flash")])
def test_kernels(form, one_device, tmp_path):
    """Rotated queries and keys, computed by each device for its own heads."""
    given = ["--mesh_tensor", "2", "--attention", form, "--max_steps", "3"]
    program = "tests.fakes.kernels_on_cpu"
    result = train_tiny(tmp_path, *flags_of(PACKED), *given, devices=2, program=program)
    for name in ("loss", "grad_norm"):
        assert result.column(name) == pytest.approx(one_device.column(name)[:3], rel=1e-5)


@pytest.mark.long
def test_no_weight_is_gathered_over_tensor(tmp_path):
    """Between devices that share images go tokens alone; weights go between those that do not."""
    flags = [*flags_of(PACKED), "--mesh_tensor", "2", "--max_steps", "1", "--eval_batches", "0"]
    command = [*tiny(tmp_path / "run"), *flags, "--cpu_devices", "4"]
    done = run_program("-m", "tests.fakes.dumped_hlo", str(tmp_path / "hlo"), *command, warm=False)
    assert done.returncode == 0, done.stderr
    over = {"fsdp": set(), "tensor": set()}
    for path in (tmp_path / "hlo").glob("*after_optimizations.txt"):
        for instructions in parse_module(path.read_text())[0].values():
            for each in instructions:
                if each.opcode == "all-gather":
                    axis = {(0, 1): "tensor", (0, 2): "fsdp"}.get(tuple(group_of(each, 4)))
                    over.get(axis, set()).add(each.shape.partition("{")[0])
    assert "f32[2,96,48]" in over["fsdp"]  # of both halves of the packed SwiGLU, half
    assert {sizes.partition(",")[2] for sizes in over["tensor"]} == {"18,48]"}  # of 17 tokens
