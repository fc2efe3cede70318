"""Flags of small self-distillation runs, and how their checkpoints are compared."""

import pytest

from tests.references.plain_checkpoint import convert

HEADS = "--dino_prototypes 48 --ibot_prototypes 32 --dino_head_hidden 24 --dino_head_bottleneck 16"
CROPS = "--local_crops 3 --local_crop_size 8 --koleo_group 4"
SCHEDULES = (
    "--freeze_last_layer_epochs 0.02 --warmup_teacher_temp_epochs 0.05 --teacher_momentum 0.9 "
    "--weight_decay 0.04 --weight_decay_end 4 --lr 1e-3"
)
SMALL = f"--class_token {HEADS} {CROPS} {SCHEDULES}".split()
DINO = ["--objective", "dino", *SMALL]
WITHOUT_CLASS_TOKEN = [word for word in DINO if word != "--class_token"]


def assert_same(result, expected, rounding=1e-5):
    for name, values in expected[0].items():
        factor = 2 if name == "grad_norm" else 1  # norms of 1,000, of sums that cancel
        assert result.column(name) == pytest.approx(values, rel=factor * rounding), name
    assert "Involuntary full rematerialization" not in result.stderr


def weights_of(ckpt_dir, kind="model", step=6):
    return convert(ckpt_dir / f"step_{step}", ckpt_dir / f"{kind}.pt")[kind]


def of_backbone(weights):
    added = ("dino_head.", "ibot_head.", "mask_token")
    return {name: values for name, values in weights.items() if not name.startswith(added)}
