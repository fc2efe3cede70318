"""``--objective siglip`` and ``clip``: against plain PyTorch with all pairs on one device, on every
form; negatives of the whole batch under accumulation; resuming; mistakes."""

import json

import pytest

from tests.support.checkpoints import tensors_of
from tests.support.cli import (
    DIGITS,
    HAS_XLA,
    TINY_MODEL,
    TINY_RUN,
    run_program,
    tiny,
    train_tiny,
    train_tiny_gpu,
    train_tiny_megatron,
)
from tests.support.marks import long
from tests.support.pairs import PAIR_FLAGS, SOURCE
from tests.support.usage_error import told_in_one_line

CLIP = ["--objective", "clip", "--text_model", "clip_base"]
LOCKED = "--lock_image --projection_dim 12 --logit_scale_init 20".split()


def plain(*flags):
    """What plain PyTorch computes."""
    shared = ["--data_dir", str(DIGITS), *TINY_MODEL, *TINY_RUN, *PAIR_FLAGS, *flags]
    done = run_program("-m", "tests.references.plain_image_text", *shared)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def siglip():
    return plain()


@pytest.fixture(scope="module")
def clip():
    return plain(*CLIP)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    """A finished run in two processes, with dropout, that saves a checkpoint on the way."""
    flags = "--ckpt_step_interval 3 --grad_accum_steps 2 --drop_path_rate 0.2".split()
    return train_tiny_gpu(tmp_path_factory.mktemp("pairs"), *PAIR_FLAGS, *flags, processes=2)


def assert_same(result, expected):
    for name in ("loss", "grad_norm", "batch_image_to_text_r1", "batch_text_to_image_r1"):
        assert result.column(name) == pytest.approx(expected[name], rel=2e-5)
    assert "Involuntary full rematerialization" not in result.stderr
    assert "new compilation" not in result.stdout


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, "--grad_accum_steps 4"),
        long(1, ""),
        long(4, "--mesh_dcn 2 --mesh_fsdp 2"),
    ],
)
def test_siglip_on_gpus(processes, flags, siglip, tmp_path):
    result = train_tiny_gpu(tmp_path, *PAIR_FLAGS, *flags.split(), processes=processes)
    assert_same(result, siglip)
    assert "16 of 16 texts compared at a time" in result.stdout
    assert ("at the cost of one more forward pass" in result.stdout) == ("accum" in flags)
    first = result.records[0]
    assert first["logit_scale"] == pytest.approx(10)
    assert first["logit_bias"] == pytest.approx(-10)


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        (4, "--mesh_dcn 2 --mesh_fsdp 2 --grad_accum_steps 2"),
        long(1, ""),
        long(2, "--no-scan_blocks"),
        long(4, "--mesh_tensor 2"),
        long(1, "--xla_fsdp nested --grad_accum_steps 2"),
    ],
)
def test_siglip_on_xla(devices, flags, siglip, tmp_path):
    assert_same(train_tiny(tmp_path, *PAIR_FLAGS, *flags.split(), devices=devices), siglip)


@pytest.mark.long
def test_clip_on_xla(clip, tmp_path):
    assert_same(train_tiny(tmp_path, *PAIR_FLAGS, *CLIP, devices=4), clip)


def test_chunks_are_a_loop_on_xla():
    """Of four rounds and a smaller chunk: as many loops as passes, the formulas' results, and no
    compilation for other values."""
    done = run_program("-m", "tests.fakes.image_text_loss_on_xla")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [found[kind]["loops"] for kind in ("siglip", "clip")] == [2, 4]
    for each in found.values():
        assert max(each["differences"]) < 1e-6
        assert each["compiled again"] == 0


@pytest.mark.parametrize("flags", [long(""), "--grad_accum_steps 2"])
def test_clip_on_gpus(flags, clip, tmp_path):
    flags = [*PAIR_FLAGS, *CLIP, *flags.split()]
    assert_same(train_tiny_gpu(tmp_path, *flags, processes=2), clip)


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--grad_accum_steps 2"])
def test_megatron(flags, siglip, tmp_path):
    assert_same(train_tiny_megatron(tmp_path, *PAIR_FLAGS, *flags.split()), siglip)


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--grad_accum_steps 2"])
def test_clip_by_megatron(flags, clip, tmp_path):
    assert_same(train_tiny_megatron(tmp_path, *PAIR_FLAGS, *CLIP, *flags.split()), clip)


@pytest.mark.long
def test_megatron_over_two_groups(siglip, tmp_path):
    flags = [*PAIR_FLAGS, *"--mesh_dcn 2 --mesh_fsdp 2".split()]
    assert_same(train_tiny_megatron(tmp_path, *flags, processes=4), siglip)


@pytest.mark.long
def test_clip_by_nested_fsdp(clip, tmp_path):
    assert_same(train_tiny(tmp_path, *PAIR_FLAGS, *CLIP, "--xla_fsdp", "nested"), clip)


@pytest.mark.long
@pytest.mark.parametrize("locked", [LOCKED, ["--lock_text"]])
def test_a_locked_tower_on_the_other_forms(locked, tmp_path):
    """Losses are those of FSDP2, and the tower stays as it was."""
    flags = [*PAIR_FLAGS, *locked]
    expected = train_tiny_gpu(tmp_path / "fsdp2", *flags, processes=2)
    megatron = train_tiny_megatron(tmp_path / "megatron", *flags)
    nested = [train_tiny(tmp_path / "xla", *flags, "--xla_fsdp", "nested")] if HAS_XLA else []
    for result in (megatron, *nested):
        for name in ("loss", "grad_norm", "logit_scale"):
            assert result.column(name) == pytest.approx(expected.column(name), rel=1e-4)
    states = [tensors_of(each.ckpt_dir / "step_6") for each in (expected, megatron)]
    prefix = "model.blocks." if locked == LOCKED else "model.text_blocks."
    kept = [name for name in states[0] if name.startswith(prefix)]
    assert kept
    assert all(states[0][name].equal(states[1][name]) for name in kept)


