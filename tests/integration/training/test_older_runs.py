"""A run that another version wrote, of this program or of PyTorch, goes on as it would have there.

Each run_of_COMMIT.tar.xz holds ``run.json``, the metrics and the checkpoint of step 4 of a run of
that commit, which went on to step 8 with the figures below (torch_xla 2.9.0, 2 devices):

    run_vit_training.py --data_dir datasets/digits FLAGS --cpu_devices 2 --max_steps 8
        --ckpt_step_interval 4 --test_step_interval 4

That of 40b0636 until step 4 with --scale 0.8 1; crops are drawn in another way now. That of torch
2.14.1 is the one of 3f68fc3 once more, by FSDP2 in two processes: PyTorch 2.9 goes on with it, and
in make test-gpu-path PyTorch 2.14 with all three.
"""

import json
import tarfile
from dataclasses import dataclass, replace

import pytest

from tests.support.cli import ALL_DIGITS, ROOT, Result, need_xla, run_program
from tests.support.marks import long

FLAGS = (
    "--num_classes 10 --model vit_tiny_patch16_224 --image_size 8 --patch_size 4 --embed_dim 16 "
    "--num_heads 2 --num_blocks 1 --no-class_token --global_pool avg --batch_size 128 "
    "--num_epochs 2 --warmup_steps 4 --lr 4e-3 --num_workers 0 --log_step_interval 1"
).split()


@dataclass
class Older:
    """A run of an older version, and what it found in its steps 5 to 8 and its evaluations."""

    flags: str
    losses: list[float]
    norms: list[float]
    at_step_4: dict[str, float]
    at_step_8: dict[str, float]
    rel: float = 1e-6
    """How near it comes to them on XLA."""


RUNS = {
    "40b0636": Older(
        "--scale 1 1 --ratio 1 1 --hflip 0",
        [2.2502288818359375, 2.2289764881134033, 2.2010624408721924, 2.1774959564208984],
        [0.8002234101295471, 0.7804762721061707, 0.7511337399482727, 0.6984425783157349],
        {"val_loss": 2.264252176523873, "val_top1": 24.79108635097493, "val_images": 359},
        {"val_loss": 2.199208166605915, "val_top1": 36.211699164345404, "val_images": 359},
    ),
    "3f68fc3": Older(
        "--model_ema --model_ema_decay 0.9 --layer_decay 0.7 --smoothing 0.1 "
        "--optimizer muon --grad_accum_steps 2",
        [2.306854248046875, 2.300417184829712, 2.2970163822174072, 2.2971835136413574],
        [0.34511587023735046, 0.42167720198631287, 0.3436417281627655, 0.3252318203449249],
        {"val_loss": 2.2874245178732697, "val_top1": 22.284122562674096, "val_images": 359},
        {
            "val_loss": 2.27799428870751,
            "val_top1": 25.62674094707521,
            "val_images": 359,
            "ema_val_loss": 2.2877000686518,
            "ema_val_top1": 21.72701949860724,
        },
    ),
}
RUNS["torch_2.14.1"] = replace(RUNS["3f68fc3"], rel=1e-4)


@pytest.fixture
def older_run(request, tmp_path):
    with tarfile.open(ROOT / "tests" / "older_runs" / f"run_of_{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return tmp_path / "run", RUNS[request.param]


@pytest.mark.parametrize(
    ("older_run", "backend"),
    [
        long("40b0636", "--cpu_devices 2"),
        long("40b0636", "--backend cuda"),
        ("3f68fc3", "--cpu_devices 2"),
        long("3f68fc3", "--backend cuda"),
        long("torch_2.14.1", "--cpu_devices 2"),
        ("torch_2.14.1", "--backend cuda"),
    ],
    indirect=["older_run"],
)
def test_goes_on(backend, older_run):
    folder, older = older_run
    processes = 2 if "cuda" in backend else 1
    if processes == 1:
        need_xla()
    flags = [*FLAGS, *older.flags.split(), *backend.split()]
    flags += ["--data_dir", str(ALL_DIGITS), "--ckpt_dir", str(folder), "--max_steps", "8"]
    done = run_program("run_vit_training.py", *flags, processes=processes)
    assert done.returncode == 0, done.stderr
    assert f"resuming {folder}/step_4 at step 4, epoch 1" in done.stdout
    result = Result(folder)
    rel = older.rel if processes == 1 else 1e-4
    assert result.column("loss")[4:] == pytest.approx(older.losses, rel=rel)
    assert result.column("grad_norm")[4:] == pytest.approx(older.norms, rel=10 * rel)
    assert sorted(result.steps) == list(range(1, 9))
    last = {name: result.evaluations[-1][name] for name in older.at_step_8}
    assert last == pytest.approx(older.at_step_8, rel=rel)


@pytest.mark.parametrize("older_run", RUNS, indirect=True)
def test_evaluates(older_run):
    need_xla()
    folder, older = older_run
    flags = "--eval_only --json --cpu_devices 2 --batch_size 128".split()
    flags += ["--data_dir", str(ALL_DIGITS), "--ckpt_dir", str(folder)]
    done = run_program("run_vit_training.py", *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in older.at_step_4} == pytest.approx(
        older.at_step_4, rel=older.rel
    )
