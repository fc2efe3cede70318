"""Which form of FSDP --fsdp auto is on TorchTPU, and what a run says of it; no device starts."""

import pytest

from run_vit_training import read_flags
from tests.support.cli import TINY_MODEL
from tools.compile_only.torchtpu import resolve_for_slice
from torch_fsdp.resolve_torch import FSDP2, SIMPLE
from training.errors import UsageError
from xla_fsdp.tpu import parse_topology

pytestmark = pytest.mark.fast

SMALL = [*TINY_MODEL, "--batch_size", "16", "--fake_data", "--backend", "torchtpu"]


def resolved(flags: str):
    asked = read_flags([*SMALL, *flags.split()])
    return resolve_for_slice(asked.run, asked.torch, parse_topology("v6e:2x2"))


@pytest.mark.parametrize(
    ("flags", "form", "why"),
    [
        ("", SIMPLE, None),
        ("--zero_dp_strategy 2 --reduce_dtype bf16 --precision bf16", SIMPLE, None),
        ("--att_dropout 0.1", SIMPLE, None),
        ("--compile", SIMPLE, None),
        ("--fsdp fsdp2", FSDP2, None),
        ("--forward_prefetch 2", FSDP2, None),
        ("--no-compile", FSDP2, " (not SimpleFSDP: --no-compile)"),
        ("--no-compile --fsdp simple", SIMPLE, None),
        ("--mesh_domain 2 --mesh_fsdp 2", SIMPLE, None),
        (
            "--mesh_domain 2 --image_size 20",
            FSDP2,
            " (not SimpleFSDP: --mesh_domain 2, which does not divide 5 rows of patches)",
        ),
        (
            "--att_dropout 0.1 --attention sdpa",
            FSDP2,
            " (not SimpleFSDP: --att_dropout 0.1 with --attention sdpa)",
        ),
    ],
)
def test_which(flags, form, why):
    run = resolved(flags)
    assert run.plan.implementation is form
    assert run.why.get("fsdp") == why


def test_a_flag_of_another_form():
    with pytest.raises(
        UsageError, match=r"^--forward_prefetch 2 requires --fsdp fsdp2, not simple"
    ):
        resolved("--forward_prefetch 2 --fsdp simple")
    with pytest.raises(UsageError, match=r"^--fsdp megatron requires --backend cuda, not torchtpu"):
        resolved("--no-overlap_param_gather")
