"""--grad_ckpt: every value trains alike, in one graph; auto is decided before a device starts."""

import functools
import json
import re
from itertools import pairwise

import pytest

from run_vit_training import read_flags
from tests.support.cli import run_program, train_tiny
from tests.support.marks import long
from tests.support.resolved import on_xla
from tools.plan.tpu_search import TpuCandidate
from training.step_sizes import step_sizes
from xla_fsdp.estimates import POLICIES
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import parse_topology

DROPOUT = "--mlp_dropout 0.1 --att_dropout 0.1 --drop_path_rate 0.2 --num_blocks 3".split()
ON = {"one device": (1, ""), "four devices": (4, "--mesh_tensor 2")}


@pytest.fixture(scope="module")
def in_full(tmp_path_factory):
    """The run with --grad_ckpt full, by where."""
    folder = tmp_path_factory.mktemp("full")

    @functools.cache
    def run(where):
        devices, flags = ON[where]
        return train_tiny(folder / where, *DROPOUT, *flags.split(), devices=devices)

    return run


@pytest.mark.parametrize(
    ("where", "policy"),
    [long("one device", "none"), long("four devices", "none"), ("four devices", "selective")],
)
def test_what_is_kept_changes_nothing(where, policy, in_full, tmp_path):
    devices, flags = ON[where]
    found = train_tiny(tmp_path, *DROPOUT, *flags.split(), "--grad_ckpt", policy, devices=devices)
    assert "scanned" in found.run_file["backend"]
    assert found.column("loss") == pytest.approx(in_full(where).column("loss"), rel=1e-6)
    assert found.column("grad_norm") == pytest.approx(in_full(where).column("grad_norm"), rel=1e-5)
    assert len(set(found.column("compilations")[1:])) == 1
    assert {b - a for a, b in pairwise(found.column("executions")[1:])} == {1}


@pytest.mark.parametrize(
    ("flags", "policy", "said"),
    [
        ("--grad_ckpt offload", "full", "nothing to offload to on the CPU"),
        ("--grad_ckpt auto", "full", "memory is estimated for TPUs only"),
        ("--grad_ckpt auto --no-scan_blocks", "full", "blocks are not scanned"),
    ],
)
def test_on_the_cpu(flags, policy, said):
    run = on_xla(f"--fake_data {flags}")
    assert run.config.sharding.grad_ckpt == policy
    assert said in run.why["grad_ckpt"]
    assert run.backend_config.scan_blocks == ("--no-scan_blocks" not in flags)


@pytest.mark.parametrize(
    ("flags", "topology"),
    [
        ("--model vit_10b --batch_size 1024 --precision bf16", "v5p:4x4x8"),
        ("--model vit_large_patch16_224 --batch_size 1024 --precision bf16", "v5e:2x4"),
        ("--model vit_10b --batch_size 1024 --precision bf16", "v5e:4x4"),  # nothing fits
    ],
)
def test_auto_takes_the_fastest_that_fits(flags, topology):
    asked = read_flags(
        [*flags.split(), "--grad_ckpt", "auto", "--compile_only", "--tpu_topology", topology]
    )
    slice_ = parse_topology(topology)
    run = resolve_for_slice(asked.run, asked.xla, slice_)
    chosen = run.config.sharding.grad_ckpt
    (shape,) = step_sizes(run.model)
    found = {
        policy: TpuCandidate(run.mesh, policy, 1, run.config.sharding.attention, slice_).estimate(
            shape, run.config
        )
        for policy in POLICIES
    }
    fits = {name for name, each in found.items() if each.peak_bytes < 0.8 * slice_.chip.hbm_bytes}
    if fits:
        assert chosen in fits
        assert found[chosen].step_s == min(found[name].step_s for name in fits)
        assert "the fastest that fits" in run.why["grad_ckpt"]
    else:
        assert found[chosen].peak_bytes == min(each.peak_bytes for each in found.values())
        assert "nothing fits" in run.why["grad_ckpt"]
    assert f"{found[chosen].step_s * 1e3:,.0f} ms" in run.why["grad_ckpt"]


MODEL = (
    "--embed_dim 256 --num_blocks 8 --num_heads 4 --image_size 128 --patch_size 16 "
    "--num_classes 128 --batch_size 256 --precision bf16 --tpu_topology v5e:2x2"
).split()
TOKENS = 8 * 64 * 64
"""In all blocks, of the 64 images of a chip."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Figures of the compiled step by --grad_ckpt, and the folder of its modules."""
    found = {}
    for policy in ("full", "offload", "none"):
        folder = tmp_path_factory.mktemp(policy)
        flags = ("--compile_only", "--json", "--grad_ckpt", policy, "--hlo_dir", str(folder))
        done = run_program("run_vit_training.py", *flags, *MODEL)
        assert done.returncode == 0, done.stderr
        found[policy] = json.loads(done.stdout), (folder / "graph_1.hlo").read_text()
    return found


@pytest.mark.long
def test_offload_moves_each_blocks_input_to_the_host(compiled):
    (full, in_hbm), (offloaded, hlo) = compiled["full"], compiled["offload"]
    stack = "f32[8,64,64,256]{3,2,1,0:T(8,128)S(5)}"
    assert stack in hlo
    assert stack not in in_hbm
    assert offloaded["flops_per_chip"] == pytest.approx(full["flops_per_chip"], rel=0.01)


@pytest.mark.long
def test_none_computes_nothing_twice(compiled):
    (full, _), (kept, hlo) = compiled["full"], compiled["none"]
    block = 2 * 256 * (64 * 12 * 256**2 + 2 * 64**2 * 256)
    mlp_out = 2 * 256 * 64 * 4 * 256**2
    assert full["flops_per_chip"] - kept["flops_per_chip"] == pytest.approx(
        8 * (block - mlp_out) / 4, rel=0.05
    )
    forward = next(line for line in hlo.splitlines() if " while(" in line)
    stacks = re.findall(r"(\w+)\[8,64,64,(\d+)\]", forward.partition(" while(")[0])
    residuals, results = [("f32", "256")] * 2, [("bf16", "768"), ("bf16", "256"), ("bf16", "1024")]
    assert sorted(stacks) == sorted(residuals + results)  # of qkv, attention and fc1
    # The compiler may put the residuals, which are the hottest, into vector memory.
    least = TOKENS * 256 * 8 * 2
    most = least + TOKENS * 256 * 2 * 4
    assert 0.95 * least < kept["peak_hbm_bytes"] < 1.3 * most + full["peak_hbm_bytes"]
