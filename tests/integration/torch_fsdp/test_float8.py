"""--fp8 with timm's blocks: torchao's products, emulated on the CPU, against plain PyTorch."""

import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from gpu_fsdp import blocks
from gpu_fsdp.blocks import Float8Blocks
from models.registry import open_model
from tests.fakes.filled import filled
from tests.fakes.float8_on_cpu import emulate
from tests.support.cli import TINY_MODEL, TINY_SIZES, train_tiny_gpu
from tests.support.marks import long
from tests.support.resolved import on_gpus
from torch_fsdp.devices import Cpu
from training.errors import UsageError

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALL = {**TINY_SIZES, "depth": 1, "num_classes": 10}


def rounded(x, dtype, rows):
    """``x`` in FP8 and back, with a scale a row, a power of 2, or one for all: fills the range."""
    most = x.abs().amax(-1, keepdim=True) if rows else x.abs().amax()
    scale = torch.finfo(dtype).max / most.double()
    if rows:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    scale = scale.float()
    return (x.float() * scale).to(dtype).float() / scale


class Products(torch.autograd.Function):
    """x w' and its gradients, each product of operands rounded along what it sums over."""

    @staticmethod
    def forward(ctx, x, w, rows):
        ctx.save_for_backward(x, w)
        ctx.rows = rows
        return rounded(x, E4M3, rows) @ rounded(w, E4M3, rows).T

    @staticmethod
    def backward(ctx, grad):
        (x, w), rows = ctx.saved_tensors, ctx.rows
        of_grad = E4M3 if rows else E5M2
        grad_x = rounded(grad, of_grad, rows) @ rounded(w.T, E4M3, rows).T
        grad_w = rounded(grad.T, of_grad, rows) @ rounded(x.T, E4M3, rows).T
        return grad_x, grad_w, None


@needs_torchao
@pytest.mark.parametrize("fp8", ["current", "rowwise"])
def test_products_and_gradients(fp8, monkeypatch):
    """Of each Linear of a block: against products of operands that are rounded here."""
    monkeypatch.setattr(blocks, "config_of", blocks.config_of)  # put back afterwards
    emulate()
    block = filled(open_model("vit_10b", SMALL)).blocks[0]
    names = [name for name, _ in block.named_parameters()]
    generator = torch.Generator().manual_seed(1)
    block = Float8Blocks(fp8).replace(block, "cpu")
    assert [name for name, _ in block.named_parameters()] == names
    for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        linear = block.get_submodule(name)
        with torch.no_grad():
            linear.bias.normal_(generator=generator)
        width = linear.in_features
        # Rows of different sizes, so that a scale for each row is another one.
        x = torch.randn(48, width, generator=generator) * torch.logspace(-2, 2, 48)[:, None]
        x.requires_grad_()
        grad = torch.randn(48, linear.out_features, generator=generator)
        found = linear(x)
        expected = Products.apply(x, linear.weight, fp8 == "rowwise") + linear.bias
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        plain = F.linear(x, linear.weight, linear.bias)
        assert not torch.allclose(found, plain, rtol=1e-3, atol=1e-3)
        inputs = (x, linear.weight)
        for ours, reference in zip(
            torch.autograd.grad(found, inputs, grad),
            torch.autograd.grad(expected, inputs, grad),
            strict=True,
        ):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-3)


BF16 = ("--precision", "bf16")
PROGRAM = "tests.fakes.float8_on_cpu"


@needs_torchao
@pytest.mark.parametrize(
    ("fp8", "flags"),
    [
        ("rowwise", "--grad_ckpt selective"),
        ("current", "--fsdp megatron"),
        long("current", "--grad_accum_steps 2 --no_grad_ckpt"),
        long("rowwise", "--mesh_domain 2 --fsdp fsdp2"),
        long("rowwise", "--compile"),
        long("current", "--compile --fsdp megatron"),
    ],
)
def test_trains_near_bf16(fp8, flags, tmp_path):
    flags = [*BF16, *flags.split()]
    start = {"processes": 2, "program": PROGRAM}
    bf16 = train_tiny_gpu(tmp_path / "bf16", *flags, **start)
    result = train_tiny_gpu(tmp_path / "fp8", *flags, "--fp8", fp8, **start)
    assert f"timm blocks in FP8 ({fp8})" in result.run_file["backend"]
    assert result.column("loss") != bf16.column("loss")
    assert result.column("loss") == pytest.approx(bf16.column("loss"), rel=0.03)
    assert result.column("grad_norm") == pytest.approx(bf16.column("grad_norm"), rel=0.2)


@needs_torchao
def test_a_checkpoint_goes_on_without(tmp_path):
    """Its names and values are those of bf16."""
    train_tiny_gpu(tmp_path, *BF16, "--fp8", "rowwise", "--max_steps", "3", program=PROGRAM)
    resumed = train_tiny_gpu(tmp_path, *BF16)
    assert "at step 3" in resumed.stdout
    assert list(resumed.steps) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp8 delayed", "--fp8 delayed requires --block te: with timm's blocks use current or"),
        ("--fp8 rowwise", "--fp8 rowwise with timm's blocks requires --compile"),
        ("--fp8 rowwise --compile", "--fp8 requires CUDA"),
        ("--fp8 current --compile --embed_dim 40", "--embed_dim 40 is not a multiple of 16"),
        ("--fp8 current --compile --mlp_ratio 1.25", "the MLP width 40 is not a multiple of 16"),
        (
            "--fp8 current --compile --model timm/eva02_tiny_patch14_224 --batch_size 32",
            "does not use nn.Linear for queries, keys and values (--qkv_bias)",
        ),
        ("--fp8 current --compile", "requires the package torchao and a PyTorch that it supports"),
    ],
)
def test_refused(flags, words, monkeypatch):
    if words != "--fp8 requires CUDA":
        monkeypatch.setattr(Cpu, "lacks", lambda self, precision: None)
    if "torchao" in words:
        monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError) as error:
        on_gpus([*TINY_MODEL, "--batch_size", "16", *BF16, *flags.split()])
    assert words in str(error.value)
