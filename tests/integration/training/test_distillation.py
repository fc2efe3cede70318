"""Distillation: against DeiT's formulas in plain PyTorch, with timm's models, in real runs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file

from data.batch import micro_batches
from tests.fakes.filled import filled
from tests.references.plain_checkpoint import tiny_timm_model
from tests.references.plain_steps import train_by, warm_cosine
from tests.support.cli import TINY_MODEL, train_tiny, train_tiny_gpu
from tests.support.marks import long
from tests.support.mixing import BOTH, assert_steady, by_timm, loss_flags, timms_loss, tiny_run
from tests.support.short_runs import mistake, program
from tests.support.usage_error import told_in_one_line
from tools.self_check.plain import normalized
from training.checkpoints.format import read_metadata

IMAGES = "--image_size 32 --patch_size 8".split()
STEPS = 4


def timms_teacher():
    return timm.create_model("test_vit", img_size=32, num_classes=10)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model of timm's with answers that differ from image to image, and the flags of it."""
    torch.manual_seed(0)
    model, path = timms_teacher().eval(), tmp_path_factory.mktemp("teacher") / "weights.safetensors"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    save_file(model.state_dict(), path)
    return model, ["--teacher", "timm/test_vit", "--teacher_weights", str(path)], (0.5, 0.5)


@pytest.fixture(scope="module")
def own_teacher(tmp_path_factory):
    """A checkpoint of this program, with dropout, which a teacher must not have."""
    how = ["--pos_dropout", "0.5", "--mean", *["0.4"] * 3, "--std", *["0.3"] * 3]
    run = train_tiny_gpu(tmp_path_factory.mktemp("own"), *how, "--max_steps", "2")
    model = tiny_timm_model().eval()
    dcp.load({"model": (state := model.state_dict())}, checkpoint_id=run.ckpt_dir / "step_2")
    model.load_state_dict(state)
    return model, ["--teacher", "vit_10b", "--teacher_weights", str(run.ckpt_dir)], (0.4, 0.3)


def by_deit(config, base, student, teacher):
    """arXiv 2012.12877, equations (2) and (3)."""
    if config.distillation_type == "hard":
        taught = F.cross_entropy(student, teacher.argmax(1))
    else:
        tau = config.distillation_tau
        p, q = (teacher / tau).softmax(1), (student / tau).softmax(1)
        taught = tau**2 * (p * (p / q).log()).sum(1).mean()
    return (1 - config.distillation_alpha) * base + config.distillation_alpha * taught


def plain_steps(flags, teacher, steps, devices):
    """Losses and gradients' norms of the first steps, all in warmup, in plain PyTorch."""
    run = tiny_run(*flags, devices=devices)
    model, config, seed = filled(run.model, run.config.seed), loss_flags(run), run.config.seed
    how, passes = run.config.optimizer, run.config.data.grad_accum_steps
    taught, _, (mean, std) = teacher
    preprocessing, base = run.config.data.preprocessing, timms_loss(config)
    of_teacher = replace(preprocessing, mean=(mean,) * 3, std=(std,) * 3)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=how.weight_decay)

    def losses_of(step, batch):
        for index, part in enumerate(micro_batches(batch, 1, passes)):
            images, labels = part["image"], part["target"]
            shown, theirs = normalized(images, preprocessing), normalized(images, of_teacher)
            if config.mixes:
                mixing = labels, seed, passes * step + index
                theirs, _ = by_timm(config, devices, theirs, *mixing)
                shown, labels = by_timm(config, devices, shown, *mixing)
            with torch.no_grad():
                answers = taught(theirs)
            logits = model(shown)
            yield by_deit(config, base(logits, labels), logits, answers) / passes

    return train_by(losses_of, optimizer, run, steps, warm_cosine(how))


def assert_as_plain(result, flags, teacher, steps=STEPS, devices=1, rel=1e-4):
    plain = plain_steps(flags, teacher, steps, devices)
    for name, expected in zip(("loss", "grad_norm"), plain, strict=True):
        assert result.column(name)[:steps] == pytest.approx(expected, rel=rel)


DEFAULT_TYPE = "--distillation_type hard --distillation_alpha 0.7".split()
SOFT = "--distillation_type soft --distillation_tau 3 --distillation_alpha 0.7".split()


