"""A run that ends with numbers that are not finite ends with code 3, and what it saved last is not
resumed."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.references.plain_checkpoint import tiny_timm_model
from tests.support.checkpoints import left
from tests.support.cli import DIGITS, need_xla, run_program, tiny
from tests.support.marks import long
from training import errors

GPU, XLA = "--backend cuda", "--backend xla --cpu_devices 2"
ONCE = "--eval_batches 1 --warmup_steps 0".split()
DIVERGES = [*ONCE, *"--lr 1e4 --weight_decay 1e4 --ckpt_step_interval 1 --max_steps".split()]


def fails(*flags, processes=1):
    """The one line, and the output, of a run that ends with code 3. Of several processes, threads
    of gloo that live on could abort one, with another code."""
    if "xla" in flags:
        need_xla()
    program = ["-m", "tests.fakes.count_at_work"] if processes > 1 else ["run_vit_training.py"]
    done = run_program(*program, *map(str, flags), processes=processes)
    if processes > 1:
        found = [*Path(flags[flags.index("--ckpt_dir") + 1]).glob("counts_*.json")]
        assert found, done.stderr
        assert {json.loads(path.read_text())["threads"] for path in found} == {0}
    lines = [line for line in done.stderr.splitlines() if line.startswith("run_vit_training.py")]
    assert done.returncode == 3 or "exitcode  : 3" in done.stderr, done.stderr
    assert len(lines) == 1
    return lines[0].removeprefix("run_vit_training.py: error: "), done.stdout


@pytest.mark.parametrize(
    ("flags", "processes", "steps", "problem"),
    [
        (GPU, 1, 2, "loss or gradient norm"),
        (GPU, 1, 1, "val loss"),
        long(XLA, 1, 1, "val loss"),
        long(XLA, 1, 2, "loss or gradient norm"),
        long(f"{GPU} --precision bf16 --model_ema", 2, 2, "loss or gradient norm"),
        long(f"{XLA} --precision bf16 --no-scan_blocks --model_ema", 1, 1, "val loss"),
    ],
)
def test_last_step(flags, processes, steps, problem, tmp_path):
    run = [*tiny(tmp_path), *flags.split(), *DIVERGES, steps]
    line, _ = fails(*run, processes=processes)
    before = [1] if steps == 2 else []
    good = tmp_path / "step_1" if before else "none"
    assert line.startswith(f"the {problem} of the last step is not finite, so step_{steps} was set")
    assert f"the last good checkpoint is {good}; try a lower --lr, " in line
    assert left(tmp_path) == before
    assert left(tmp_path / "set_aside_1") == [steps]
    last_event = (tmp_path / "events.jsonl").read_text().splitlines()[-2]
    assert json.loads(last_event)["how"] == "failed"


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """Weights of which one is NaN."""
    weights = tiny_timm_model().state_dict()
    weights["blocks.1.mlp.fc1.weight"][3, 4] = float("nan")
    torch.save(weights, path := tmp_path_factory.mktemp("weights") / "spoiled.pt")
    return path


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (GPU, 1),
        long(f"{GPU} --model_ema", 2),
        long(f"{XLA} --model_ema --no_async_checkpoint", 1),
        long(f"{XLA} --no-scan_blocks", 1),
    ],
)
@pytest.mark.parametrize("step", [3, long(1)])
def test_weights(step, flags, processes, spoiled, tmp_path):
    run, local = tmp_path / "run", tmp_path / "local"
    flags = [*flags.split(), *ONCE, "--init_from", spoiled, "--local_ckpt_dir", local]
    flags += ["--local_ckpt_step_interval", 1, "--ckpt_step_interval", step, "--max_steps", 3]
    line, output = fails(*tiny(run), *flags, processes=processes)
    told = f"model.blocks.1.mlp.fc1.weight is not finite after step {step}, so this step is not "
    assert line.startswith(told)
    assert left(run) == []
    assert not list(run.glob("set_aside_*"))
    assert not list(local.glob("part_0/step_*"))  # no step is whole
    assert step == 1 or "model.blocks.1.mlp.fc1.weight is not finite); training" in output


def test_evaluation_alone(spoiled, tmp_path):
    flags = [*tiny(tmp_path / "run"), *GPU.split(), "--eval_only", "--json", "--resume", spoiled]
    line, output = fails(*flags)
    assert line == f"the val loss of {spoiled} is not finite"
    assert json.loads(output)["val_loss"] is None


def test_an_evaluation_of_no_image(tmp_path):
    data, classes = tmp_path / "data", [path.name for path in (DIGITS / "train").iterdir()]
    for name in classes:
        (data / "val" / name).mkdir(parents=True)
        (data / "val" / name / "broken.png").write_bytes(b"no image")
    (data / "train").symlink_to(DIGITS / "train")
    flags = [*"--backend cuda --max_steps 1 --max_bad_images 100%".split(), "--data_dir", str(data)]
    for _ in range(2):
        done = run_program("run_vit_training.py", *tiny(tmp_path / "run"), *flags)
        assert done.returncode == 0, done.stderr
        assert left(tmp_path / "run") == [1]


@pytest.mark.parametrize(
    "error",
    [
        errors.not_finite_error("step 3 is not finite", Path("run/step_2")),
        errors.RunFailed("the images are gone", errors.NO_BATCH),
        errors.StoppedBySignal(143),
        errors.UsageError("give another --lr"),
        errors.SelfCheckFailed(),
    ],
)
def test_errors_reach_the_process_that_started_this_one(error):
    """Nested FSDP has a process a chip, whose pool pickles what they raise."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        found = pool.submit(_raise, error).exception()
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert getattr(found, "exit_code", None) == getattr(error, "exit_code", None)


def _raise(error):
    raise error
