"""--block te with a stand-in for TransformerEngine's layer: mapping, checkpoints, refusals."""

import copy
import ctypes
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gpu_fsdp import blocks
from gpu_fsdp.blocks import TeBlocks
from models.registry import open_model
from tests.fakes.te import STAND_IN
from tests.support.cli import TINY_MODEL, run_program, train_tiny_gpu
from tests.support.curves import assert_same_curves
from tests.support.resolved import on_gpus
from tests.support.te import SMALL, shaken
from training.errors import UsageError


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(blocks, "import_te", lambda: STAND_IN)


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True}, {"qkv_bias": False, "proj_bias": False}]
)
def test_same_logits(options, stand_in):
    timm = shaken(**options)
    replaced = copy.deepcopy(timm)
    for index, block in enumerate(timm.blocks):
        replaced.blocks[index] = TeBlocks("none").replace(block, "cpu")
    names = {TeBlocks("none").timm_name(name) for name, _ in replaced.named_parameters()}
    assert names == {name for name, _ in timm.named_parameters()}
    images = torch.randn(4, 3, 16, 16)
    assert torch.allclose(replaced(images), timm(images), atol=2e-2)
    for block in timm.blocks:  # the same GELU on both sides: only rounding is left
        block.mlp.act = nn.GELU(approximate="tanh")
    assert torch.allclose(replaced(images), timm(images), atol=1e-5)


def test_meta_block_gives_meta_layer(stand_in):
    layer = TeBlocks("none").replace(open_model("vit_10b", SMALL).build().blocks[0], "cpu")
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_names_outside_of_blocks_stay():
    timm_name = TeBlocks("none").timm_name
    assert timm_name("norm.weight") == "norm.weight"
    assert timm_name("blocks.11.layernorm_mlp.fc1_bias") == "blocks.11.mlp.fc1.bias"
    assert timm_name("blocks.0.mlp.fc1.bias") == "blocks.0.mlp.fc1.bias"


@pytest.mark.long
def test_checkpoint_moves_between_blocks(tiny_on_gpu, tmp_path):
    run = tmp_path / "run"
    te = {"processes": 2, "program": "tests.fakes.te"}
    train_tiny_gpu(run, "--max_steps", "2")
    middle = train_tiny_gpu(run, "--max_steps", "4", "--block", "te", **te)
    assert "te blocks" in middle.run_file["backend"]
    moved = train_tiny_gpu(run, "--no_grad_ckpt")
    assert_same_curves(moved, tiny_on_gpu, rel=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--meta_init", "--zero_dp_strategy 1"])
def test_with_megatron(flags, tmp_path):
    te = {"processes": 2, "program": "tests.fakes.te"}
    fsdp2 = train_tiny_gpu(tmp_path / "fsdp2", "--block", "te", **te)
    flags = f"--block te --fsdp megatron {flags}".split()
    megatron = train_tiny_gpu(tmp_path / "megatron", *flags, **te)
    assert_same_curves(megatron, fsdp2, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--block te --compile", "does not support --compile"),
        ("--block te --grad_ckpt selective", "does not support --grad_ckpt selective"),
        ("--block te --init_values 1e-5", "it uses layer scale (--init_values): use --block"),
        ("--block te --no-qkv_bias", "its --qkv_bias differs from its --proj_bias"),
        ("--block te --mlp_dropout 0.1", "it has --mlp_dropout"),
        ("--block te --fp8 delayed", "--fp8 delayed requires --precision bf16"),
        ("--block te --fp8 delayed --precision bf16", "8.9 or higher required: use --fp8 none"),
        ("--block te --fp8 mxfp8 --precision bf16", "10.0 or higher: use --fp8 delayed"),
    ],
)
def test_refused(flags, words, stand_in):
    with pytest.raises(UsageError, match=re.escape(words)):
        on_gpus([*TINY_MODEL, "--batch_size", "16", *flags.split()])


def test_slow_attention_is_refused(stand_in, monkeypatch):
    """Unless it is asked for, or there is no other: in fp32."""
    monkeypatch.setattr(STAND_IN.DotProductAttention, "fused", False)
    flags = [*TINY_MODEL, "--batch_size", "16", "--block", "te"]
    on_gpus(flags)
    with pytest.raises(UsageError, match="no fused attention for heads of width 16 in bf16 on"):
        on_gpus([*flags, "--precision", "bf16"])
    assert "NVTE_UNFUSED_ATTN" not in os.environ
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    on_gpus([*flags, "--precision", "bf16"])


LOADED = """
import os
from gpu_fsdp.blocks import prefer_cudnn_of_pytorch
prefer_cudnn_of_pytorch()
print(os.environ["CUDNN_HOME"])
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libcudnn_graph" in line})
"""


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch brought no cuDNN")
def test_cudnn_of_pytorch(monkeypatch):
    """Loaded and named to TransformerEngine before that looks for one, unless the user did."""
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    done = run_program("-c", LOADED, warm=False)
    assert done.returncode == 0, done.stderr
    home, loaded = done.stdout.splitlines()[-2:]
    assert Path(loaded).parent.samefile(Path(home) / "lib")
    assert "site-packages" in home

    monkeypatch.setenv("CUDNN_HOME", "/opt/cudnn")
    monkeypatch.setattr(ctypes, "CDLL", None)
    blocks.prefer_cudnn_of_pytorch()
    assert os.environ["CUDNN_HOME"] == "/opt/cudnn"


def test_fp8_batch(stand_in, monkeypatch):
    """197 tokens: only the number of images can make their product a multiple of 16."""
    monkeypatch.setattr(STAND_IN, "is_fp8_available", lambda return_reason: (True, ""))
    flags = "--model vit_tiny_patch16_224 --block te --precision bf16 --fp8 delayed "
    flags += "--batch_size 96 --grad_accum_steps 2"
    monkeypatch.setenv("WORLD_SIZE", "3")
    on_gpus(flags)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="24 images per pass and GPU x 197 tokens"):
        on_gpus(flags)
