"""TorchTPU trains as FSDP2 with gloo, by FSDP2 and by SimpleFSDP, and as XLA's SPMD.

Several processes compute the graph of a SimpleFSDP step by PyTorch (torchtpu_on_cpu.py of fakes).
Programs take most of their time to compile: each run here has as many of the flags at once as can
be compared.
"""

import contextlib
import gzip
import itertools
import json
import subprocess

import pytest

from tests.fakes.gcs_server import GCSServer
from tests.support.cli import (
    ROOT,
    TORCHTPU,
    Result,
    environment,
    run_program,
    tiny,
    train_tiny_gpu,
    train_tiny_tpu,
)
from tests.support.curves import assert_same_curves, assert_same_training
from tests.support.dino import DINO
from tests.support.mae import MAE
from tests.support.native_images import flags, write_images
from tools.xspace import Space

FSDP2 = ["--fsdp", "fsdp2"]


def test_several_processes(tiny_on_gpu, tmp_path):
    """As a launch without other flags: the step that each traces, with collectives by gloo."""
    result = train_tiny_tpu(tmp_path, processes=2)
    assert_same_training(result, tiny_on_gpu)
    told = result.run_file["backend"]
    assert told.startswith("TPU: 2 cpu device(s), TorchTPU, SimpleFSDP ZeRO-3, one unit per block")


def test_compiled_blocks(tiny_on_gpu, tmp_path):
    """All is compiled in the first step, and each one after it does the same.

    The optimizer is one graph for each block, not one for each operation.
    """
    result = train_tiny_tpu(tmp_path, *FSDP2)
    assert_same_training(result, tiny_on_gpu)
    told = result.run_file["backend"]
    assert told.startswith("TPU: 1 cpu device(s), TorchTPU, FSDP2 ZeRO-3, one unit per block")
    assert told.endswith("torch.compile")
    assert len(set(result.column("compilations"))) == 1
    executions = result.column("executions")
    (each,) = {after - before for before, after in itertools.pairwise(executions)}
    assert each < 70


def test_no_value_is_read_in_a_step(tmp_path, monkeypatch):
    monkeypatch.setenv("PROGRAM", "tests.fakes.count_at_work")
    train_tiny_tpu(tmp_path, *"--no-compile --model_ema --max_steps 3".split())
    found = json.loads((tmp_path / "counts_0.json").read_text())
    assert found["reads"] == [0] * 6  # forward and backward, then the optimizer


