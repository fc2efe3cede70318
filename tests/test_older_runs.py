"""A run that an older version wrote goes on as it would have gone on there.

tests/data/run_of_40b0636.tar.xz holds ``run.json``, the metrics and the checkpoint of step 4 of a
run of commit 40b0636, which went on to step 8 with the figures below (torch_xla 2.9.0, 2 devices):

    run_vit_training.py --data_dir datasets/digits FLAGS --cpu_devices 2 --max_steps 8
        --ckpt_step_interval 4 --test_step_interval 4

Until step 4 with --scale 0.8 1; crops are drawn in another way now.
"""

import json
import tarfile

import pytest

from tests.cli import DIGITS, ROOT, Result, run_program

FLAGS = (
    "--num_classes 10 --model vit_tiny_patch16_224 --image_size 8 --patch_size 4 --embed_dim 16 "
    "--num_heads 2 --num_blocks 1 --no-class_token --global_pool avg --scale 1 1 --ratio 1 1 "
    "--hflip 0 --batch_size 128 --num_epochs 2 --warmup_steps 4 --lr 4e-3 --num_workers 0 "
    "--log_step_interval 1"
).split()
LOSSES = [2.2502288818359375, 2.2289764881134033, 2.2010624408721924, 2.1774959564208984]
NORMS = [0.8002234101295471, 0.7804762721061707, 0.7511337399482727, 0.6984425783157349]
AT_STEP_4 = {"val_loss": 2.264252176523873, "val_top1": 24.79108635097493, "val_images": 359}
AT_STEP_8 = {"val_loss": 2.199208166605915, "val_top1": 36.211699164345404, "val_images": 359}


@pytest.fixture
def older_run(tmp_path):
    with tarfile.open(ROOT / "tests" / "data" / "run_of_40b0636.tar.xz") as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return tmp_path / "run"


@pytest.mark.parametrize("backend", ["--cpu_devices 2", "--backend cuda"])
def test_goes_on(backend, older_run):
    processes = 2 if "cuda" in backend else 1
    flags = [*FLAGS, *backend.split(), "--data_dir", DIGITS, "--ckpt_dir", older_run]
    done = run_program(
        "run_vit_training.py", *map(str, flags), "--max_steps", "8", processes=processes
    )
    assert done.returncode == 0, done.stderr
    assert f"resuming {older_run}/step_4 at step 4, epoch 1" in done.stdout
    result = Result(older_run)
    rel = 1e-6 if processes == 1 else 1e-4
    assert result.column("loss")[4:] == pytest.approx(LOSSES, rel=rel)
    assert result.column("grad_norm")[4:] == pytest.approx(NORMS, rel=10 * rel)
    assert sorted(result.steps) == list(range(1, 9))
    last = {name: result.evaluations[-1][name] for name in AT_STEP_8}
    assert last == pytest.approx(AT_STEP_8, rel=rel)


def test_evaluates(older_run):
    flags = "--eval_only --json --cpu_devices 2 --batch_size 128".split()
    flags += ["--data_dir", str(DIGITS), "--ckpt_dir", str(older_run)]
    done = run_program("run_vit_training.py", *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in AT_STEP_4} == pytest.approx(AT_STEP_4, rel=1e-6)
