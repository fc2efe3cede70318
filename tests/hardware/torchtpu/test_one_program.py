"""SimpleFSDP by TorchTPU: a training step is one program, and trains as FSDP2 with gloo.

With one process: XLA's plugin for the processor has no collectives between processes.
tests/integration/torch_fsdp/test_simple_fsdp.py runs the same graphs in several, with gloo.
"""

import shutil
import sys

import pytest

from tests.support.cli import (
    TORCHTPU,
    Result,
    run_program,
    tiny,
    train_tiny_gpu,
    train_tiny_tpu,
)
from tests.support.curves import (
    assert_same_curves,
    assert_same_evaluations,
    assert_same_training,
)
from tests.support.dino import DINO
from tests.support.launching import finish, free_port, start
from tests.support.mae import MAE
from tests.support.marks import long
from tests.support.pairs import PAIR_FLAGS
from tests.support.resuming import DROPOUT

SIMPLE = ["--fsdp", "simple"]


def test_a_step_is_one_program(tiny_on_gpu, tmp_path):
    """The program counts those outside of graphs; the plugin, which counts all, has one more for
    each step that follows the first."""
    counts = []
    for steps in (3, 6):
        file = tmp_path / f"executions of {steps}"
        flags = [*tiny(tmp_path / str(steps)), *SIMPLE, "--max_steps", str(steps)]
        done = run_program(
            "-m", TORCHTPU, *flags, warm=False, variables={"PJRT_EXECUTIONS": str(file)}
        )
        assert done.returncode == 0, done.stderr
        counts.append(file.stat().st_size)
    run = Result(tmp_path / "6")
    assert_same_training(run, tiny_on_gpu)
    assert "SimpleFSDP ZeRO-3, one unit per block, one graph per step" in run.run_file["backend"]
    for name in ("compilations", "executions"):
        assert len(set(run.column(name))) == 1
    assert counts[1] - counts[0] == 3


AVERAGED = "--model_ema --model_ema_decay 0.9 --clip_grad_norm 0.3 --cutmix 1".split()
CASES = [
    (["--no_grad_ckpt", "--grad_accum_steps", "2", "--optimizer", "lion", "--lr", "1e-3"], 1e-5),
    long([*AVERAGED, "--grad_ckpt", "selective"], 1e-5),
    long(["--optimizer", "muon", "--layer_decay", "0.75", "--model_ema"], 1e-5),
    long(["--precision", "bf16", "--optimizer_dtype", "bf16"], 1e-2),
    long(MAE, 1e-5),
    long(DINO, 2e-5),
    long([*PAIR_FLAGS, "--grad_accum_steps", "2"], 2e-5),
]


@pytest.mark.parametrize(("flags", "rel"), CASES)
def test_same_as_fsdp2(flags, rel, tmp_path):
    fsdp2 = train_tiny_gpu(tmp_path / "gloo", *flags)
    simple = train_tiny_tpu(tmp_path / "tpu", *SIMPLE, *flags)
    assert_same_curves(simple, fsdp2, rel)
    assert_same_evaluations(simple, fsdp2, rel)


def test_weights_gathered_in_fp8(tmp_path):
    """In steps and evaluations. (--matmul puts a module into the program, for which torch_tpu asks
    XLA's plugin for the processor what it cannot tell: test_compile_only.py.)"""
    flags = [*SIMPLE, "--precision", "bf16", "--gather_dtype", "fp8"]
    gloo = train_tiny_gpu(tmp_path / "gloo", *flags, "--compile")
    found = train_tiny_tpu(tmp_path / "tpu", *flags)
    assert found.column("loss") == pytest.approx(gloo.column("loss"), rel=1e-3)
    assert_same_evaluations(found, gloo, rel=1e-3)


@pytest.mark.long
def test_resume_is_exact_and_dropout_the_same_on_the_cpu(tmp_path):
    flags = [*SIMPLE, *DROPOUT, "--grad_accum_steps", "2"]
    whole = train_tiny_tpu(tmp_path / "whole", *flags, "--ckpt_step_interval", "3")
    run = tmp_path / "run"
    shutil.copytree(whole.ckpt_dir / "step_3", run / "step_3")
    resumed = train_tiny_tpu(run, *flags)
    for name in ("loss", "grad_norm", "lr"):
        assert resumed.column(name) == whole.column(name)[3:]
    on_the_cpu = train_tiny_gpu(tmp_path / "gloo", *flags, "--compile")
    assert_same_curves(whole, on_the_cpu, rel=1e-5)


@pytest.mark.long
def test_checkpoint_moves_to_fsdp2_and_back(tmp_path):
    reference = train_tiny_gpu(tmp_path / "reference", "--max_steps", "6")
    run = tmp_path / "run"
    train_tiny_tpu(run, "--fsdp", "fsdp2", "--max_steps", "2")
    train_tiny_tpu(run, *SIMPLE, "--max_steps", "4")
    moved = train_tiny_gpu(run, "--max_steps", "6", processes=2)
    assert_same_curves(moved, reference, rel=1e-5)


def test_processes_that_trace_different_steps(tmp_path):
    """Both end before they compile them: their collectives would wait for each other for ever."""
    group = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "FAULT_AT": "loss 9 9",  # of a later step, for which the loss of each is multiplied by 1
    }
    programs = ["run_vit_training", "tests.fakes.fault_at_step"]
    processes = [
        start(
            *(sys.executable, "-m", TORCHTPU, *tiny(tmp_path), *SIMPLE),
            **(group | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PROGRAM": program}),
        )
        for rank, program in enumerate(programs)
    ]
    for process in processes:
        code, _, stderr = finish(process)
        assert code == 1, stderr
        assert "the processes have traced different steps" in stderr


def test_a_batch_of_an_evaluation_is_one_program(tiny_on_gpu, tmp_path):
    """Its weights are those of the step, or their average, at each evaluation."""
    counts = []
    averaged = "--model_ema --model_ema_decay 0.5 --test_step_interval 2".split()
    for batches in (2, 5):
        file = tmp_path / f"executions of {batches}"
        flags = [*tiny(tmp_path / str(batches)), *SIMPLE, *averaged]
        done = run_program(
            *("-m", TORCHTPU, *flags, "--eval_batches", str(batches)),
            warm=False,
            variables={"PJRT_EXECUTIONS": str(file)},
        )
        assert done.returncode == 0, done.stderr
        counts.append(file.stat().st_size)
    evaluations = 2 * 3  # of the weights and of their average, after 2, 4 and 6 steps
    assert counts[1] - counts[0] == evaluations * 3
    fsdp2 = train_tiny_gpu(tmp_path / "gloo", *averaged, "--eval_batches", "5")
    assert_same_evaluations(Result(tmp_path / "5"), fsdp2, 1e-5)
