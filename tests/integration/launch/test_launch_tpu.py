"""launch.xla_dist over a stand-in for gcloud, whose workers are processes of this machine."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import NON_RETRYABLE, is_crash, xla_dist
from launch import slices as slices_module
from launch.pod import GRACE_SECONDS
from launch.pod_worker import WAITS
from launch.slices import APIS
from tests.fakes.pod import REMOTE, read_until, wait_until
from tests.support.cli import (
    DIGITS,
    ROOT,
    TINY_MODEL,
    TINY_RUN,
    WARM_PYTHON,
    environment,
    tiny,
    train_tiny_gpu,
    warm_python,
)
from tests.support.launching import KILL_ONE, finish, free_port, losses, refused, script, warm
from training.errors import BAD_IMAGES


@pytest.fixture(params=APIS)
def pod(request, pod_of):
    """Four workers, of a TPU VM or of an instance group on Compute Engine."""
    pod = pod_of(4)
    pod.api = request.param
    if pod.api == "compute":
        (pod.folder / "compute").touch()
    return pod


# -- what arrives ---------------------------------------------------------------------

NASTY = [
    "",
    " ",
    "a b",
    "it's",
    '"quoted"',
    "$HOME `id` $(id)",
    "back\\slash\\n",
    "two\nlines",
    "*",
    "~",
    "ünï ☃ 你好",
    "--",
    "--tpu=other",
    "!x; exit 7 #",
    "-c",
    "\t",
    "100%",
    "a=b",
    "\udcff",
]


def test_arguments_and_environment_arrive_as_given(pod):
    """Four workers; each gets the command it was given, to the byte."""
    values = {f"V{i}": text for i, text in enumerate(NASTY)} | {"PJRT_DEVICE": "CPU"}
    flags = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    code, _, stderr = pod.run(sys.executable, REMOTE, "save", *NASTY, flags=(*flags,))
    assert code == 0, stderr
    for index in range(4):
        arrived = json.loads((pod.folder / f"worker_{index}" / "arrived").read_text())
        assert arrived["argv"] == NASTY
        assert {name: arrived["env"][name] for name in values} == values
        assert arrived["cwd"] == str(pod.folder / f"worker_{index}")


def test_each_worker_knows_the_slice(pod):
    """As gcloud describes it; what the user sets stays."""
    names = "NNODES NODE_RANK MASTER_ADDR NODE_ADDRESSES TORCH_TPU_TOPOLOGY".split()
    shown = ["sh", "-c", 'for name; do eval echo "$name=\\$$name"; done', "sh", *names]
    code, stdout, stderr = pod.run(*shown, flags=("--env", "TORCH_TPU_TOPOLOGY=4,2,1"))
    assert code == 0, stderr
    for index in range(4):
        assert [line for line in stdout.splitlines() if f"worker {index}" in line] == [
            f"[worker {index}] NNODES=4",
            f"[worker {index}] NODE_RANK={index}",
            f"[worker {index}] MASTER_ADDR=127.0.0.1",
            f"[worker {index}] NODE_ADDRESSES=127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4",
            f"[worker {index}] TORCH_TPU_TOPOLOGY=4,2,1",
        ]
    _, stdout, _ = pod.run("sh", "-c", "echo $TORCH_TPU_TOPOLOGY")
    assert "[worker 3] 2,4,1" in stdout.splitlines()


def test_output_is_prefixed_line_by_line_and_logged(pod):
    """A bar that overwrites itself is cut down; a line without an end comes in pieces."""
    program = (
        "import sys, time\n"
        "for i in range(1000): print(f'\\r{i:4d} of 1000', end='', file=sys.stderr, flush=True)\n"
        "print('\\nafter', file=sys.stderr)\n"
        "print('x' * 100_000 + '\\r', end='\\n')\n"
        "print('no end', end='')"
    )
    code, stdout, stderr = pod.run(sys.executable, "-c", program)
    assert code == 0
    pieces = ["no end", "x" * 65536, "x" * (100_000 - 65536)]
    assert sorted(stdout.splitlines()) == sorted(
        f"[worker {i}] {piece}" for i in range(4) for piece in pieces
    )
    for index in range(4):
        said = [line for line in stderr.split("\n") if line.startswith(f"[worker {index}]")]
        assert said[0] == f"[worker {index}]    0 of 1000"
        assert said[-2:] == [f"[worker {index}]  999 of 1000", f"[worker {index}] after"]
        assert len(said) < 100  # a second or so
        log = (pod.logs / f"worker_{index}.log").read_text()
        shown = [line.removeprefix(f"[worker {index}] ") for line in said]
        assert sorted(log.splitlines()) == sorted([*shown, *pieces])
    assert "\r" not in stderr


def test_dry_run_prints_what_would_be_run(pod):
    """The printed line, given to a shell, does what the launcher does; nothing is run before."""
    flags = ("--dry_run", "--zone=us-central2-b", "--project=p q", "--internal-ip")
    flags += (f"--tpu_api={pod.api}",)
    code, stdout, stderr = pod.run("printf", "<%s>\n", "it's", flags=flags)
    assert (code, stderr) == (0, "")
    assert not (pod.folder / "calls").exists()
    assert not pod.logs.exists()
    describe, comment, ssh = stdout.splitlines()
    shared = "--zone=us-central2-b '--project=p q'"
    what, worker = {
        "tpu": ("tpus tpu-vm", "tpus tpu-vm ssh pod --worker=0 "),
        "compute": ("instance-groups managed", "ssh VM-OF-pod "),
    }[pod.api]
    assert describe == f"gcloud compute {what} describe pod --format=json --quiet {shared}"
    assert comment.startswith("# ")
    assert ssh.startswith(f"gcloud compute {worker}'--command=")
    ssh = ssh.replace("VM-OF-pod", "pod-vmz")
    for word in (shared, "--internal-ip", "--ssh-flag=-oServerAliveInterval=30"):
        assert word in ssh
    pipe = subprocess.PIPE  # stdin stays open while the command runs
    with subprocess.Popen(["bash", "-c", ssh], env=pod.variables, stdin=pipe, stdout=pipe) as run:
        assert run.stdout is not None
        assert run.stdout.read() == b"<it's>\n"
        assert run.wait() == 0


SECRET = "s3cr3t-of-a-token"
FIND_SECRET = """
import os, pathlib, sys, time
assert os.environ["TOKEN"] == sys.argv[1][::-1]
print("ready", flush=True)
time.sleep(600)
"""


def test_no_command_line_has_a_secret(pod):
    """Nor has a file that is left: all processes' command lines are read while the programs run."""
    command = [sys.executable, "-c", FIND_SECRET, SECRET[::-1]]
    run = pod.launch(*command, flags=("--env", "TOKEN", "--env", "A=b"), TOKEN=SECRET)
    read_until(run, "ready", 4)
    words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    run.send_signal(signal.SIGTERM)
    code, stdout, stderr = finish(run)
    assert code == 143, stderr
    assert sum(b"pod_worker" in each or b"zlib" in each for each in words) >= 8  # client and worker
    assert not [each for each in words if SECRET.encode() in each]
    assert SECRET not in stdout + stderr
    assert "values of --env" not in stdout + stderr
    files = [path for path in pod.folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_dry_runs_name_variables_alone(pod):
    flags = ("--dry_run", "--env", f"TOKEN={SECRET}", f"--tpu_api={pod.api}")
    code, stdout, stderr = pod.run("sh", "-c", 'echo "$TOKEN"', flags=flags)
    assert (code, stderr) == (0, "")
    assert SECRET not in stdout
    _, comment, ssh = stdout.splitlines()
    assert comment.endswith("; it reads TOKEN from stdin, as a line of JSON")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = ["bash", "-c", ssh.replace("VM-OF-pod", "pod-vmz")]
    with subprocess.Popen(command, env=pod.variables, text=True, **pipes) as run:
        run.stdin.write(json.dumps({"TOKEN": SECRET}) + "\n")
        run.stdin.flush()
        assert run.stdout.readline() == f"{SECRET}\n"
        assert run.wait() == 0


def test_a_signal_before_the_values_is_obeyed(pod):
    """A signal to the launcher while the connection is made; a value may look like the end."""
    source = (ROOT / "launch" / "pod_worker.py").read_text()
    task = {"job": "j", "attempt": 0, "env": {}, "awaits": ["A"], "workdir": "~", "grace": 9}
    task |= {"command": ["sleep", "60"], "end_all": False}
    done = subprocess.run(
        [sys.executable, "-c", source, json.dumps(task)],
        input='SIGTERM\n{"A": "x}"}\n',
        env=pod.variables | {"TMPDIR": str(pod.folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 143
    assert done.stderr == f"xla_dist: {WAITS}\n"


@pytest.mark.parametrize("how", ["link", "file", "open", "other"])
def test_a_folder_of_others_is_not_used(pod_of, how):
    """Under a name in the temporary folder that anybody can guess."""
    pod = pod_of(1)
    home = pod.folder / "worker_0"
    home.mkdir()
    folder = home / f"xla_dist-{os.getuid()}"
    if how == "link":
        (home / "elsewhere").mkdir()
        folder.symlink_to("elsewhere")
    elif how == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777 if how == "open" else 0o700)
    if how == "other":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    code, stdout, stderr = pod.run("echo", "started", flags=("--max_restarts", "3"))
    assert (code, stdout) == (2, "")
    assert f"xla_dist: error: other users can write to {folder}: remove it" in stderr
    assert "restarting" not in stderr
    assert not [*(home / "elsewhere").glob("*")]


def test_the_workers_end_needs_no_new_python():
    """Images of TPU VMs bring 3.8 or 3.10; what runs there is this file alone."""
    source = (ROOT / "launch" / "pod_worker.py").read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported <= sys.stdlib_module_names
    assert "from launch" not in source


# -- failure, signals, restarts -------------------------------------------------------


def test_failure_ends_the_others(pod):
    """One program crashes; the others are told, one of them does not listen. It is not waited for
    as long as for a checkpoint."""
    run = pod.launch(sys.executable, REMOTE, "fail", "1", "deaf", "2")
    code, _, stderr = finish(run, timeout=GRACE_SECONDS - 20)
    assert code == 7
    assert "xla_dist: worker 1 failed with exit code 7" in stderr
    assert f"{pod.logs}/worker_1.log; stopping the other 3" in stderr
    assert pod.received() == {0: "SIGTERM\n", 2: "SIGTERM\n", 3: "SIGTERM\n"}
    for index in range(4):
        assert "ready" in (pod.logs / f"worker_{index}.log").read_text()
    assert len(pod.calls()) == 4  # no restart


def test_what_is_a_crash():
    """Not what all do together: a mistake, a stop by a signal, a connection that broke."""
    together = [0, *NON_RETRYABLE, 129, 130, 143, 254, 255]
    assert not any(map(is_crash, together))
    assert all(is_crash(code) for code in (1, 7, 127, 134, 137, 139, -9, -11))


@pytest.mark.parametrize(
    ("sent", "received", "code"),
    [("SIGINT", "SIGINT", 130), ("SIGTERM", "SIGTERM", 143), ("SIGHUP", "SIGTERM", 143)],
)
def test_signals_reach_the_programs(pod, sent, received, code):
    """Each program and its child get the signal once, and end by themselves, with a last line; also
    where a terminal and ``timeout`` both send it."""
    run = pod.launch(sys.executable, REMOTE, "wait", flags=("--max_restarts", "2"))
    read_until(run, "ready", 4)
    for _ in range(2):
        run.send_signal(signal.Signals[sent])
    ended, stdout, stderr = finish(run)
    assert ended == code
    assert f"xla_dist: forwarded {sent} to 4 worker(s)" in stderr
    assert sorted(stdout.splitlines()) == [f"[worker {i}] checkpoint written" for i in range(4)]
    assert pod.received() == dict.fromkeys(range(4), f"{received}\n")
    assert len(pod.calls()) == 4  # stopped, not failed: no restart


def test_ctrl_c_again_kills(pod):
    run = pod.launch(sys.executable, REMOTE, "deaf", "0", "deaf", "1", "deaf", "2", "deaf", "3")
    read_until(run, "ready", 4)
    run.send_signal(signal.SIGINT)
    wait_until(lambda: len(pod.received()) == 4)
    assert run.poll() is None
    time.sleep(0.6)
    run.send_signal(signal.SIGINT)
    code, _, stderr = finish(run)
    assert code == 137
    assert "killing the programs on the workers" in stderr
    assert pod.received() == dict.fromkeys(range(4), "SIGINT\n")


def test_programs_end_with_the_launcher_and_with_a_connection(pod):
    """Killed without a word, launcher or client: nothing is left on the workers."""
    run = pod.launch(sys.executable, REMOTE, "wait")
    read_until(run, "ready", 4)
    os.kill(int((pod.folder / "worker_2" / "client").read_text()), signal.SIGKILL)
    code, _, stderr = finish(run)
    assert code == 137
    assert "worker 2 failed" in stderr
    pod.wait_until_gone()
    assert pod.received() == dict.fromkeys(range(4), "SIGTERM\n")

    shutil.rmtree(pod.folder / "worker_2")
    run = pod.launch(sys.executable, REMOTE, "wait")
    read_until(run, "ready", 4)
    run.kill()
    finish(run)
    pod.wait_until_gone()
    assert pod.received()[2] == "SIGTERM\n"


def test_gcloud_connects_again_after_a_break(pod):
    """It gives the same command once more: the program is ended, not started a second time."""
    run = pod.launch(sys.executable, REMOTE, "wait", "deaf", "1", flags=("--grace", "1"))
    read_until(run, "ready", 4)
    (call,) = [call for call in pod.calls() if {"--worker=1", "pod-vmy"} & {*call}]
    again = subprocess.run(
        [pod.folder / "bin" / "gcloud", *call],
        env=pod.variables,
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 254
    assert "the connection to this worker was lost" in again.stderr
    assert "ready" not in again.stdout
    code, _, stderr = finish(run)
    assert code == 137
    assert "worker 1 failed" in stderr


def test_restart_flag_ends_what_was_left(pod_of):
    """A program whose wrapper was killed; an ordinary run leaves it, as two may share workers."""
    pod = pod_of(1, alone=True)  # with more workers, each would end the others' programs
    home = pod.folder / "worker_0"
    home.mkdir()
    orphan = subprocess.Popen(
        [sys.executable, REMOTE, "wait"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        cwd=home,
        env=environment() | {"HOME": str(home), "RANK": "0", "XLA_DIST_JOB": "another"},
    )
    assert orphan.stdout
    orphan.stdout.readline()
    assert pod.run("true")[0] == 0
    assert orphan.poll() is None
    code, _, stderr = pod.run("true", flags=("--restart-tpuvm-pod-server",))
    assert code == 0
    assert "left over from an earlier run" in stderr
    assert orphan.wait() == 143


def test_restarted_training_resumes(pod_of, tmp_path):
    """Two workers train together; the second dies in step 5, the restart goes on from step 4."""
    pod = pod_of(2)
    variables = {"WARM_PYTHON": warm_python(), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": free_port(), "PYTHONPATH": str(ROOT)}
    flags = [word for item in variables.items() for word in ("--env", "=".join(item))]
    once = 'mkdir "$HOME/once" 2> /dev/null && kill=5 || kill=99; SIGNAL_AT="1 $kill SIGKILL" "$@"'
    training = [sys.executable, WARM_PYTHON, "-m", "tests.fakes.signal_at_step"]
    training += ["--data_dir", DIGITS, *TINY_MODEL, *TINY_RUN]
    # Beside training the checkpoint of step 4 might be written still when the death comes.
    training += "--backend cuda --ckpt_step_interval 2 --no_async_checkpoint".split()
    command = ["sh", "-c", once, "sh", *training, "--ckpt_dir"]
    flags += ["--workdir", str(ROOT), "--grace", "2"]
    run = pod.launch(*command, tmp_path / "run", flags=(*flags, "--max_restarts", "1"))
    code, stdout, stderr = finish(run)
    assert code == 0, stdout + stderr
    assert "restarting all workers; 0 restart(s) left" in stderr
    assert f"[worker 0] resuming {tmp_path}/run/step_4 at step 4" in stdout
    assert "[worker 0] training completed: step 6" in stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["devices"] == 2
    code, _, stderr = finish(pod.launch(*command, tmp_path / "whole", flags=(*flags,)))
    assert code == 0, stderr  # `once` is there already
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def a_process_a_device(*variables: str) -> tuple[str, ...]:
    """xla_dist's flags for launch/torchrun.sh with two processes a worker of this machine."""
    own = ("NPROC_PER_NODE=2", f"PYTHON={sys.executable}", f"MASTER_PORT={free_port()}")
    words = [word for item in (*own, *variables) for word in ("--env", item)]
    return (*words, "--workdir", str(ROOT), "--grace", "2", "--max_restarts", "1")


@pytest.mark.long
def test_a_process_a_device(pod_of, tmp_path):
    """As --backend torchtpu starts, with gloo's devices: two hosts, two processes on each.

    One is killed: all start again and resume. Ctrl-C: all stop with a checkpoint, and the same
    command goes on. Losses are those of one process that was never stopped.
    """
    pod, run_dir = pod_of(2), tmp_path / "run"
    (tmp_path / "sitecustomize.py").write_text(KILL_ONE)
    flags = ["--max_steps", "12", "--ckpt_step_interval", "2"]

    def launch(kill_when: str) -> subprocess.Popen[str]:
        kill = (f"PYTHONPATH={tmp_path}", f"KILL_WHEN={run_dir / kill_when}", "NOTES=/dev/null")
        own = a_process_a_device(*kill)
        return pod.launch("launch/torchrun.sh", *tiny(run_dir), *flags, flags=own)

    run = launch("step_4")
    while not (run_dir / "step_8").exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(run)
    assert code == 130, stdout + stderr
    assert "restarting all workers; 0 restart(s) left" in stderr
    assert f"resuming {run_dir}/step_" in stdout
    assert "training stopped by SIGINT: step " in stdout
    code, stdout, stderr = finish(launch("never"))
    assert code == 0, stdout + stderr
    assert "[worker 0] training completed: step 12" in stdout
    assert json.loads((run_dir / "run.json").read_text())["devices"] == 4
    whole = train_tiny_gpu(tmp_path / "whole", *flags)
    assert losses(run_dir) == pytest.approx(whole.column("loss"), rel=1e-5)


def test_a_mistake_in_a_process_a_device_ends_all_at_once(pod_of, tmp_path):
    """With the program's exit code, and no restart."""
    pod = pod_of(2)
    command = ["launch/torchrun.sh", "--fake_data", "--batch_size", "0"]
    own = a_process_a_device(*map("=".join, warm(tmp_path).items()))
    code, _, stderr = finish(pod.launch(*command, flags=own))
    assert code == 2, stderr
    assert "run_vit_training.py: error: argument --batch_size: 0 must be" in stderr
    assert "restarting all workers" not in stderr


def test_restarts_are_numbered_and_logs_may_vanish(pod):
    """Each start knows its number, and when the one before it failed; a log folder that was deleted
    is made again."""
    (pod.folder / "workers").write_text("1")
    known = "$RUN_JOB_ID:$RUN_ATTEMPT:$STEP_TIMEOUT_S:$RUN_FAILED_AT"
    count = f'echo "{known}"; rm -r "$1"; exit $((RUN_ATTEMPT < 2))'
    flags = ("--max_restarts", "5", "--env", "STEP_TIMEOUT_S=7")
    began = time.time()
    code, stdout, stderr = pod.run("sh", "-c", count, "sh", pod.logs, flags=flags)
    assert code == 0, stderr
    jobs, attempts, timeouts, failed = zip(
        *(line.split(":") for line in stdout.splitlines()), strict=True
    )
    assert (attempts, timeouts) == (("0", "1", "2"), ("7",) * 3)
    assert failed[0] == ""
    assert began < float(failed[1]) < float(failed[2]) < time.time()
    assert len(set(jobs)) == 1

    replace = 'echo "$STEP_TIMEOUT_S"; rm -r "$1"; touch "$1"; exit $((RUN_ATTEMPT < 2))'
    flags = ("--max_restarts", "2")
    code, stdout, stderr = pod.run("sh", "-c", replace, "sh", pod.logs, flags=flags)
    assert code == 0, stderr
    assert stdout.splitlines() == ["[worker 0] 1800"] * 3
    assert stderr.count("continuing without logs") == 1


@pytest.mark.parametrize("ends_with", [2, BAD_IMAGES])
def test_what_does_not_help_is_not_done_again(ends_with, pod):
    """As after a wrong command line."""
    code, _, stderr = pod.run("sh", "-c", f"exit {ends_with}", flags=("--max_restarts", "5"))
    assert code == ends_with
    assert "restarting all workers" not in stderr


# -- several slices -------------------------------------------------------------------

TWO_SLICES = "pod-0,pod-1"
LOST = {"tpu": "is PREEMPTED", "compute": "has 0 of 2 VMs running (PREEMPTED)"}
MEGASCALE = "COORDINATOR_ADDRESS PORT NUM_SLICES SLICE_ID".split()


@pytest.fixture
def slices(pod):
    """Two slices of two workers."""
    (pod.folder / "workers").write_text("2")
    return pod


def test_several_slices_know_of_each_other(slices):
    """Workers are numbered over all slices; --env comes first."""
    shown = 'echo "$*"; env | grep -E "MEGASCALE|MASTER_ADDR|NNODES|NODE_R"'
    own = ("--env", "MEGASCALE_PORT=9000")
    code, stdout, stderr = slices.run("sh", "-c", shown, "sh", "a", flags=own, tpu=TWO_SLICES)
    assert code == 0, stderr
    assert f"4 worker(s) of pod-0, pod-1, logs in {slices.logs}" in stderr
    for worker in range(4):
        values = ("127.0.0.1", "9000", "2", str(worker // 2))
        told = {f"MEGASCALE_{n}={v}" for n, v in zip(MEGASCALE, values, strict=True)}
        told |= {"a", "MASTER_ADDR=127.0.0.1", "NNODES=4", f"NODE_RANK={worker}"}
        lines = [line for line in stdout.splitlines() if line.startswith(f"[worker {worker}]")]
        assert {line.removeprefix(f"[worker {worker}] ") for line in lines} == told
        assert len(lines) == len(told)
        log = (slices.logs / f"worker_{worker}.log").read_text()
        assert set(log.splitlines()) == told
    _, stdout, _ = slices.run("sh", "-c", "echo port $MEGASCALE_PORT", tpu=TWO_SLICES)
    assert stdout.count("port 8081\n") == 4


def test_a_worker_of_several_slices_fails(slices):
    """All of them end and start again; the line names the slice."""
    fails = 'test "$RANK$RUN_ATTEMPT" = 30 && exit 7; test $RUN_ATTEMPT = 1 || sleep 600'
    flags = ("--max_restarts", "2", "--grace", "2")
    code, _, stderr = slices.run("sh", "-c", fails, flags=flags, tpu=TWO_SLICES)
    assert code == 0, stderr
    log = slices.logs / "worker_3.log"
    failed = (
        f"worker 3 (worker 1 of pod-1) failed with exit code 7, see {log}; stopping the other 3"
    )
    assert failed in stderr
    assert "restarting all workers; 1 restart(s) left" in stderr
    assert sum("zlib" in " ".join(call) for call in slices.calls()) == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--tpu=pod-0,pod-0 -- true", "argument --tpu: pod-0 is listed twice"),
        ("--tpu=pod-0,other -- true", "gcloud cannot describe --tpu other; check the name"),
        ("--tpu=pod-0,pod-2 -- true", "--tpu pod-2 is V5P 2x2, but pod-0 is V5LITE_POD 2x2: all"),
    ],
)
def test_mistakes_of_several_slices(slices, words, told):
    (slices.folder / "type_pod-2").write_text("V5P")
    assert told in refused(slices.start(*words.split()))
    assert not slices.logs.exists()


def test_one_of_several_slices_is_lost(slices):
    (slices.folder / "state_pod-3").write_text("PREEMPTED")
    code, _, stderr = slices.run("true", tpu="pod-0,pod-3")
    assert code == 1
    assert f"--tpu pod-3 {LOST[slices.api]}" in stderr
    assert not slices.logs.exists()


# -- fewer slices, and more -------------------------------------------------------------

ELASTIC = ("--max_restarts", "3", "--grace", "2", "--elastic_wait", "1", "--elastic_poll", "1")
TELL = 'echo "$RUN_ATTEMPT: $MEGASCALE_SLICE_ID of $MEGASCALE_NUM_SLICES, $ELASTIC_SLICES,"'
TELL_ADDRESS = f"{TELL} at $MEGASCALE_COORDINATOR_ADDRESS; exec sleep 600"


def lines_until(run, word, times):
    """The lines of stdout until ``word`` came so often."""
    found = []
    while times:
        found.append(run.stdout.readline())
        assert found[-1], run.communicate()[1]
        times -= word in found[-1]
    return sorted(line.rstrip() for line in found)


def test_a_lost_slice_is_left_out_until_it_is_back(slices):
    """The one that is left is the first one then. Growing asks all for a checkpoint, and takes no
    restart."""
    flags = ("--elastic", "1", *ELASTIC)
    run = slices.launch("sh", "-c", TELL_ADDRESS, flags=flags, tpu=TWO_SLICES)
    both = [f"[worker {i}] {{}}: {i // 2} of 2, 1:2, at 127.0.0.1" for i in range(4)]
    assert lines_until(run, " of 2, ", 4) == [line.format(0) for line in both]
    slices.lose(0)
    alone = [f"[worker {i}] 1: 0 of 1, 1:2, at 127.0.0.3" for i in (2, 3)]
    assert lines_until(run, " of 1, ", 2) == alone
    (slices.folder / "state_pod-0").unlink()
    assert lines_until(run, " of 2, ", 4) == [line.format(2) for line in both]
    slices.lose(1)
    assert lines_until(run, " of 1, ", 2) == [
        f"[worker {i}] 3: 0 of 1, 1:2, at 127.0.0.1" for i in (0, 1)
    ]
    run.send_signal(signal.SIGTERM)
    code, _, stderr = finish(run)
    assert code == 143
    told = [line for line in stderr.splitlines() if line.startswith("xla_dist: ")]
    expected = [
        "4 worker(s) of pod-0, pod-1",
        "starting on 2 of 2 slices: pod-0, pod-1",
        "worker ",
        "restarting all workers; 2 restart(s) left",
        f"pod-0 {LOST[slices.api]}",
        "starting on 1 of 2 slices: pod-1",
        "pod-0 is usable again: saving a checkpoint and restarting with it",
        "starting on 2 of 2 slices: pod-0, pod-1",
        "worker ",
        "restarting all workers; 1 restart(s) left",
        f"pod-1 {LOST[slices.api]}",
        "starting on 1 of 2 slices: pod-0",
        "forwarded SIGTERM to 2 worker(s)",
    ]
    assert len(told) == len(expected), stderr
    for line, beginning in zip(told, expected, strict=True):
        assert line.startswith(f"xla_dist: {beginning}"), line
    assert not slices.left_running()


def test_too_few_slices_end_the_run(slices):
    flags = ("--elastic", "2", *ELASTIC)
    run = slices.launch("sh", "-c", TELL_ADDRESS, flags=flags, tpu=TWO_SLICES)
    lines_until(run, " of 2, ", 4)
    slices.lose(1)
    code, _, stderr = finish(run)
    assert code == 1
    told = "xla_dist: error: only 1 of 2 slices are usable, --elastic requires 2"
    assert stderr.splitlines()[-1] == told
    assert f"xla_dist: pod-1 {LOST[slices.api]}" in stderr


def test_a_slice_without_the_program_is_left_out(slices):
    """As one that was created anew. At the start, too, it is enough that one is there."""
    for worker in (0, 1):
        (slices.folder / f"worker_{worker}").mkdir()
        script(slices.folder / f"worker_{worker}" / "program", f"{TELL}; exit 0")
    code, stdout, stderr = slices.run(
        "./program", flags=("--elastic", "1", *ELASTIC), tpu=TWO_SLICES
    )
    assert code == 0, stderr
    assert "worker 0 of pod-1 does not find ./program in ~" in stderr
    assert "[worker 1] 1: 0 of 1, 1:2," in stdout
    (slices.folder / "state_pod-1").write_text("CREATING")
    code, stdout, stderr = slices.run(
        "./program", flags=("--elastic", "1", *ELASTIC), tpu=TWO_SLICES
    )
    assert code == 0, stderr
    assert "[worker 1] 0: 0 of 1, 1:2," in stdout


def test_a_signal_ends_the_waiting_for_slices(slices):
    flags = ("--elastic", "2", *ELASTIC[:4], "--elastic_wait", "600", "--elastic_poll", "600")
    (slices.folder / "state_pod-1").write_text("CREATING")
    run = slices.launch("true", flags=flags, tpu=TWO_SLICES)
    assert run.stderr
    waits = f"pod-1 {LOST[slices.api].replace('PREEMPTED', 'CREATING')}; waiting up to"
    while waits not in (line := run.stderr.readline()):
        assert line
    run.send_signal(signal.SIGINT)
    code, _, stderr = finish(run)
    assert (code, stderr) == (130, "xla_dist: stopped by SIGINT; no program is running\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--elastic 3 --max_restarts 1",
            "--elastic 3 must be between 1 and 2, the number of slices",
        ),
        ("--elastic 1", "--elastic requires --max_restarts, because each lost slice"),
        ("--elastic 1 --max_restarts 1 --tpu=pod", "--elastic requires several slices: use --tpu"),
        (
            "--elastic 1 --max_restarts 1 --elastic_poll 0",
            "argument --elastic_poll: 0 must be at least",
        ),
        ("--elastic_wait 5", "--elastic_wait requires --elastic or --max_restarts"),
        (
            "--elastic 1 --max_restarts 1 --env MEGASCALE_NUM_SLICES=2",
            "--elastic sets MEGASCALE_NUM_SLICES itself: remove --env MEGASCALE_NUM_SLICES",
        ),
    ],
)
def test_mistakes_of_elastic_slices(slices, flags, told):
    assert told in refused(slices.start("--tpu=pod-0,pod-1", *flags.split(), "--", "true"))


# -- mistakes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--tpu=pod", "no command: pass it after --"),
        ("-- true", "arguments are required: --tpu"),
        ("--tpu=pod --env NO_SUCH -- true", "argument --env: NO_SUCH is not set here: export it"),
        ("--tpu=pod --env 1X=secret -- true", "argument --env: '1X' is not a variable's name: use"),
        (f"--tpu=pod --env X={'x' * 60_000} -- true", "--env: the values are longer than 60,000"),
        (
            "--tpu=pod -- python3 run_vit_training.py --data_dir gs://BUCKET/images",
            "gs://BUCKET/images: write the name of your bucket in place of BUCKET",
        ),
        ("--tpu=pod --max_restarts -1 -- true", "argument --max_restarts: -1 must be at least"),
        ("--tpu=pod --grace 99999999999 -- true", "99999999999 must be at least 0 and at most 1"),
        ("--tpu= -- true", "argument --tpu: '' is not a valid TPU VM name"),
        ("--tpu=pod --workdir= -- true", "argument --workdir: must not be empty"),
        (f"--tpu=pod -- {'x' * 125_000}", "too long for a command line"),
        (
            "--tpu=pod -- .venv/bin/python -u run_vit_training.py --backend=torchtpu --fake_data",
            "--backend torchtpu needs one process per device: run launch/torchrun.sh",
        ),
        (
            "--tpu=prod -- true",
            "gcloud cannot describe --tpu prod; check the name and --zone: Cloud TPU API: NOT_",
        ),
        ("--tpu=pod --log_dir /dev/null/logs -- true", "--log_dir /dev/null/logs: Not a directory"),
    ],
)
def test_mistakes(pod, words, told):
    assert told in refused(pod.start(*words.split()))
    assert not list(pod.folder.glob("worker_*"))
    assert not list(pod.cwd.iterdir())


def test_gcloud_does_not_answer_at_first(pod_of, monkeypatch, capsys):
    """A launcher that creates slices would end at a usage error, so this is none."""
    pod = pod_of(4)
    monkeypatch.setattr(slices_module, "_ASK_AGAIN_SECONDS", 0)
    for name, value in pod.variables.items():
        monkeypatch.setenv(name, value)
    hiccups, flags = pod.folder / "hiccups", ["--tpu=pod", f"--log_dir={pod.logs}", "--", "true"]
    hiccups.write_text("2")
    assert xla_dist.main(flags) == 0
    told = capsys.readouterr().err
    assert told.count("gcloud cannot describe --tpu pod: Cloud TPU API: UNAVAILABLE: try ag") == 2
    monkeypatch.setattr(slices_module, "_PATIENCE_SECONDS", 0)
    hiccups.write_text("9")
    assert xla_dist.main(flags) == 1
    assert capsys.readouterr().err.startswith("xla_dist: error: gcloud cannot describe --tpu pod")


def test_a_pod_that_is_not_up(pod):
    (pod.folder / "state").write_text("PREEMPTED")
    code, _, stderr = pod.run("true")
    assert code == 1
    assert f"--tpu pod {LOST[pod.api].replace('2', '4')}" in stderr
    (pod.folder / "state").unlink()
    (pod.folder / "workers").write_text("0")
    code, _, stderr = pod.run("true")
    assert code == 1
    assert {"tpu": "has no workers", "compute": "has size 0 and no VMs"}[pod.api] in stderr


# -- Compute Engine -------------------------------------------------------------------


NOT_JSON = [b"WARNING: update", b"", b"[]", b"null", b"\xff\xfe", b'{"a": 1}', b"[" * 100_000]
NEEDS_PERSON = [
    "The required property [project] is not currently set.",
    "There was a problem refreshing your current auth tokens: ('invalid_grant: Bad Request', {})",
    "You do not currently have an active account selected.",
    "PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before or it is disabled.",
    "Could not fetch resource:\n - Required 'compute.instances.get' permission for 'projects/a'",
    "Could not fetch resource:\n - The resource 'projects/none' was not found",
]


def answer(pod, content, *, fails=False):
    """Let every call of gcloud but of its configuration print this, or fail with it."""
    (pod.folder / "answer").write_bytes(content)
    (pod.folder / "bin" / "gcloud").write_text(
        "#!/bin/sh\n"
        'if [ "$1" = config ]; then echo us-east5-b; exit; fi\n'
        'echo "$*" >> "$STAND_IN/asked"\n'
        f'cat "$STAND_IN/answer" {">&2; exit 1" if fails else ""}\n'
    )


@pytest.mark.parametrize("content", NOT_JSON, ids=lambda content: repr(content[:9]))
@pytest.mark.parametrize("program", ["launch.xla_dist", "launch.compute_engine"])
def test_gcloud_prints_something_else(pod_of, program, content):
    pod = pod_of(1)
    answer(pod, content)
    words = ["--topology=v6e:4x4", "--poll=0"] if "compute" in program else []
    code, stdout, stderr = finish(pod.start("--tpu=pod", *words, "--", "true", program=program))
    assert (code, stdout) == (2, ""), stderr
    (line,) = (line for line in stderr.splitlines() if "error" in line)
    assert "gcloud's description of it is not in the expected JSON format" in line
    assert "Traceback" not in stderr


@pytest.mark.parametrize("said", NEEDS_PERSON, ids=lambda said: said[-12:])
@pytest.mark.parametrize("program", ["launch.xla_dist", "launch.compute_engine"])
def test_what_a_person_must_put_right_is_not_asked_again(pod_of, program, said):
    pod = pod_of(1)
    answer(pod, f"ERROR: (gcloud.compute.describe) {said}\nPlease run:\n".encode(), fails=True)
    words = ["--topology=v6e:4x4"] if "compute" in program else []
    code, stdout, stderr = finish(pod.start("--tpu=pod", *words, "--", "true", program=program))
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1), stderr
    assert " ".join(said.replace("\n -", "").split()) in stderr
    asked = (pod.folder / "asked").read_text().splitlines()
    assert len(asked) <= 2  # once of each API


def test_a_network_that_is_away_is_no_mistake_of_a_person():
    """What gcloud says then has hints at a login, too."""
    away = "There was a problem refreshing your current auth tokens: Unable to find the server"
    assert not slices_module.needs_person(away)
    assert all(map(slices_module.needs_person, NEEDS_PERSON))


@pytest.fixture
def group(pod_of):
    """An instance group of four VMs."""
    group = pod_of(4)
    (group.folder / "compute").touch()
    return group


def test_workers_are_numbered_as_the_vms_say(group):
    """Not as the VMs are named or listed; what they say has no say in a group of another policy."""
    shown = "echo $NODE_RANK $NODE_ADDRESSES $TORCH_TPU_TOPOLOGY"
    code, stdout, stderr = group.run("sh", "-c", shown)
    assert code == 0, stderr
    addresses = ",".join(f"127.0.0.{number}" for number in range(1, 5))
    expected = [f"[worker {i}] {i} {addresses} 2,4,1" for i in range(4)]
    assert sorted(stdout.splitlines()) == expected
    assert {call[2][-4:] for call in group.calls()} == {"-vmz", "-vmy", "-vmx", "-vmw"}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            {"group": {"targetSize": 4}},
            "has no workload policy, so its VMs do not form a slice",
        ),
        ({"group": {"targetSize": 6}}, "has 4 of 6 VMs running"),
        ({"group": {"targetSize": 3}}, "has 4 of 3 VMs running"),
        (
            {
                "group": {
                    "targetSize": 8,
                    "status": {
                        "bulkInstanceOperation": {
                            "lastProgressCheck": {
                                "error": {
                                    "errors": [
                                        {"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": "none"}
                                    ]
                                }
                            }
                        }
                    },
                }
            },
            "has 4 of 8 VMs running (ZONE_RESOURCE_POOL_EXHAUSTED: none)",
        ),
        (
            {
                "group": {
                    "targetSize": 4,
                    "resourcePolicies": {"workloadPolicy": "one"},
                    "status": {
                        "appliedAcceleratorTopologies": [
                            {"acceleratorTopology": "4x4", "state": "REACTIVATING"}
                        ]
                    },
                }
            },
            "has topology 4x4 in state REACTIVATING",
        ),
        ({"metadata": {}}, "is not a slice: only 0 of its 4 VMs have metadata"),
        (
            {"metadata": {"tpu-env": "TOPOLOGY: '2x4'\nTPU_ACCELERATOR_TYPE: v6e-8"}},
            "description of it is not in the expected JSON format",
        ),
        ({"both": "yes"}, "exists both in the Cloud TPU API and on Compute Engine"),
    ],
)
def test_what_is_no_slice(group, files, told):
    for name, content in files.items():
        (group.folder / name).write_text(json.dumps(content))
    code, _, stderr = group.run("true")
    is_mistake = "description" in told or "both" in told
    assert (code, len(stderr.splitlines())) == (1 + is_mistake, 1)
    assert told in stderr


