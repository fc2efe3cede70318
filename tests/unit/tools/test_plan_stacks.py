"""--plan --backend torchtpu: what is searched and refused, the command lines, the arithmetic."""

import functools
import json
import shlex
from dataclasses import replace

import pytest

import run_vit_training
from launch import compute_engine
from run_vit_training import check_mode_flags, read_flags
from tests.support.usage_error import told_in_one_line
from tools.compile_only import torchtpu
from tools.plan.config import PlanConfig
from tools.plan.plans import Request
from tools.plan.stacks import PyTorchXla, TorchTpu, stack_of
from tools.plan.tpu import _commands, compile_words, refusal
from tools.plan.tpu_search import TpuCandidate, candidates
from training.errors import UsageError
from training.flags import check_foreign
from training.mesh import Mesh
from training.resolve import resolve_model
from training.step_sizes import step_sizes, summed
from xla_fsdp.tpu import parse_topology

pytestmark = pytest.mark.fast

VIT_L, VIT_10B = "vit_large_patch16_224", "vit_10b"
GIB = 2**30
MOST = PlanConfig().chips_at_most


def asked(words, backend="torchtpu"):
    """What is asked with these flags."""
    flags = read_flags(["--plan", "--backend", backend, "--precision", "bf16", *words.split()])
    stack = stack_of(flags.run, flags.xla, flags.torch)
    config, model = resolve_model(flags.run)
    return Request(config, stack, flags.plan, model, None, {})


def on(slice_, mesh=None, **chosen):
    topology = parse_topology(slice_)
    mesh = mesh or Mesh(fsdp=topology.devices)
    values = {"grad_ckpt": "full", "grad_accum_steps": 1, "attention": "whole"} | chosen
    return TpuCandidate(mesh, topology=topology, **values)


# -- what is searched -------------------------------------------------------------------------


def test_blocks_are_one_loop_unless_the_user_chooses_otherwise():
    request = asked(f"--model {VIT_L} --tpu_topology v5e:2x4")
    found = [*candidates(request.config, request.stack, MOST)]
    assert {each.grad_ckpt for each in found} == {"full", "offload"}
    assert {each.attention for each in found} == {"plain", "whole", "flash"}
    request = asked(f"--model {VIT_L} --tpu_topology v5e:2x4 --grad_ckpt selective")
    (chosen,) = {each.grad_ckpt for each in candidates(request.config, request.stack, MOST)}
    assert chosen == "selective"
    assert refusal(request, on("v5e:2x4", grad_ckpt="selective")) is None


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"grad_accum_steps": 4},
        {"attention": "plain"},
        {"grad_ckpt": "offload"},
        {"mesh": Mesh(fsdp=4, domain=2)},
        {"mesh": Mesh(fsdp=4, tensor=2)},
        {"mesh": Mesh(fsdp=2, domain=2, tensor=2)},
    ],
)
def test_a_candidate_is_what_simple_fsdp_accepts(chosen):
    request = asked(f"--model {VIT_L} --batch_size 64")
    candidate = on("v5e:2x4", **chosen)
    typed = read_flags(compile_words(request.config, request.stack, candidate))
    assert (typed.run.backend, typed.torch.fsdp) == ("torchtpu", "simple")
    assert (typed.xla.compile_only, typed.xla.tpu_topology) == (True, "v5e:2x4")
    check_mode_flags(typed)
    check_foreign(typed.backend_configs, "torchtpu", typed.run.explicitly_set)
    try:
        run = torchtpu.resolve_for_slice(typed.run, typed.torch, candidate.topology)
        refused = None
        assert run.mesh == candidate.mesh
    except UsageError as error:
        refused = str(error)
    assert refusal(request, candidate) == refused


def test_tpu7x_of_pytorch_xla_is_what_torchtpu_accepts():
    """It trains there."""
    request = asked(f"--model {VIT_L} --batch_size 64", backend="xla")
    assert refusal(request, on("tpu7x:2x2x1")) is None
    both = {"mesh": Mesh(fsdp=2, domain=2, tensor=2), "attention": "sdpa"}
    assert refusal(request, on("v5p:2x2x2", **both)) is None
    refused = refusal(request, on("tpu7x:2x2x1", **both))
    assert refused.startswith("--mesh_tensor 2 with --fsdp simple is incompatible with --mesh_dom")


# -- command lines ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slice_", "launcher"),
    [
        ("v5e:4x4", "launch/queued_resource.sh --tpu=vit --type=v5litepod-16 --version=v2-alpha"),
        ("v6e:4x4", "python3 -m launch.compute_engine --tpu=vit --topology=v6e:4x4"),
        ("tpu7x:2x2x2", "python3 -m launch.compute_engine --tpu=vit --topology=tpu7x:2x2x2"),
    ],
)
def test_a_plan_starts_torchtpu(slice_, launcher):
    request = asked(f"--model {VIT_10B} --reduce_dtype bf16 --num_epochs 3 --lr 0.002")
    commands = _commands(request, on(slice_, grad_accum_steps=2))
    start, *words = shlex.split(commands["train"])
    assert start == "launch/torchrun.sh"
    train = read_flags(words)
    assert (train.run.backend, train.torch.fsdp) == ("torchtpu", "simple")
    assert (train.torch.reduce_dtype, train.run.num_epochs) == ("bf16", 3)
    assert not train.run.plan
    assert commands["launch"].startswith(launcher)
    launch, _, on_host = commands["launch"].partition(" -- ")
    assert " --torchtpu --env PYTHON=.venv-torchtpu/bin/python" in launch
    assert on_host == f"{commands['train']} --ckpt_dir gs://BUCKET/runs/vit"
    if "compute_engine" in launcher:
        assert compute_engine.parse(shlex.split(commands["launch"])[3:]).torchtpu
    check = read_flags(shlex.split(commands["check"])[2:])
    assert (check.run.backend, check.xla.tpu_topology) == ("torchtpu", slice_)
    assert check.run.data.grad_accum_steps == train.run.data.grad_accum_steps == 2


