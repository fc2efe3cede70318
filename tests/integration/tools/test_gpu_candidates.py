"""Candidates for a faster step compute what timm's blocks do, in one graph, and save what they are
for: kernels and bytes, as Inductor schedules them for an H200 that is not there."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn

from benchmarks.gpu_candidates import CHANGES, ChangedBlocks, PolynomialGelu, attention_by
from tests.support.cli import TINY_MODEL, run_program
from tests.support.resolved import on_gpus
from torch_fsdp.parallel_plan import parallelize_block

NEEDS_2_14 = pytest.mark.skipif(
    not torch.__version__.startswith("2.14"), reason="gpu_kernels is written for PyTorch 2.14"
)
WITH_MATH = ["bias", "gelu"]


@pytest.fixture(autouse=True)
def settings_of_pytorch():
    with torch._inductor.config.patch({}):  # restores what candidates set
        yield
    torch._dynamo.reset()


def gradients(block, x, upstream):
    x = x.clone().requires_grad_()
    output = block(x)
    output.backward(upstream)
    return {"output": output, "x": x.grad, **{n: p.grad for n, p in block.named_parameters()}}


@pytest.mark.parametrize("changes", [*([name] for name in CHANGES), WITH_MATH])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients(changes, dtype, tolerance):
    torch.manual_seed(0)
    plain = Block(64, 4, qkv_bias=True).to(dtype)
    changed = ChangedBlocks(changes=tuple(changes)).replace(copy.deepcopy(plain), "cpu")
    assert [*changed.state_dict()] == [*plain.state_dict()]
    x, upstream = torch.randn(2, 3, 10, 64).to(dtype)
    expected, got = gradients(plain, x, upstream), gradients(changed, x, upstream)
    for name, values in expected.items():
        distance = (got[name] - values).norm() / values.norm()
        assert distance < tolerance, name


def test_polynomial_gelu():
    """Against the error function in fp64, in all of fp32's range."""
    x = torch.cat([torch.linspace(-9, 9, 20001), torch.tensor([-1e30, 1e30, 0.0])])
    x.requires_grad_()
    output = PolynomialGelu()(x)
    output.sum().backward()
    exact = x.detach().double()
    cumulative = (1 + torch.erf(exact / math.sqrt(2))) / 2
    slope = cumulative + exact * torch.exp(-exact.square() / 2) / math.sqrt(2 * math.pi)
    assert ((output - exact * cumulative).abs() <= 4e-6 * exact.abs()).all()
    assert (x.grad - slope).abs().max() < 1.1e-5
    assert torch.isnan(PolynomialGelu()(torch.tensor([math.nan]))).all()


@pytest.mark.parametrize("recomputed", [False, True])
def test_blocks_share_a_graph(recomputed):
    changed = ChangedBlocks(changes=tuple(CHANGES))
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plan = on_gpus([*TINY_MODEL, "--batch_size", "4", "--compile"]).plan
    how = "full" if recomputed else "none"
    plan = replace(plan, blocks=changed, grad_ckpt=how, compiler=compiler)
    model = nn.Sequential(*(Block(32, 2, qkv_bias=True) for _ in range(3)))
    for name, block in model.named_children():
        parallelize_block(model, name, block, plan, torch.device("cpu"))
    for _ in range(2):
        model(torch.randn(2, 5, 32, requires_grad=True)).sum().backward()
    assert len(graphs) == 1


def test_attention_by():
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for kernel in (None, "flash", "cudnn"):  # on the CPU, the same one
        with attention_by(kernel):
            assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v), expected)


def kernels_of(folder, model, batch_size, *changes):
    """The kernels of a block, as dictionaries. In a process of its own, which pretends a GPU."""
    command = f"-m benchmarks.gpu_kernels --model {model} --batch_size {batch_size}".split()
    for change in changes:
        command += ["--change", change]
    done = run_program(*command, "--json", str(folder / "kernels.json"), warm=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "kernels.json").read_text())


def moved(kernels):
    return sum(kernel["moved"] for kernel in kernels if not kernel["is_library"])


@NEEDS_2_14
def test_kernels_of_a_block(tmp_path):
    """GELU's backward pass and the sum of its bias gradients are one kernel, with both changes."""
    plain = kernels_of(tmp_path, "vit_large_patch16_224", 256)
    hidden = 256 * 197 * 4096 * 2  # bytes of a tensor in the MLP
    gelus = [k["moved"] for k in plain if "erf" in k["operations"] and k["moved"] > hidden]
    assert gelus == [2 * hidden, 3 * hidden, pytest.approx(hidden, rel=0.01)]
    products = ["extern_kernels.mm", "extern_kernels.addmm"]
    assert sum(k["operations"][0] in products for k in plain if k["moved"]) == 4 + 8

    changed = kernels_of(tmp_path, "vit_large_patch16_224", 256, "bias", "gelu")
    (backward,) = (k for k in changed if {"clamp_max", "sum"} <= set(k["operations"]))
    assert backward["is_backward"]
    assert backward["moved"] == pytest.approx(3 * hidden, rel=0.01)
    # Neither bias gradient reads gradients again: those of the MLP, of queries, keys and values.
    qkv = hidden * 3 // 4
    assert moved(plain) - moved(changed) == pytest.approx(hidden + qkv, rel=0.03)


@NEEDS_2_14
@pytest.mark.long
@pytest.mark.parametrize(("model", "batch"), [("vit_10b", 64), ("vit_huge_patch14_224", 128)])
def test_each_candidate_saves_bytes(model, batch, tmp_path):
    plain = moved(kernels_of(tmp_path, model, batch))
    for change in ("bias", "norm"):
        assert moved(kernels_of(tmp_path, model, batch, change)) < 0.97 * plain
