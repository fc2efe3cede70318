"""``--compile``: blocks that are alike share the graphs of torch.compile, one for each size."""

import gc
import sys
from dataclasses import replace

import pytest
import torch

from tests.support.cli import TINY_MODEL, train_tiny_gpu
from tests.support.curves import assert_same_training
from tests.support.resolved import on_gpus
from torch_fsdp import parallel_plan
from torch_fsdp.devices import Cpu
from torch_fsdp.parallel_plan import parallelize_block
from training.errors import UsageError

DEEP = [*TINY_MODEL, "--num_blocks", "12", "--compile"]
SIZES = (17, 5, 10, 17)
"""Tokens of the images of one step after the other."""


@pytest.fixture(autouse=True)
def without_hooks_of_errors():
    """The hooks of a recomputed block in which an error was raised stay until it is collected."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def no_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ("", 1),
        ("--grad_ckpt selective", 1),
        ("--no_grad_ckpt", 1),
        ("--drop_path_rate 0.1 --num_blocks 3", 3),  # each rate is a constant of its graph
    ],
)
def test_graphs_of_a_size(flags, graphs):
    """As many in evaluation. PyTorch itself stops at 8."""
    run = on_gpus([*"--backend cuda --batch_size 4".split(), *DEEP, *flags.split()])
    model = run.model.build()
    run.model.initialize(model, "", seed=0)
    found = []

    def compiler(graph, inputs):
        found.append([size for values in inputs for size in getattr(values, "shape", [values])])
        return graph.forward

    plan = replace(run.plan, compiler=compiler)
    blocks = [
        parallelize_block(model, f"blocks.{index}", block, plan, torch.device("cpu"))
        for index, block in enumerate(model.blocks)
    ]

    def step(tokens):
        images = torch.randn(2, tokens, 32, requires_grad=model.training)
        for block in blocks:
            images = block(images)
        return images

    for tokens in SIZES:
        step(tokens).sum().backward()
    assert len(found) == graphs * len(set(SIZES))
    model.eval()
    with torch.no_grad():
        for tokens in SIZES:
            step(tokens)
    assert len(found) == 2 * graphs * len(set(SIZES))
    assert {type(size) for sizes in found for size in sizes} == {int}  # none is a symbol


def test_initial_weights_leave_compilation_on():
    """Threads that fill modules side by side may leave PyTorch's flag of modes set, one time in
    some: then torch.compile would compile nothing, and say nothing."""
    run = on_gpus(["--backend", "cuda", "--batch_size", "4", *DEEP])
    for _ in range(20):
        run.model.initialize(run.model.build(), "", seed=0)
        assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "block"),
        ("--no-compile", "none"),
        ("--mesh_domain 2", "none"),
        ("--mesh_domain 2 --compile", "around attention"),
        ("--native_resolution --token_budget 64", "none"),
        ("--native_resolution --token_budget 64 --compile", "block"),
    ],
)
def test_default_on_gpus(flags, expected, monkeypatch):
    monkeypatch.setattr(Cpu, "compiles_blocks", True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = on_gpus([*TINY_MODEL, "--batch_size", "4", *flags.split()])
    assert run.plan.compile == expected
    assert run.plan.compile_required == (flags.endswith(" --compile"))


@pytest.mark.parametrize("missing", ["no-such-compiler", "/proc/no-such-folder"])
def test_a_failed_compilation_is_told_once(missing, monkeypatch, capsys):
    """By default: the blocks then compute as they are. With --compile it ends the run."""
    monkeypatch.setattr(Cpu, "compiles_blocks", True)
    monkeypatch.setattr(parallel_plan, "_compilation_failed", False)
    if "/" in missing:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", missing)
        # Imported by torch.compile at its first use in a process; it then looks for the folder.
        monkeypatch.delitem(sys.modules, "torch._inductor.compiler_bisector", raising=False)
    else:
        monkeypatch.setattr("torch._inductor.config.cpp.cxx", (missing,))
        monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    run = on_gpus([*TINY_MODEL, "--batch_size", "4"])
    plain, model = run.model.build(), run.model.build()
    for each in (plain, model):
        run.model.initialize(each, "", seed=0)
    for index, block in enumerate(model.blocks):
        parallelize_block(model, f"blocks.{index}", block, run.plan, torch.device("cpu"))
    images = torch.randn(2, *run.model.sizes.input_shape)
    for _ in range(2):
        assert torch.equal(model(images), plain(images))
    lines = capsys.readouterr().err.splitlines()  # PyTorch writes some, too
    (line,) = (line for line in lines if line.startswith("warning: torch.compile failed ("))
    assert missing in line

    required = replace(run.plan, compile_required=True)
    block = run.model.build().blocks[0]
    parallelize_block(run.model.build(), "blocks.0", block, required, torch.device("cpu"))
    run.model.initialize(block, "blocks.0", seed=0)
    with pytest.raises(UsageError, match=f"torch.compile failed.*{missing}.*--no-compile"):
        block(torch.randn(2, 17, 32))


@pytest.mark.parametrize("required", [True, False])
def test_an_error_of_the_model_is_no_failed_compilation(required, monkeypatch):
    """It ends the run as without torch.compile."""
    monkeypatch.setattr(parallel_plan, "_compilation_failed", False)
    run = on_gpus(["--backend", "cuda", "--batch_size", "4", *TINY_MODEL, "--compile"])
    block = run.model.build().blocks[0]
    plan = replace(run.plan, compile_required=required)
    parallelize_block(run.model.build(), "blocks.0", block, plan, torch.device("cpu"))
    run.model.initialize(block, "blocks.0", seed=0)
    with pytest.raises(Exception, match="33") as raised:  # of matrices that do not fit
        block(torch.randn(2, 17, 33))
    assert not isinstance(raised.value, UsageError)


KINDS_OF_BLOCKS = (
    "aimv2_1b_patch14_224 beit3_base_patch16_224 eva02_base_patch14_224 eva02_small_patch14_224 "
    "eva02_enormous_patch14_clip_224 eva_giant_patch14_224 test_vit4 vit_base_patch16_18x2_224 "
    "vit_base_patch16_dinov3 vit_base_patch16_rope_224 vit_base_patch16_rpn_224 "
    "vit_base_patch16_sapiens2 vit_base_patch16_xp_224 vit_dlittle_patch16_reg1_gap_256 "
    "vit_dpwee_patch16_reg1_gap_256 vit_giant_patch14_dinov2 hybrid_vit"
).split()
"""A model of each combination of timm's blocks, attention, MLPs and norms that is supported."""


@pytest.mark.parametrize("name", KINDS_OF_BLOCKS)
def test_no_graph_break(name):
    """``fullgraph`` raises at one."""
    depth = "" if "sapiens2" in name else "--num_blocks 1"  # it has a setting for each block
    name = name if name == "hybrid_vit" else f"timm/{name}"
    run = on_gpus(f"--model {name} {depth} --batch_size 2 --compile")
    plan, model = replace(run.plan, compiler="eager"), run.model.build()
    for unit, block in [*run.model.units(model)][:-1]:
        parallelize_block(model, unit, block, plan, torch.device("cpu"))
    images = torch.empty(2, *run.model.sizes.input_shape, device="meta")
    assert model.train()(images).shape == (2, run.model.sizes.num_classes)


@pytest.mark.long
def test_a_deep_model_is_compiled(tmp_path):
    """All of it in the first step, and in the first evaluation."""
    plain = train_tiny_gpu(tmp_path / "plain", *(word for word in DEEP if word != "--compile"))
    result = train_tiny_gpu(tmp_path / "compiled", *DEEP)
    assert_same_training(result, plain)
    assert result.column("compilations") == [1] * 6
