"""TransformerEngine's own layers on a GPU: timm's mathematics, FP8, meta init, checkpoints."""

import copy
import shutil

import pytest
import torch
from torch import nn

from gpu_fsdp.blocks import TeBlocks
from tests.hardware.gpu.helpers import (
    LEARN,
    LEARNED_STEPS,
    need_form,
    need_fp8,
    need_te,
    need_torchao,
)
from tests.support.cli import train_tiny_gpu
from tests.support.te import shaken

pytestmark = pytest.mark.gpu

BF16 = ("--precision", "bf16")
TE = (*BF16, "--block", "te")


def with_te_blocks(model):
    replaced = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        replaced.blocks[index] = TeBlocks("none").replace(block, "cuda")
    return replaced


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True}, {"qkv_bias": False, "proj_bias": False}]
)
def test_same_logits_as_timm(options):
    """In bf16, TransformerEngine is as near to fp32 as timm is, with the same GELU on both."""
    need_te()
    exact = shaken(**options).cuda()
    for block in exact.blocks:
        block.mlp.act = nn.GELU(approximate="tanh")
    timm = copy.deepcopy(exact).bfloat16()
    te = with_te_blocks(timm)
    images = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(2)).cuda()
    with torch.inference_mode():
        expected = exact(images)
        timm_error = (timm(images.bfloat16()).float() - expected).abs().mean()
        te_error = (te(images.bfloat16()).float() - expected).abs().mean()
    assert 0 < te_error < 2 * timm_error


@pytest.mark.parametrize("form", ["fsdp2", "megatron"])
def test_trains_like_timms_blocks(form, tmp_path):
    need_te()
    need_form(form)
    timm = train_tiny_gpu(tmp_path / "timm", "--fsdp", form, *BF16)
    te = train_tiny_gpu(tmp_path / "te", "--fsdp", form, *TE)
    assert "te blocks" in te.run_file["backend"]
    assert te.column("loss") == pytest.approx(timm.column("loss"), rel=0.03)
    assert te.column("grad_norm") == pytest.approx(timm.column("grad_norm"), rel=0.1)


def test_meta_init_gives_the_same_weights(tmp_path):
    need_te()
    need_form("megatron")
    flags = ("--fsdp", "megatron", *TE, "--max_steps", "1")
    whole = train_tiny_gpu(tmp_path / "whole", *flags, "--no-meta_init")
    meta = train_tiny_gpu(tmp_path / "meta", *flags, "--meta_init")
    assert "meta init" in meta.run_file["backend"]
    assert meta.column("loss") == pytest.approx(whole.column("loss"), rel=1e-6)
    assert meta.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=1e-5)


def go_on(learned, folder, *flags, steps=20):
    """``learned``, trained on in ``folder``; the losses of the new steps."""
    shutil.copytree(learned.ckpt_dir, folder)
    last = LEARNED_STEPS + steps
    result = train_tiny_gpu(folder, *LEARN, "--max_steps", str(last), *flags)
    assert f"at step {LEARNED_STEPS}" in result.stdout
    return result, result.column("loss")[-steps:]


@pytest.mark.parametrize("form", ["fsdp2", "megatron"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_near_bf16(form, recipe, learned, tmp_path):
    need_fp8()
    need_form(form)
    flags = ("--fsdp", form, *TE)
    _, bf16 = go_on(learned, tmp_path / "bf16", *flags)
    result, fp8 = go_on(learned, tmp_path / "fp8", *flags, "--fp8", recipe)
    assert f"te blocks in FP8 ({recipe})" in result.run_file["backend"]
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=0.1, abs=0.02)


@pytest.mark.parametrize("form", ["fsdp2", "megatron"])
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_fp8_of_timms_blocks_near_bf16(form, recipe, learned, tmp_path):
    """By torchao, without TransformerEngine."""
    need_torchao()
    need_form(form)
    flags = ("--fsdp", form, *BF16, "--compile")
    _, bf16 = go_on(learned, tmp_path / "bf16", *flags)
    result, fp8 = go_on(learned, tmp_path / "fp8", *flags, "--fp8", recipe)
    assert f"timm blocks in FP8 ({recipe})" in result.run_file["backend"]
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=0.1, abs=0.02)


def test_checkpoint_moves_between_timm_and_te(learned, tmp_path):
    """A checkpoint of timm's blocks goes on with TransformerEngine's, and that one with timm's."""
    need_te()
    flags = ("--fsdp", "fsdp2", *BF16, "--block")
    timm, timm_losses = go_on(learned, tmp_path / "timm", *flags, "timm", steps=2)
    te, te_losses = go_on(learned, tmp_path / "te", *flags, "te", steps=1)
    assert "te blocks" in te.run_file["backend"]
    assert te_losses[0] == pytest.approx(timm_losses[0], rel=0.02, abs=0.01)
    last = ("--max_steps", str(LEARNED_STEPS + 2))
    back = train_tiny_gpu(te.ckpt_dir, *LEARN, *flags, "timm", *last)
    assert f"at step {LEARNED_STEPS + 1}" in back.stdout
    assert back.column("loss")[-1] == pytest.approx(timm_losses[1], rel=0.02, abs=0.01)
    assert back.evaluations[-1]["val_loss"] == pytest.approx(
        timm.evaluations[-1]["val_loss"], rel=0.02
    )
