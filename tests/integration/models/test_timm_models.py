"""Whole runs of timm's models by name, small, against plain PyTorch on timm's own model.

`make test-long` runs each family on a third of the forms.
"""

import pytest
import timm
import torch

import run_vit_training
from tests.fakes.filled import filled
from tests.references import plain_steps
from tests.references.plain_checkpoint import convert
from tests.support.cli import DIGITS, TINY_RUN, train_tiny, train_tiny_gpu
from tests.support.marks import long, spread
from tests.support.resolved import on_xla
from tests.support.usage_error import told_in_one_line

STEPS = 2
SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "num_heads": 2, "depth": 2}
SMALL = (
    "--image_size 16 --patch_size 4 --embed_dim 48 --num_heads 2 --num_blocks 2 --num_classes 10 "
    f"--max_steps {STEPS} --warmup_steps 0 --lr 1e-3 --scale 0.8 1"
).split()
FAMILIES = {
    "DINOv3": "vit_small_patch16_dinov3",
    "DINOv3, SwiGLU": "vit_7b_patch16_dinov3",
    "RoPE, mixed": "vit_small_patch16_rope_mixed_224",
    "EVA02": "eva02_base_patch14_224",
    "Perception Encoder": "vit_pe_core_base_patch16_224",
    "SigLIP": "vit_base_patch16_siglip_224",
    "AIMv2": "aimv2_large_patch14_224",
    "registers": "vit_base_patch14_reg4_dinov2",
}
FORMS = {
    "scanned": (1, "--cpu_devices 2"),
    "unrolled": (1, "--cpu_devices 2 --no_grad_ckpt --no-scan_blocks"),
    "tensor": (1, "--cpu_devices 4 --mesh_tensor 2"),
    "scanned, kept": (1, "--cpu_devices 2 --no_grad_ckpt"),
    "nested": (1, "--xla_fsdp nested"),
    "fsdp2": (2, "--backend cuda"),
    "simple": (2, "--backend cuda --fsdp simple --compile"),
    "megatron": (2, "--backend cuda --fsdp megatron --meta_init"),
}
CASES = [
    ("DINOv3", "scanned", "bf16"),
    long("DINOv3, SwiGLU", "tensor", "fp32"),
    long("EVA02", "fsdp2", "fp32"),
    long("RoPE, mixed", "simple", "fp32"),
]


def layer_scale(family):
    """A layer scale by which blocks count: DINOv3's own is 1e-5."""
    return {"init_values": 0.5} if "DINOv3" in family else {}


def train(folder, family, form, precision):
    processes, flags = FORMS[form]
    given = [*SMALL, "--model", f"timm/{FAMILIES[family]}", *flags.split()]
    given += [f"--{name}={value}" for name, value in layer_scale(family).items()]
    given += ["--precision", precision]
    if "cuda" not in flags:
        return train_tiny(folder, *given)
    return train_tiny_gpu(folder, *given, processes=processes)


def plain(family, precision):
    """Losses of timm's model by timm's own name and PyTorch's AdamW, under autocast for bf16."""
    name = FAMILIES[family]
    source = ["--data_dir", str(DIGITS), "--hflip", "0"]
    scale = layer_scale(family)
    flags = [f"--{key}={value}" for key, value in scale.items()]
    run = on_xla([*source, *TINY_RUN, *SMALL, "--model", f"timm/{name}", *flags])
    how = run.config.optimizer
    model = timm.create_model(name, num_classes=10, **SIZES, **scale)
    model.load_state_dict(filled(run.model, run.config.seed).state_dict(), strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, weight_decay=how.weight_decay)
    losses, _ = plain_steps.train(model, optimizer, run, STEPS, bf16=precision == "bf16")
    return losses


def assert_like_timm(folder, family, form, precision):
    result = train(folder, family, form, precision)
    rel = {"fp32": 2e-5, "bf16": 0.02}[precision]
    assert result.column("loss") == pytest.approx(plain(family, precision), rel=rel)
    return result


@pytest.mark.parametrize(("family", "form", "precision"), CASES)
def test_run_of_a_family(family, form, precision, tmp_path):
    result = assert_like_timm(tmp_path, family, form, precision)
    if form != "scanned":
        return
    # The checkpoint is timm's state dict: it loads strictly into timm's own model.
    weights = convert(result.ckpt_dir / f"step_{STEPS}", tmp_path / "plain.pt")["model"]
    timm.create_model(FAMILIES[family], num_classes=10, **SIZES).load_state_dict(weights)


@pytest.mark.long
@pytest.mark.parametrize(("family", "form"), spread(FAMILIES, FORMS, every=3))
def test_families_on_forms(family, form, tmp_path):
    in_fp32 = (family, form) in spread(FAMILIES, FORMS, every=6)
    assert_like_timm(tmp_path, family, form, "fp32" if in_fp32 else "bf16")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model timm/resnet50", "is not a supported Vision Transformer: it is timm's Res"),
        (
            "--model timm/vit_base_patch16_xp_224 --cpu_devices 2 --mesh_tensor 2",
            "--mesh_tensor 2 is incompatible with --model timm/vit_base_patch16_xp_224: its blocks",
        ),
        (
            "--model timm/vit_small_patch16_dinov3 --backend cuda --block te",
            "does not support this model: its blocks are of timm's EvaBlock, not Block",
        ),
    ],
)
def test_models_that_cannot_be(flags, words, capsys, tmp_path):
    flags = [*flags.split(), "--batch_size", "8", "--ckpt_dir", str(tmp_path / "run")]
    assert words in told_in_one_line(capsys, "--data_dir", DIGITS, *flags)


def test_list_of_models(capsys):
    def listed(pattern):
        code = run_vit_training.main(["--list_models", pattern])
        return code, capsys.readouterr().out.splitlines()

    code, lines = listed("patch16_dinov3")
    assert code == 0
    assert len(lines) >= 10
    (seven,) = [line.split() for line in lines if line.startswith("timm/vit_7b_patch16_dinov3 ")]
    with torch.device("meta"):
        model = timm.create_model("vit_7b_patch16_dinov3", num_classes=1000)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert seven[1:] == [f"{count:,}", "parameters"]
    _, (line,) = listed("vit_large_patch14_xp")
    assert line.endswith("no --mesh_tensor: its blocks are of timm's ParallelScalingBlock")
    assert listed("nothing_like_it") == (1, [])