@pytest.mark.long
def test_megatron_and_fsdp2_continue_each_other(tmp_path):
    flags = [*PAIR_FLAGS, *"--grad_accum_steps 2 --ckpt_step_interval 3".split()]
    first = train_tiny_gpu(tmp_path / "fsdp2", *flags, processes=2)
    other = train_tiny_megatron(tmp_path / "megatron", *flags)
    for start, train in ((first, train_tiny_megatron), (other, train_tiny_gpu)):
        folder = tmp_path / f"from_{start.ckpt_dir.name}"
        result = train(folder, *flags, "--resume", str(start.ckpt_dir / "step_3"), processes=2)
        assert result.column("loss") == pytest.approx(first.column("loss")[3:], rel=2e-5)


@pytest.mark.long
def test_locked_image_tower_is_not_changed(tmp_path):
    """On both backends alike."""
    flags = [*PAIR_FLAGS, *LOCKED]
    gpu = train_tiny_gpu(tmp_path / "gpu", *flags, processes=2)
    xla = train_tiny(tmp_path / "xla", *flags, devices=2)
    assert xla.column("loss") == pytest.approx(gpu.column("loss"), rel=1e-4)
    assert "image tower locked" in gpu.stdout


# -- resuming ---------------------------------------------------------------------------


def assert_resumes(whole, train, folder):
    """From step 3 on, bit for bit."""
    flags = ["--resume", str(whole.ckpt_dir / "step_3")]
    resumed = train(folder, *flags)
    for name in ("loss", "grad_norm", "logit_scale"):
        assert resumed.column(name) == whole.column(name)[3:]


def test_resumes_on_gpus(on_gpu, tmp_path):
    flags = [*PAIR_FLAGS, *"--grad_accum_steps 2 --drop_path_rate 0.2".split()]
    assert_resumes(
        on_gpu, lambda folder, *more: train_tiny_gpu(folder, *flags, *more, processes=2), tmp_path
    )


@pytest.mark.long
def test_resumes_on_xla_and_continues_the_other(on_gpu, tmp_path):
    flags = [*PAIR_FLAGS, *"--grad_accum_steps 2 --drop_path_rate 0.2".split()]
    saves = ["--ckpt_step_interval", "3"]
    whole = train_tiny(tmp_path / "whole", *flags, *saves, devices=2)

    def train(folder, *more):
        return train_tiny(folder, *flags, *more, devices=2)

    assert_resumes(whole, train, tmp_path / "resumed")
    # Of other forms the masks of drop path differ, but not by much.
    other = train(tmp_path / "other", "--resume", str(on_gpu.ckpt_dir / "step_3"))
    assert other.column("loss") == pytest.approx(on_gpu.column("loss")[3:], rel=0.1)


# -- tools ------------------------------------------------------------------------------


@pytest.mark.long
def test_self_check(tmp_path):
    flags = [*PAIR_FLAGS, "--self_check", "--cpu_devices", "4", "--grad_accum_steps", "2"]
    done = run_program("run_vit_training.py", *tiny(tmp_path), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "self check passed" in done.stdout


# -- mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--batch_size 1", "compares the pairs of a batch: use --batch_size 2 or more"),
        ("--data_source folder --aug_repeats 2", "is incompatible with --aug_repeats 2"),
        ("--data_source folder --save_bad_step", "is incompatible with --save_bad_step"),
        ("--mixup 0.2", "--mixup 0.2 requires --objective classify"),
        (
            "--teacher vit_10b --teacher_weights w.pt",
            "--teacher vit_10b requires --objective classify or",
        ),
        ("--smoothing 0.1", "--smoothing 0.1 requires --objective classify"),
        ("--mesh_domain 2", "--mesh_domain 2 requires --objective classify"),
        (
            "--native_resolution --model timm/vit_small_patch16_rope_mixed_224",
            "does not support native resolution",
        ),
        (
            "--data_source folder --buckets 12x20",
            "--buckets must include the model's own size, 16x16",
        ),
        ("--text_heads 3", "--text_width 16 is not a multiple of --text_heads 3"),
        ("--lock_image --lock_text", "--lock_image is incompatible with --lock_text"),
        ("--logit_bias_init 0 --objective clip", "requires --objective siglip, not clip"),
        ("--text_depth 3 --objective classify", "requires --objective siglip or --objective clip"),
        ("--mask_ratio 0.5", "--mask_ratio 0.5 requires --objective mae"),
        ("--predict images", "--predict images requires --objective classify"),
    ],
)
def test_mistakes(flags, text, capsys, tmp_path):
    given = [flag for flag in PAIR_FLAGS if flag not in SOURCE]
    source = [] if "--data_source" in flags else ["--fake_data"]
    line = told_in_one_line(capsys, *tiny(tmp_path / "run"), *source, *given, *flags.split())
    assert text in line
    assert not (tmp_path / "run").exists()


def test_a_source_without_texts(capsys, tmp_path):
    given = [flag for flag in PAIR_FLAGS if flag not in SOURCE]
    line = told_in_one_line(capsys, *tiny(tmp_path / "run"), *given)
    assert "--objective siglip and clip require images with texts: use --labels FILE" in line
