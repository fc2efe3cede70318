"""Training stopped by a signal: a checkpoint after the step, then the run as if never stopped."""

import fcntl
import os
import pickle
import pty
import signal
import subprocess
import termios
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

from tests.integration.launch.test_launch_gpu import TORCHRUN, finish, start
from tests.support.cli import (
    DIGITS,
    ROOT,
    TINY_MODEL,
    TINY_RUN,
    Result,
    command_of,
    need_xla,
    run_program,
    tiny,
    train_tiny,
    train_tiny_gpu,
)
from tests.support.marks import long
from tests.support.stopping import ALONE, RUN, stop
from training.errors import NOT_FINITE, SIGNAL
from training.processes.stopping import StopRequest, process_signals

BACKENDS = {
    "xla": ("--backend xla --cpu_devices 2", 1, train_tiny),
    "cuda": ("--backend cuda", 2, train_tiny_gpu),
}


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """Run once a backend: what the stopped and resumed run has to equal."""
    done = {}

    def run(name):
        if name not in done:
            flags, processes, train = BACKENDS[name]
            how = {"processes": processes} if processes > 1 else {}
            done[name] = train(tmp_path_factory.mktemp(name), *RUN, *flags.split(), **how)
        return done[name]

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "name", "workers", "code"),
    [("xla", "SIGTERM", "1", 143), ("cuda", "SIGTERM", "1", 143), ("cuda", "SIGINT", "0", 130)],
)
def test_stop_and_resume(backend, name, workers, code, whole_runs, tmp_path, monkeypatch):
    flags, processes, train = BACKENDS[backend]
    flags = [*flags.split(), "--num_workers", workers]
    how = {"processes": processes} if processes > 1 else {}
    whole = whole_runs(backend)
    stopped = stop(monkeypatch, tmp_path, f"{processes - 1} 6 {name}", *flags, **how)
    step = 6 if processes == 1 else 7  # the others learn of it one step later
    assert f"training stopped by {name}: step {step}," in stopped.stdout, stopped.stderr
    assert stopped.stdout.count("training stopped") == 1
    assert "training completed" not in stopped.stdout
    if processes == 1:
        assert stopped.returncode == code
        assert "Traceback" not in stopped.stderr
    else:  # torchrun's own code is 1, its report names that of the first to end
        assert f"exitcode  : {code} " in stopped.stderr
    assert [path.name for path in tmp_path.glob("step_*")] == [f"step_{step}"]
    resumed = train(tmp_path, *RUN, *flags, **how)
    assert f"at step {step}, epoch 2" in resumed.stdout
    assert list(resumed.steps) == list(range(1, 10))
    for column in ("loss", "grad_norm", "lr"):
        assert resumed.column(column) == whole.column(column)
    assert resumed.evaluations == whole.evaluations


def test_nested_stops(tmp_path, monkeypatch):
    need_xla()
    flags = "--backend xla --cpu_devices 1 --xla_fsdp nested".split()
    stopped = stop(monkeypatch, tmp_path, "0 6 SIGINT SIGINT", *flags)
    assert stopped.returncode == 130
    assert "training stopped by SIGINT: step 6," in stopped.stdout
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_6"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_torchrun_told_to_end(name, tmp_path):
    """It tells all processes of all process groups, loaders too, and waits."""
    source = ["--data_dir", DIGITS, "--ckpt_dir", tmp_path, *TINY_MODEL, *TINY_RUN]
    endless = "--num_epochs 9999 --max_steps 99999 --num_workers 1".split()
    run = start(TORCHRUN, *source, *endless, NPROC_PER_NODE="2")
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.Signals[name])
    code, stdout, stderr = finish(run)
    assert code != 0
    assert stdout.count(f"training stopped by {name}: step ") == 1, stderr
    (checkpoint,) = tmp_path.glob("step_*")
    assert f"checkpoint {checkpoint}; the same command resumes there" in stdout
    assert "DataLoader worker" not in stderr


