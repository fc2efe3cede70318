"""A step of two slices by the real backend, torch_tpu and libtpu, without a TPU: what goes over
links, and what over the network between slices (DCN)."""

import json
import re

import pytest

from tests.support.cli import run_program

SLICES, CHIPS, WIDTH = 2, 4, 256
WHAT = (
    f"--backend torchtpu --compile_only --json --tpu_topology v6e:2x2 --mesh_dcn {SLICES} "
    f"--num_blocks 2 --embed_dim {WIDTH} --num_heads 4 --image_size 64 --patch_size 16 "
    "--num_classes 128 --batch_size 16 --precision bf16"
)
BLOCKS = 2 * (12 * WIDTH**2 + 13 * WIDTH)


@pytest.mark.parametrize(
    "form",
    ["simple", pytest.param("fsdp2", marks=pytest.mark.long)],  # 130 programs
)
def test_shards_in_each_slice_and_sums_between_them(form, tmp_path):
    flags = [*WHAT.split(), "--fsdp", form, "--hlo_dir", str(tmp_path)]
    done = run_program("run_vit_training.py", *flags, warm=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["slices"], found["devices"]) == (SLICES, SLICES * CHIPS)
    assert found["mesh"] == {"dcn": SLICES, "fsdp": CHIPS, "domain": 1, "tensor": 1}
    parameters = found["parameters"]
    assert found["state_bytes"] == pytest.approx(12 * parameters / CHIPS, rel=0.01)

    # Between slices each gradient's shard is summed once, in fp32: a device receives as much as it
    # has. Within one, blocks are gathered twice in bf16, and all gradients scattered in fp32.
    gradients = 4 * parameters / CHIPS  # in whole tiles
    assert gradients < found["dcn_bytes"] < 1.15 * gradients
    gathered, scattered = 2 * (BLOCKS + parameters), 4 * parameters
    received = sum(found["collective_bytes"].values())
    assert (CHIPS - 1) / CHIPS * (gathered + scattered) < 1.1 * received
    assert received < 1.1 * 2 * (CHIPS - 1) / CHIPS * (gathered + scattered)
    assert found["expected_dcn_s"] > 0

    modules = "".join(path.read_text() for path in tmp_path.glob("graph_*.hlo"))
    groups = set(re.findall(r"replica_groups=(\S+?),? ", modules))
    assert groups == {"{{0,1,2,3}}"}  # numbers in a slice: the compiler has divided the others
    assert set(re.findall(r'_xla_megascale_target="(.*?)"', modules)) == {"{1,2}x{0:3}"}
