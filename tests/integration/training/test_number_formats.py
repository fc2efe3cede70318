"""--optimizer_dtype bf16, --gather_dtype: rounding, what is kept, what is sent, what is refused."""

import json
import re
import shutil

import pytest
import torch

from tests.integration.tools.test_plan import VIT_10B, asked
from tests.references.plain_checkpoint import convert
from tests.support.cli import TINY_MODEL, need_xla, run_program, train_tiny, train_tiny_gpu
from tests.support.resolved import on_xla
from tests.support.resuming import DROPOUT, EPOCHS_OF_5
from tools.plan.tpu_search import TpuCandidate
from training.errors import UsageError
from training.mesh import Mesh
from xla_fsdp.tpu import parse_topology


@pytest.fixture(scope="module")
def found():
    need_xla()
    done = run_program("-m", "tests.fakes.rounding_on_xla")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_rounding_is_unbiased(found):
    assert found["exact"]
    assert found["bits"]
    for each in found["rounding"]:
        below, above = each["to"]
        assert below < each["value"] < above
        assert above - below == pytest.approx(each["ulp"])
        assert each["mean"] == pytest.approx(each["value"], abs=4 / 1024 * each["ulp"])


@pytest.mark.long
def test_moments_in_bf16(found):
    assert found["adamw"]["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert max(found["adamw"]["off"]) < 0.01
    assert found["adamw"]["skipped"]


@pytest.mark.long
def test_moments_do_not_freeze(found):
    moment = found["constant"]
    assert moment["mean"] == pytest.approx(moment["exactly"], rel=1e-3)
    assert moment["spread"] < 0.03 * moment["exactly"]
    assert moment["nearest"] < 0.3 * moment["exactly"]


RUN = [*EPOCHS_OF_5, *DROPOUT, *"--num_workers 0 --precision bf16".split()]
HOW = "--mesh_tensor 2 --grad_accum_steps 2 --gather_dtype fp8".split()


@pytest.mark.long
def test_resumed_and_moved(tmp_path):
    rounded, whole_dir = [*RUN, "--optimizer_dtype", "bf16"], tmp_path / "whole"
    flags = [*rounded, *HOW, "--ckpt_step_interval", "7", "--max_steps"]
    whole = train_tiny(whole_dir, *flags, "12", devices=4)
    for told in ("weights gathered in fp8", "moments in bf16"):
        assert told in whole.run_file["backend"]
    for name in ("resumed", "fp32"):
        for path in ("step_7", "run.json", "metrics.jsonl"):
            copy = shutil.copytree if path == "step_7" else shutil.copy
            (tmp_path / name).mkdir(exist_ok=True)
            copy(whole_dir / path, tmp_path / name / path)
    resumed = train_tiny(tmp_path / "resumed", *flags, "12", devices=4)
    assert "at step 7, epoch 2" in resumed.stdout
    for name in ("loss", "grad_norm", "skipped_steps"):
        assert resumed.column(name) == whole.column(name)

    moved = train_tiny(tmp_path / "fp32", *RUN, *HOW, "--max_steps", "9", devices=4)
    assert moved.column("loss")[7:9] == whole.column("loss")[7:9]  # the same masks, too
    on_gpu = train_tiny_gpu(tmp_path / "fp32", *rounded, "--max_steps", "10", processes=2)
    last = train_tiny(tmp_path / "fp32", *rounded, "--xla_fsdp", "nested", "--max_steps", "11")
    for each in (on_gpu, last):
        loss = each.column("loss")[-1]
        assert loss == pytest.approx(whole.column("loss")[len(each.steps) - 1], rel=0.05)

    dtypes = {"whole/step_7": "bf16", "fp32/step_9": "fp32", "fp32/step_10": "bf16"}
    for path, dtype in dtypes.items():
        expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        for entry in convert(tmp_path / path, tmp_path / "plain.pt")["optimizer"]["state"].values():
            assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--fsdp fsdp2 --dp_outer 2", 4),
        ("--fsdp megatron --dp_outer 2", 4),
        ("--fsdp fsdp2 --zero_dp_strategy 0", 2),
        ("--fsdp megatron --zero_dp_strategy 0", 2),
    ],
)
def test_copies_stay_alike(flags, processes):
    flags = ["--backend", "cuda", "--optimizer_dtype", "bf16", *TINY_MODEL, *flags.split()]
    flags += ["--batch_size", "16"]
    done = run_program("-m", "tests.fakes.copies_on_gpu", *flags, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    copies, apart = re.search(r"(\d+) copies, ([\d.]+) apart", done.stdout).groups()
    assert int(copies) >= 2 * 10
    assert float(apart) == 0.0


def test_plans_know_the_moments():
    topology, over, peaks = parse_topology("v5p:4x4x8"), 128, []
    for dtype in ("fp32", "bf16"):
        config, _, shape = asked("--model", VIT_10B, "--optimizer_dtype", dtype)
        candidate = TpuCandidate(Mesh(fsdp=over), "full", 1, "sdpa", topology)
        peaks.append(candidate.estimate(shape, config).peak_bytes)
    assert peaks[0] - peaks[1] == pytest.approx(4 * shape.parameters / over)


@pytest.mark.long
def test_what_the_compiler_says():
    model = (
        "--embed_dim 512 --num_blocks 4 --num_heads 4 --patch_size 16 --image_size 128 "
        "--num_classes 128 --batch_size 64 --precision bf16 --attention sdpa"
    ).split()
    found = []
    for flags in ("--optimizer_dtype bf16 --gather_dtype fp8", ""):
        command = ["--compile_only", "--json", "--tpu_topology", "v5e:2x4", *model, *flags.split()]
        done = run_program("run_vit_training.py", *command)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    rounded, plain = found
    parameters = on_xla(model).model.parameter_count
    assert plain["state_bytes"] == pytest.approx(12 * parameters / 8, rel=0.01)
    assert rounded["state_bytes"] == pytest.approx(8 * parameters / 8, rel=0.01)
    assert rounded["peak_hbm_bytes"] < plain["peak_hbm_bytes"]
    sent = [each["collective_bytes"]["all-gather"] for each in found]
    assert sent[0] == pytest.approx(sent[1] / 2, rel=0.1)


def test_gathered_in_fp8_by_scanned_blocks_alone():
    with pytest.raises(UsageError, match=r"requires scanned blocks, .*\(--no-scan_blocks\)"):
        on_xla("--fake_data --gather_dtype fp8 --no-scan_blocks")
