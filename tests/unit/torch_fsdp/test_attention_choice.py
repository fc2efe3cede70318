"""What --attention resolves to on TorchTPU, and what it refuses; no device starts."""

import importlib.util

import pytest

from run_vit_training import read_flags
from tests.support.cli import TINY_MODEL
from tools.compile_only.torchtpu import resolve_for_slice
from torch_fsdp import devices
from training.errors import UsageError
from xla_fsdp.tpu import parse_topology

pytestmark = pytest.mark.fast

SMALL = [*TINY_MODEL, "--batch_size", "16", "--fake_data"]


def resolved(flags: str):
    asked = read_flags([*SMALL, "--backend", "torchtpu", *flags.split()])
    return resolve_for_slice(asked.run, asked.torch, parse_topology("v6e:2x2"))


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ("", "whole"),
        ("--fsdp simple", "whole"),
        ("--image_size 64 --patch_size 2", "whole"),
        ("--image_size 66 --patch_size 2", "flash"),
        ("--attention flash", "flash"),
        ("--attention sdpa", "sdpa"),
        ("--attention plain", "plain"),
        ("--att_dropout 0.1", "plain"),
        ("--att_dropout 0.1 --fsdp simple", "plain"),
        ("--embed_dim 320 --num_heads 1", "plain"),
        ("--mesh_domain 2", "whole"),
        ("--mesh_domain 2 --image_size 66 --patch_size 2", "flash"),
        ("--mesh_domain 2 --domain_attention ring", "plain"),
        ("--mesh_domain 2 --domain_attention ring --attention flash", "flash"),
        ("--mesh_domain 2 --domain_attention ring --image_size 66 --patch_size 2", "flash"),
        ("--mesh_domain 2 --fsdp simple --attention sdpa", "sdpa"),
    ],
)
def test_what_is_chosen(flags, attention):
    run = resolved(flags)
    assert run.plan.attention == run.config.sharding.attention == attention


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--attention whole --att_dropout 0.1",
            "--attention whole does not support --att_dropout 0.1: use --attention plain",
        ),
        (
            "--attention whole --image_size 66 --patch_size 2",
            "--attention whole supports up to 1,024 tokens, not 1,089: use --attention plain",
        ),
        (
            "--attention whole --mesh_domain 2 --domain_attention ring",
            "--attention whole is incompatible with --mesh_domain 2: use --attention plain",
        ),
        (
            "--mesh_domain 2 --fsdp simple --image_size 20",
            "--fsdp simple does not support --mesh_domain 2, which does not divide 5 rows of "
            "patches: use --fsdp fsdp2",
        ),
        (
            "--attention sdpa --att_dropout 0.1 --fsdp simple",
            "--fsdp simple does not support --att_dropout 0.1 with --attention sdpa: use --fsdp "
            "fsdp2",
        ),
    ],
)
def test_what_is_refused(flags, told):
    with pytest.raises(UsageError) as refusal:
        resolved(flags)
    assert str(refusal.value) == told


def test_without_jax(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jax" else find_spec(name)
    )
    assert resolved("--attention plain").plan.attention == "plain"
    with pytest.raises(UsageError, match="--attention whole requires the package jax: python3"):
        resolved("")


def test_without_a_tpu(monkeypatch):
    """On a plugin that computes elsewhere."""
    monkeypatch.setattr(devices.Tpu, "kernel_memory", None)
    assert resolved("").plan.attention == "plain"
    with pytest.raises(UsageError, match="--attention whole requires a TPU: use --attention plain"):
        resolved("--attention whole")