def test_a_single_vm(pod_of):
    vm = pod_of(1)
    (vm.folder / "compute").touch()
    (vm.folder / "vm").touch()
    code, stdout, stderr = vm.run("sh", "-c", "echo $NODE_RANK of $NNODES")
    assert (code, stdout) == (0, "[worker 0] 0 of 1\n"), stderr


def test_a_slice_that_is_repaired_is_waited_for(group):
    """Its VMs' addresses are asked for again."""
    flags = ("--max_restarts", "1", "--grace", "1", "--elastic_poll", "1")
    shown = 'echo "start $RUN_ATTEMPT $MASTER_ADDR"; test $RUN_ATTEMPT = 1 || exec sleep 600'
    run = group.launch("sh", "-c", shown, flags=flags)
    read_until(run, "start 0", 4)
    (group.folder / "state").write_text("REPAIRING")
    os.kill(int((group.folder / "worker_2" / "client").read_text()), signal.SIGKILL)
    assert run.stderr
    while "waiting up to" not in (line := run.stderr.readline()):
        assert line
    assert "pod has 0 of 4 VMs running (REPAIRING)" in line
    (group.folder / "first_address").write_text("9")
    (group.folder / "state").unlink()
    code, stdout, stderr = finish(run)
    assert code == 0, stderr
    assert stdout.count("start 1 127.0.0.9\n") == 4


def test_no_gcloud(pod, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    line = refused(pod.launch("true", PATH=str(empty)))
    assert line.startswith("xla_dist: error: gcloud not found on PATH: install it")


def test_a_command_that_is_not_there(pod):
    code, _, stderr = pod.run("no-such-program")
    assert code == 127
    assert "xla_dist: error: cannot start no-such-program" in stderr