def test_what_is_not_planned(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torchtpu, "check_installed", lambda mode: None)
    words = f"--plan --json --model {VIT_L} --precision bf16 --plan_compilations 0".split()
    words += ["--batch_size", "64", "--chips_at_most", "8", "--plan_dir", str(tmp_path)]
    assert run_vit_training.main([*words, "--backend", "torchtpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = {each["hardware"].partition(":")[0] for each in found["plans"]}
    assert kinds == {"v5e", "v5p", "v6e", "tpu7x"}
    assert (
        "without v4: --backend torchtpu does not support --tpu_topology v4:2x2x1"
        in (found["notes"])
    )
    assert not any("PyTorch/XLA" in note for note in found["notes"])


def test_what_no_slice_can_train_is_refused(capsys, tmp_path, monkeypatch):
    """In place of larger slices, which would not help."""
    monkeypatch.setattr(torchtpu, "check_installed", lambda mode: None)
    monkeypatch.chdir(tmp_path)
    words = "--plan --backend torchtpu --plan_compilations 0 --tpu_topology v6e:2x2".split()
    line = told_in_one_line(capsys, *words, "--model", VIT_L, "--zero_dp_strategy", "1")
    assert line == "--fsdp simple does not support --zero_dp_strategy 1: use 2 or 3"
    assert not list(tmp_path.iterdir())


# -- the arithmetic ---------------------------------------------------------------------------

# docs/evidence/torchtpu.md: ms, GiB of a device.
COMPILED = [
    ("tpu7x:4x4x4", None, VIT_10B, 1024, "fp32", 210.1, 4.17),
    ("tpu7x:4x4x4", None, VIT_10B, 1024, "bf16", 191.7, 3.25),
    ("tpu7x:4x4x4", Mesh(fsdp=64, tensor=2), VIT_10B, 256, "bf16", 134.4, 2.00),
    ("v5e:8x8", None, VIT_10B, 1024, "fp32", 1824.6, 7.06),
    ("v6e:16x16", None, VIT_10B, 1024, "fp32", 435.6, 2.15),
    ("v6e:16x16", None, VIT_10B, 1024, "bf16", 360.0, 1.98),
    ("v5e:2x4", None, VIT_L, 1024, "fp32", 498.6, 2.77),
    ("tpu7x:2x2x2", None, VIT_L, 1024, "fp32", 66.1, 1.54),
]


def estimated(candidate, flags):
    request = asked(flags)
    estimate = functools.partial(candidate.estimate, config=request.config, fsdp=request.stack.fsdp)
    return summed(estimate, step_sizes(request.model))


@pytest.mark.parametrize("row", COMPILED)
def test_the_arithmetic_is_near_the_compiler(row):
    slice_, mesh, model, batch_size, reduce_dtype, step_ms, peak_gib = row
    flags = f"--model {model} --batch_size {batch_size} --reduce_dtype {reduce_dtype}"
    found = estimated(on(slice_, mesh), flags)
    assert found.step_s * 1e3 == pytest.approx(step_ms, rel=0.1)
    assert found.peak_bytes / GIB == pytest.approx(peak_gib, rel=0.15)


def test_tokens_exchanged_for_heads_take_as_long_as_by_the_compiler():
    """3 blocks of ViT-L, each image over 2 chips of v6e: the step's 18 all-to-alls wait 0.755 ms
    (docs/evidence/torchtpu.md)."""
    flags = "--model timm/vit_large_patch16_224 --num_blocks 3 --image_size 1024 --batch_size 4"
    # The first waits for weights, over as many chips, alone.
    alone, exchanging = (
        estimated(on("v6e:2x4", mesh, attention="flash"), flags).waiting_s
        for mesh in (Mesh(fsdp=8), Mesh(fsdp=4, domain=2))
    )
    assert exchanging - alone == pytest.approx(0.755e-3, rel=0.05)


def test_weights_that_stay_gathered_are_counted():
    """Without recomputation: bf16 weights of all blocks, on each device, and one gather less."""
    request = asked(f"--model {VIT_10B} --batch_size 1024")
    (shape,) = step_sizes(request.model)
    candidate = on("v5p:4x4x8", grad_ckpt="none")
    stays, again = (
        candidate.estimate(shape, request.config, replace(request.stack.fsdp, keeps_gathered=keeps))
        for keeps in (True, False)
    )
    weights = 2 * shape.depth * shape.block_parameters
    assert stays.held_bytes - again.held_bytes == pytest.approx(weights)
    assert stays.waiting_s < again.waiting_s


def test_the_stack_of_the_flags():
    assert isinstance(asked("", backend="auto").stack, PyTorchXla)
    assert isinstance(asked("", backend="xla").stack, PyTorchXla)
    for flags in ("", "--fsdp simple"):
        stack = asked(flags).stack
        assert isinstance(stack, TorchTpu)
        assert stack.torch.fsdp == "simple"
    with pytest.raises(UsageError, match="requires --fsdp simple, not fsdp2"):
        asked("--fsdp fsdp2")
