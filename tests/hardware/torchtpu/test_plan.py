"""--plan --backend torchtpu: the whole, with the real backend, torch_tpu and libtpu."""

import json
import shlex

import pytest

from run_vit_training import read_flags
from tests.support.cli import run_program
from tools.compile_only import torchtpu
from xla_fsdp.tpu import parse_topology

pytestmark = pytest.mark.long

SLICES = ("v5e:2x2", "v6e:2x2")
FLAGS = (
    "--embed_dim 256 --num_blocks 2 --num_heads 4 --image_size 64 --patch_size 16 --batch_size 32 "
    f"--num_classes 128 --precision bf16 --tpu_topology {','.join(SLICES)} --grad_accum_steps 1 "
    "--attention whole --mesh_domain 1 --mesh_tensor 1"
).split()


def planned(folder, *more):
    words = ["--plan", "--backend", "torchtpu", *FLAGS, "--plan_dir", str(folder), *more]
    done = run_program("run_vit_training.py", *words, warm=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_with_the_compiler_and_again_without(tmp_path):
    """Both steps are compiled; asked again, with other epochs, none is."""
    first = json.loads(planned(tmp_path, "--json").stdout)
    assert first["notes"][0].startswith("2 candidates fit or nearly fit by arithmetic; 2 of them")
    assert "(2 now" in first["notes"][0]
    assert sorted(each["hardware"] for each in first["plans"]) == sorted(SLICES)
    for each in first["plans"]:
        assert each["compiled"]
        assert each["settings"] == "fsdp 4, full, whole"
        assert 0 < each["peak_bytes"] < each["capacity_bytes"]
        assert each["expected_images_per_s"] == pytest.approx(32 / each["expected_step_s"])
        check = read_flags(shlex.split(each["commands"]["check"])[2:])
        topology = parse_topology(each["hardware"])
        run = torchtpu.resolve_for_slice(check.run, check.torch, topology)
        assert (run.mesh.fsdp, run.plan.compile) == (4, "step")
        assert each["commands"]["train"].startswith("launch/torchrun.sh --backend torchtpu ")
    assert (tmp_path / "tpu.png").read_bytes().startswith(b"\x89PNG")

    again = json.loads(planned(tmp_path, "--json", "--num_epochs", "3").stdout)
    assert "(0 now" in again["notes"][0]
    for name in ("fastest", "cheapest", "smallest"):
        assert again[name]["expected_step_s"] == first[name]["expected_step_s"]
        assert again[name]["hours"] == pytest.approx(first[name]["hours"] / 100)