@pytest.mark.long
def test_soft_scanned_mixed_accumulated_and_resumed(teacher, tmp_path):
    """On two devices: an execution a pass and one for the update, the teacher sharded, not saved,
    and resumed exactly."""
    flags = [*IMAGES, *teacher[1], *SOFT, *BOTH.split(), "--grad_accum_steps", "2"]
    given = [*flags, "--max_steps", str(STEPS), "--eval_batches", "1"]
    result = train_tiny(tmp_path / "a", *given, "--ckpt_step_interval", "2", devices=2)
    assert_as_plain(result, flags, teacher, devices=2)
    assert_steady(result, executions=3)

    whole = 4 * sum(parameter.numel() for parameter in teacher[0].parameters())
    assert whole / 2 <= result.run_file["state_bytes_per_device"]["teacher"] < 0.52 * whole
    assert "MiB of teacher" in result.stdout
    saved = read_metadata(result.ckpt_dir / "step_2").state_dict_metadata
    names = {each.removeprefix("model.") for each in saved if each.startswith("model.")}
    assert names == dict(tiny_timm_model().named_parameters()).keys()

    resume = ["--resume", str(result.ckpt_dir / "step_2")]
    resumed = train_tiny(tmp_path / "b", *given, *resume, devices=2)
    for name in ("loss", "grad_norm"):
        assert resumed.column(name) == result.column(name)[2:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "form", "flags"),
    [
        (1, "--xla_fsdp nested --no_reshard_after_forward", "--bce_loss --mixup 0.8"),
        (2, "--no-scan_blocks --mesh_dcn 2", "--grad_accum_steps 2 --distillation_alpha 1"),
    ],
)
def test_hard_in_bf16_in_other_forms(devices, form, flags, teacher, tmp_path):
    given = [*IMAGES, *teacher[1], *flags.split()]
    how = ["--precision", "bf16", "--max_steps", "4", "--eval_batches", "1", *form.split()]
    result = train_tiny(tmp_path, *given, *how, devices=devices)
    assert_as_plain(result, given, teacher, steps=2, devices=devices, rel=0.02)
    assert_steady(result, executions=3 if "accum" in flags else 1)


@pytest.mark.parametrize(
    ("form", "zero", "kind"),
    [
        long("fsdp2", "2", SOFT),
        long("fsdp2", "3", SOFT),
        ("fsdp2", "3", DEFAULT_TYPE),
        long("megatron", "1", SOFT),
        long("megatron", "2", DEFAULT_TYPE),
        long("megatron", "3", SOFT),
    ],
)
def test_on_gpus_by_a_checkpoint_of_this_program(form, zero, kind, own_teacher, tmp_path):
    flags = [*own_teacher[1], *kind, "--grad_accum_steps", "2"]
    how = ["--max_steps", str(STEPS), "--eval_batches", "1", "--zero_dp_strategy", zero]
    result = train_tiny_gpu(tmp_path, "--fsdp", form, *flags, *how, processes=2)
    assert_as_plain(result, flags, own_teacher)
    whole = 4 * sum(parameter.numel() for parameter in own_teacher[0].parameters())
    assert result.run_file["state_bytes_per_device"]["teacher"] == pytest.approx(whole / 2, rel=0.1)


# -- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("{teacher} --mesh_domain 2 --cpu_devices 2", "--teacher is incompatible with"),
        ("{teacher} --teacher timm/nothing", "--teacher timm/nothing: unknown model timm/nothing"),
        ("{teacher} --num_classes 9", "{named}: head.weight has shape (10, 64) in "),
        ("{own} --num_classes 9", "--teacher vit_10b has 10 classes, the student 9: use another"),
        ("{own} --image_size 32", "--teacher vit_10b takes images of 3 x 16 x 16 (channels first"),
        (
            "{own} --teacher vit_60b",
            "--teacher vit_60b: {own_path}/step_2 was trained with --model vit_10b",
        ),
    ],
)
def test_refused(flags, told, teacher, own_teacher, capsys, tmp_path):
    own = " ".join(own_teacher[1])
    flags = flags.format(teacher=" ".join([*IMAGES, *teacher[1]]), own=own)
    given = [*TINY_MODEL, "--fake_data", "--batch_size", "8", "--ckpt_dir", tmp_path]
    line = told_in_one_line(capsys, "--backend", "xla", *given, *flags.split())
    named = "--teacher timm/test_vit"
    assert line.startswith(told.format(named=named, own_path=Path(own_teacher[1][-1])))
    assert not any(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_refused(own_teacher, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(Path(own_teacher[1][-1]) / "step_2", copy)
    file = max(copy.glob("*.distcp"), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    flags = ["--patch_size", "4", "--teacher", "vit_10b", "--teacher_weights", copy]
    assert mistake(program(tmp_path / "run", *flags)).startswith(f"{copy} is damaged (")
