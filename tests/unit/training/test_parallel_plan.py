"""The plans that both backends resolve: frozen, and the same on any number of devices."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from gpu_fsdp import resolve_gpu
from tests.support.cli import TINY_MODEL
from tests.support.resolved import on_gpus, on_xla
from torch_fsdp.resolve_torch import FSDP2, SIMPLE
from training.errors import UsageError
from training.mesh import Mesh

pytestmark = pytest.mark.fast

TINY = " ".join([*TINY_MODEL, "--batch_size 24"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"fsdp": True, "scan": True, "attention": "sdpa", "grad_ckpt": "full"}),
        ("--run_without_fsdp --no-scan_blocks", {"fsdp": False, "scan": False}),
        ("--xla_fsdp nested --cpu_devices 1 --no_grad_ckpt", {"scan": False, "grad_ckpt": "none"}),
        ("--mark_step_every_n_blocks 1", {"scan": False}),
        ("--mesh_domain 2", {"domain_attention": "gather"}),
        ("--mesh_domain 2 --domain_attention ring", {"domain_attention": "ring"}),
        # The partitioner chooses the communication.
        ("--mesh_domain 2 --att_dropout 0.1", {"domain_attention": None}),
        ("--mesh_domain 2 --mesh_tensor 2", {"domain_attention": None}),
        ("--precision bf16 --residual_dtype bf16", {"bf16": True, "residual_bf16": True}),
        ("--precision bf16 --matmul int8", {"int8": True, "gather_fp8": False}),
        ("--precision bf16 --gather_dtype fp8", {"int8": False, "gather_fp8": True}),
    ],
)
def test_on_xla(flags, expected):
    plan = on_xla(f"{TINY} --cpu_devices 4 {flags}").plan
    defaults = {"domain_attention": None, "residual_bf16": False, "int8": False}
    found = {field.name: getattr(plan, field.name) for field in fields(plan)}
    assert found == found | defaults | expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"zero": 3, "grad_ckpt": "full", "compile": "none", "products": "fp32"}),
        ("--run_without_fsdp", {"zero": 0}),
        ("--no_reshard_after_forward --grad_ckpt selective", {"zero": 2, "grad_ckpt": "selective"}),
        ("--mesh_domain 2", {"domain_attention": "ulysses"}),
        ("--precision bf16 --compile", {"dtype": torch.bfloat16, "products": "bf16"}),
        (
            "--precision bf16 --fsdp simple --matmul int8",
            {"implementation": SIMPLE, "matmul": torch.int8, "gather_dtype": None},
        ),
        (
            "--fsdp simple --gather_dtype fp8",
            {"implementation": SIMPLE, "matmul": None, "gather_dtype": torch.float8_e4m3fn},
        ),
    ],
)
def test_on_gpus(flags, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = on_gpus(f"{TINY} {flags}").plan
    defaults = {"implementation": FSDP2, "domain_attention": None, "reduce_dtype": torch.float32}
    found = {field.name: getattr(plan, field.name) for field in fields(plan)}
    assert found == found | defaults | expected


@pytest.mark.parametrize(
    ("resolve", "variable"), [(on_xla, "CPU_NUM_DEVICES"), (on_gpus, "WORLD_SIZE")]
)
def test_same_on_any_number_of_devices(resolve, variable, monkeypatch):
    runs = []
    for devices in ("2", "4", "8"):
        monkeypatch.setenv(variable, devices)
        runs.append(resolve(f"{TINY} --mesh_domain 2 --micro_batch_size 6"))
    assert [run.mesh for run in runs] == [Mesh(fsdp=size, domain=2) for size in (1, 2, 4)]
    assert runs[0].plan == runs[1].plan == runs[2].plan
    assert runs[0].on(8).plan is runs[0].plan
    with pytest.raises(FrozenInstanceError):
        runs[0].plan.grad_ckpt = "none"
    assert replace(runs[0].plan, grad_ckpt="none") != runs[0].plan


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--batch_size 24", ""),
        (
            "--batch_size 16",
            r"with 3 nodes \(NNODES=1:3\): --batch_size 16 ",
        ),
        ("--batch_size 24 --mesh_dcn 2", r"with 1 nodes \(NNODES=1:3\): --mesh_dcn 2 x "),
        # What an implementation of FSDP, or the blocks, require is asked on each number, too.
        (
            "--batch_size 24 --fsdp megatron --reduce_dtype bf16",
            r"with 1 nodes \(NNODES=1:3\): --reduce_dtype bf16 requires --mesh_fsdp 2 or more",
        ),
    ],
)
def test_a_run_must_fit_each_number_of_nodes(flags, told, monkeypatch):
    """(Of slices: tests/integration/training/test_mesh.py.)"""
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "ELASTIC_NODES": "1:3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(resolve_gpu, "check_megatron_runs_here", lambda: None)
    if not told:
        assert on_gpus([*TINY_MODEL, *flags.split()]).mesh == Mesh(fsdp=2)
        return
    with pytest.raises(UsageError, match=told):
        on_gpus([*TINY_MODEL, *flags.split()])