def test_profile(tmp_path):
    """PyTorch's trace, and the files of TorchTPU's own profiler for XProf."""
    train_tiny_tpu(tmp_path, *"--no-compile --profile 2:3 --max_steps 4".split())
    folder = tmp_path / "profile"
    (xspace,) = folder.glob("plugins/profile/*/*_0.xplane.pb")
    names = {event.name for line in Space(xspace).lines() for event in line.events}
    assert {"ProfilerStep", "hook StepLog", "hook Saves"} <= names
    with gzip.open(folder / "trace_0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "hook StepLog", "aten::linear"} <= names


def test_eager_blocks_in_two_processes(tiny_on_gpu, tmp_path):
    """Accumulating over micro-batches equals the large batch, too; ZeRO-2 keeps the weights."""
    flags = "--no-compile --grad_accum_steps 2 --zero_dp_strategy 2".split()
    result = train_tiny_tpu(tmp_path, *flags, processes=2)
    assert "torch.compile" not in result.run_file["backend"]
    assert "mesh fsdp 2" in result.run_file["backend"]
    assert_same_training(result, tiny_on_gpu)


MUON = (
    "--optimizer muon --model_ema --model_ema_decay 0.9 --layer_decay 0.75 --mixup 0.8 "
    "--grad_ckpt selective"
).split()
LION = "--optimizer lion --lr 1e-3 --mesh_dcn 2 --cutmix 1 --no_grad_ckpt".split()


@pytest.mark.long
def test_muon_the_average_and_mixed_images(tmp_path):
    """In two processes, whose shards Muon puts together."""
    there = train_tiny_gpu(tmp_path / "gloo", *MUON, processes=2)
    here = train_tiny_tpu(tmp_path / "tpu", *MUON, processes=2)
    assert_same_training(here, there)
    ours, theirs = (run.evaluations[0]["ema_val_loss"] for run in (here, there))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_lion_with_a_replica_in_each_slice(tmp_path, monkeypatch):
    """The second process is in the first slice: replicas follow the slices, not the ranks."""
    there = train_tiny_gpu(tmp_path / "gloo", *LION, processes=2)
    monkeypatch.setenv("SLICES", "1 0")
    here = train_tiny_tpu(tmp_path / "tpu", *LION, processes=2)
    assert "ranks [[1], [0]]" in here.stderr
    assert "mesh dcn 2," in here.run_file["backend"]
    assert_same_training(here, there)


def test_checkpoint_of_processes_that_are_not_in_order_in_their_slice(tmp_path, monkeypatch):
    """The shards that it names are those that the processes have."""
    flags = "--no-compile --max_steps".split()
    reference = train_tiny_gpu(tmp_path / "reference", "--max_steps", "4")
    monkeypatch.setenv("SLICES", "0 0")
    here = train_tiny_tpu(tmp_path / "run", *flags, "2", processes=2)
    assert "ranks [[0, 1]]" in here.stderr
    moved = train_tiny_gpu(tmp_path / "run", "--max_steps", "4")
    assert "at step 2" in moved.stdout
    assert_same_curves(moved, reference, rel=1e-5)


@pytest.mark.long
def test_rows_of_images_over_processes(tiny_on_gpu, tmp_path):
    result = train_tiny_tpu(tmp_path, "--mesh_domain", "2", "--no-compile", processes=2)
    assert_same_training(result, tiny_on_gpu)


def test_distillation_in_bf16(tiny_on_tpu, tmp_path):
    """Rounded moments too: near the same on the CPU, whose sums are in another order."""
    flags = (
        f"--teacher vit_10b --teacher_weights {tiny_on_tpu.ckpt_dir} --distillation_type soft "
        "--precision bf16 --optimizer_dtype bf16"
    ).split()
    there = train_tiny_gpu(tmp_path / "gloo", *flags)
    here = train_tiny_tpu(tmp_path / "tpu", *flags)
    assert here.column("loss") == pytest.approx(there.column("loss"), rel=0.01)
    assert len(set(here.column("compilations"))) == 1


@pytest.mark.long
def test_masked_autoencoder(tmp_path):
    here, there = (
        train(tmp_path / train.__name__, *MAE) for train in (train_tiny_tpu, train_tiny_gpu)
    )
    assert_same_training(here, there)
    assert len(set(here.column("compilations"))) == 1


@pytest.mark.long
def test_self_distillation(tmp_path):
    """Crops of two sizes, the teacher and the sums of Sinkhorn's iteration over two processes; an
    earlier teacher's Gram matrices."""
    there = train_tiny_gpu(tmp_path / "gloo", *DINO, processes=2)
    flags = [*DINO, "--gram_weights", str(there.ckpt_dir)]
    there = train_tiny_gpu(tmp_path / "gram", *flags, processes=2)
    here = train_tiny_tpu(tmp_path / "tpu", *flags, processes=2)
    for name in ("loss", "loss_dino", "loss_ibot", "loss_koleo", "loss_gram"):
        assert here.column(name) == pytest.approx(there.column(name), rel=1e-5), name
    assert len(set(here.column("compilations")[1:])) == 1  # the second step has some of its own


@pytest.mark.long
def test_native_resolution(tmp_path):
    """Sequences of several images: other ones in each step, in graphs of the same shapes."""
    folder = write_images(tmp_path / "images")
    here, there = (
        train(tmp_path / train.__name__, *flags(folder))
        for train in (train_tiny_tpu, train_tiny_gpu)
    )
    assert_same_curves(here, there, rel=1e-5)
    losses = [run.evaluations[0]["val_loss"] for run in (here, there)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert here.column("images") == there.column("images")
    assert len(set(here.column("compilations"))) == 1


# -- stopping and resuming -------------------------------------------------------------------------

DROPOUT = "--mlp_dropout 0.1 --att_dropout 0.1 --pos_dropout 0.1 --drop_path_rate 0.2".split()
STOPPED = [*DROPOUT, *"--num_workers 1 --ckpt_step_interval 3 --max_steps 8".split()]


@pytest.mark.long
def test_a_run_that_is_stopped_and_killed(tmp_path, monkeypatch):
    """Bit for bit the run that was not: random numbers of the device, and of loader processes.

    Checkpoints are written asynchronously; SIGTERM comes in step 2, and SIGKILL in step 7 leaves
    the one of step 6 or, if it was not complete yet, of step 3.
    """
    whole = train_tiny_tpu(tmp_path / "whole", *STOPPED)
    run = tmp_path / "run"
    monkeypatch.setenv("PROGRAM", "tests.fakes.signal_at_step")
    words = ["-m", TORCHTPU, *tiny(run), *STOPPED]
    monkeypatch.setenv("SIGNAL_AT", "0 2 SIGTERM")
    stopped = run_program(*words)
    assert stopped.returncode == 128 + 15, stopped.stderr
    assert (run / "step_2").is_dir()
    monkeypatch.setenv("SIGNAL_AT", "0 7 SIGKILL")
    assert run_program(*words).returncode == -9
    monkeypatch.delenv("PROGRAM")
    resumed = train_tiny_tpu(run, *STOPPED)
    assert "at step 6" in resumed.stdout or "at step 3" in resumed.stdout
    for name in ("loss", "grad_norm", "lr"):
        assert resumed.column(name) == whole.column(name)
    assert resumed.evaluations == whole.evaluations


# -- checkpoints, and what is done with them -------------------------------------------------------


def train_on_xla(ckpt_dir, *flags) -> Result:
    """By the program's other environment, which `make` has set up."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv with torch_xla here: `make test-torchtpu` sets it up")
    command = [python, "run_vit_training.py", "--backend", "xla", *tiny(ckpt_dir), *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Result(ckpt_dir, done.stdout, done.stderr)


@pytest.mark.long
def test_checkpoint_moves_between_backends(tmp_path):
    """XLA, TorchTPU in two processes, FSDP2 with gloo, XLA on two devices: no loss changes."""
    reference = train_on_xla(tmp_path / "reference", "--max_steps", "8")
    run = tmp_path / "run"
    train_on_xla(run, "--max_steps", "2")
    moved = train_tiny_tpu(run, "--max_steps", "4", processes=2)
    assert "at step 2" in moved.stdout
    train_tiny_gpu(run, "--max_steps", "6")
    moved = train_on_xla(run, "--max_steps", "8", "--cpu_devices", "2")
    assert_same_curves(moved, reference, rel=1e-5)


@pytest.mark.long
def test_checkpoints_in_a_bucket(tiny_on_gpu, tmp_path, monkeypatch):
    """Written by two processes, read by one."""
    with contextlib.closing(GCSServer()) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        url = server.url("run")
        for steps, processes in (("4", 2), ("6", 1)):
            words = ["-m", TORCHTPU, *tiny(url), "--max_steps", steps]
            done = run_program(*words, processes=processes)
            assert done.returncode == 0, done.stdout + done.stderr
        assert f"resuming {url}/step_4 at step 4" in done.stdout
        names = [name for name in server.names("run/step_4/") if name.endswith(".distcp")]
        assert names == ["__0_0.distcp", "__1_0.distcp"]
        (tmp_path / "metrics.jsonl").write_bytes(server.read("run/metrics.jsonl"))
    assert_same_curves(Result(tmp_path), tiny_on_gpu, rel=1e-5)


def test_evaluation_of_a_checkpoint(tiny_on_tpu):
    folder = tiny_on_tpu.ckpt_dir
    done = run_program("-m", TORCHTPU, *tiny(folder), "--eval_only", "--resume", str(folder))
    assert done.returncode == 0, done.stderr
    found = f"val loss: {tiny_on_tpu.evaluations[0]['val_loss']:.4f}"
    assert found in done.stdout


@pytest.mark.long
def test_self_check(tmp_path):
    done = run_program("-m", TORCHTPU, *tiny(tmp_path), "--self_check", processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