@pytest.mark.parametrize(
    ("backend", "ignored"), [("cuda", False), long("cuda", True), long("xla", False)]
)
def test_a_terminal_is_closed(backend, ignored, tmp_path):
    """The kernel signals the program, a shell all of its processes; nothing can be printed then.
    Under nohup training goes on."""
    if backend == "xla":
        need_xla()
    flags = [*tiny(tmp_path), *RUN, "--backend", backend, "--num_workers", "1"]
    if not ignored:
        flags += ["--num_epochs", "9999", "--max_steps", "99999"]
    words, variables = command_of("run_vit_training.py", *flags, warm=False)

    def begin() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if ignored:  # as nohup does
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    terminal, end = pty.openpty()
    how = {"cwd": ROOT, "env": variables, "start_new_session": True, "preexec_fn": begin}
    run = subprocess.Popen(words, stdin=end, stdout=end, stderr=end, **how)
    os.close(end)
    printed = b""
    while b"step 2," not in printed:
        printed += os.read(terminal, 65536)
    os.close(terminal)
    os.killpg(run.pid, signal.SIGHUP)
    assert run.wait(240) == (0 if ignored else 129)
    (checkpoint,) = tmp_path.glob("step_*")
    trained = Result(tmp_path)
    assert list(trained.steps) == list(range(1, int(checkpoint.name[5:]) + 1))
    assert len(trained.steps) == 9 or not ignored


def test_no_second_checkpoint_of_the_same_step(tmp_path, monkeypatch):
    flags = [*ALONE, "--ckpt_step_interval", "3"]
    stopped = stop(monkeypatch, tmp_path, "0 6 SIGTERM", *flags)
    assert stopped.returncode == 143
    assert stopped.stdout.count("checkpoint: ") == 2
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_3", "step_6"]


def test_second_sigint_acts_at_once(tmp_path, monkeypatch):
    stopped = stop(monkeypatch, tmp_path, "0 6 SIGTERM SIGTERM SIGINT", *ALONE)
    assert stopped.returncode == 130
    assert "stopping after this step" in stopped.stderr
    assert stopped.stderr.endswith("run_vit_training.py: interrupted\n")
    assert not list(tmp_path.glob("step_*"))


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", -signal.SIGTERM), ("SIGINT", 130)])
def test_before_the_first_step_is_done(name, code, tmp_path, monkeypatch):
    stopped = stop(monkeypatch, tmp_path, f"0 1 {name}", *ALONE)
    assert stopped.returncode == code
    assert not list(tmp_path.glob("step_*"))


def test_signal_in_the_last_step_stops_the_evaluation_alone(tmp_path, monkeypatch):
    stopped = stop(monkeypatch, tmp_path, "0 9 SIGTERM", *ALONE)
    assert stopped.returncode == 143
    assert f"step 9, checkpoint {tmp_path}/step_9; the same command resumes" in stopped.stdout
    done = train_tiny_gpu(tmp_path, *RUN, *ALONE)
    assert "training completed: step 9" in done.stdout
    assert [record["step"] for record in done.evaluations] == [9]


def _note_in_a_thread(signals, number):
    """As torch_xla runs nested FSDP: the function in a thread of a process of a pool."""

    def work():
        assert threading.current_thread() is not threading.main_thread()
        signals.install()
        signals.listen("")
        signal.raise_signal(number)
        return None

    with ThreadPoolExecutor() as threads:
        threads.submit(work).result()
    return signals.noted


def test_a_failure_counts_for_more_than_a_signal():
    """Both may come after the same step; only a signal's checkpoint is written for sure."""
    stop = StopRequest(SimpleNamespace(is_main=True))
    assert not stop.due()
    assert stop.exit_code == 0
    process_signals.noted = signal.SIGTERM
    try:
        assert stop.due()
        assert stop.exit_code == SIGNAL + signal.SIGTERM
        stop.ask(NOT_FINITE)
        assert stop.due()
        assert stop.exit_code == NOT_FINITE
    finally:
        process_signals.restore()


@pytest.mark.long
def test_signals_are_noted_in_the_processes_of_nested_fsdp():
    assert pickle.loads(pickle.dumps(process_signals)) is process_signals
    process_signals.restore()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        noted = pool.submit(_note_in_a_thread, process_signals, signal.SIGTERM).result()
    assert noted == signal.SIGTERM


def test_a_crash_ends_at_once():
    """Exit handlers are called and what was printed is there; no thread is waited for."""
    program = """
import atexit, threading
from training.processes.parent import end_at_once
threading.Thread(target=threading.Event().wait).start()
atexit.register(print, "exit handler")
print("printed", end=", ")
end_at_once(7)
"""
    done = run_program("-c", program, warm=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "printed, exit handler\n", "")
