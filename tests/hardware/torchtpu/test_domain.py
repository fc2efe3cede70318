"""A step whose images are over several devices, by the real backend, torch_tpu and libtpu, without
a TPU: what goes between those that share an image, against arithmetic."""

import json
import re

import pytest

from tests.support.cli import run_program
from tests.support.marks import long

WIDTH, PATCHES, BLOCKS, DEVICES = 256, 256, 2, 4
WHAT = (
    "--backend torchtpu --fsdp simple --compile_only --json --tpu_topology v6e:2x2 --num_classes "
    f"128 --num_blocks {BLOCKS} --embed_dim {WIDTH} --num_heads 4 --image_size 256 --patch_size 16 "
    "--batch_size 8 --precision bf16"
)


@pytest.mark.parametrize(
    ("form", "domain", "attention"), [("ulysses", 2, "whole"), long("ring", 4, "flash")]
)
def test_between_devices_that_share_images(form, domain, attention, tmp_path):
    flags = f"--mesh_domain {domain} --domain_attention {form} --attention {attention}"
    done = run_program(
        "run_vit_training.py", *WHAT.split(), *flags.split(), "--hlo_dir", str(tmp_path), warm=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["graphs"] == 1
    assert f"{form} attention over domain" in found["sharding"]
    assert f"{attention} attention" in found["sharding"]
    assert found["mesh"]["domain"] == domain
    assert found["state_bytes"] == pytest.approx(12 * found["parameters"] / DEVICES, rel=0.01)

    (module,) = (path.read_text() for path in tmp_path.glob("graph_*.hlo"))
    groups = set(re.findall(r"replica_groups=(\S+?),? ", module))
    images = 8 * domain // DEVICES
    tokens = 2 * images * PATCHES // domain * WIDTH  # bytes, of one tensor in bf16
    if form == "ulysses":
        # Of a block's queries, keys and values, and its output, forward, again and backward: half
        # of what a device has goes to the other one.
        assert groups == {"{{0,1,2,3}}", "{{0,1},{2,3}}"}
        assert found["collective_bytes"]["all-to-all"] == 3 * BLOCKS * 4 * tokens // 2
        assert found["collectives"]["all-to-all"] == 3 * BLOCKS * 2
    else:
        # Keys and values go round, forward and backward, which shares them with the recomputation;
        # their gradients also come home, in fp32 but for those that the first kernel has written.
        assert groups == {"{{0,1,2,3}}"}
        pairs = set(re.findall(r"source_target_pairs=(\{\{.*?\}\})", module))
        assert pairs == {"{{0,1},{1,2},{2,3},{3,0}}"}
        rounds = domain - 1
        assert found["asynchronous_collectives"]["collective-permute"] == BLOCKS * (3 * rounds + 1)
        sent = BLOCKS * 2 * tokens * (2 * rounds + 1 + 2 * rounds)
        assert found["collective_bytes"]["collective-permute"] == pytest.approx(sent, rel=1e-3)
