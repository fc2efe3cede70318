"""launch/ for GPUs, run for real on the CPU with gloo; the two requirements files agree."""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from launch import UsageError, torchrun
from tests.support.cli import DIGITS, ROOT, TINY_MODEL, TINY_RUN, run_program
from tests.support.launching import (
    TORCHRUN,
    devices,
    finish,
    free_port,
    losses,
    pins,
    refused,
    script,
    start,
    succeed,
    warm,
)

TWO_STEPS = ["--data_dir", str(DIGITS), *TINY_MODEL, *TINY_RUN, "--max_steps", "2"]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """Two processes of one node; --ckpt_dir relative to the caller's folder, with a space."""
    folder = tmp_path_factory.mktemp("one_node")
    run = start(
        TORCHRUN, "--log-dir", folder / "logs", "--tee", "3", "--",
        *TWO_STEPS, "--ckpt_dir", "my run",
        cwd=folder, NPROC_PER_NODE="2",
    )  # fmt: skip
    assert "training completed: step 2" in succeed(run)
    assert any((folder / "logs").iterdir())  # torchrun's own option reached it
    return folder / "my run"


@pytest.mark.long
def test_two_nodes_train_together(tmp_path):
    port = free_port()
    nodes = [
        start(TORCHRUN, *TWO_STEPS, "--ckpt_dir", tmp_path / "two", NPROC_PER_NODE="1",
              NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in (0, 1)
    ]  # fmt: skip
    said = [succeed(node) for node in nodes]
    assert "training completed" in said[0]
    assert "training completed" not in said[1]
    assert devices(tmp_path / "two") == 2
    program = ["run_vit_training.py", "--backend", "cuda", *TWO_STEPS]
    assert run_program(*program, "--ckpt_dir", str(tmp_path / "one"), processes=2).returncode == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "set NPROC_PER_NODE"),
        ({"NPROC_PER_NODE": "1", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 must be a whole"),
        ({"NPROC_PER_NODE": "1", "JOIN_TIMEOUT": "1.5"}, "JOIN_TIMEOUT=1.5 must be a whole number"),
        ({"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS=0 must be a number of"),
        ({"NPROC_PER_NODE": "1", "NNODES": "2", "MASTER_ADDR": "a b"}, "MASTER_ADDR=a b is no"),
        ({"NPROC_PER_NODE": "1", "NNODES": "2"}, "NNODES=2 requires MASTER_ADDR"),
        ({"NPROC_PER_NODE": "1", "NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"},
         "or NODE_RANK from 0 to 1, not '2'"),
        ({"PYTHON": "/no/python"}, "/no/python not found: set PYTHON"),
        ({"PYTHON": "/bin/false"}, "/bin/false cannot import PyTorch"),
    ],
)  # fmt: skip
def test_wrong_environment(variables, told):
    assert told in refused(start(TORCHRUN, "--fake_data", **variables))


def test_no_number_is_octal():
    """What is run then has them without leading zeros; /bin/echo is in place of Python."""
    variables = {"MAX_RESTARTS": "08", "NPROC_PER_NODE": "02", "NNODES": "010", "NODE_RANK": "09"}
    variables |= {"MASTER_ADDR": "a", "MASTER_PORT": "029500", "JOIN_TIMEOUT": "0600"}
    said = succeed(start(TORCHRUN, "--fake_data", PYTHON="/bin/echo", **variables))
    for words in (
        *("--nproc-per-node 2 --max-restarts 8 ", "--nodes 10 --rank 9 ", "--port 29500"),
        "--limit 600",
    ):
        assert words in said
    gke = {"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "010", "MEGASCALE_SLICE_ID": "09"}
    gke |= {"TPU_WORKER_ID": "01", "NPROC_PER_NODE": "4", "PYTHON": "/bin/echo"}
    assert "--nodes 20 --rank 19 " in succeed(start(TORCHRUN, "--backend", "torchtpu", **gke))
    gke["TPU_WORKER_ID"] = "a[$(touch x)]"
    told = "TPU_WORKER_ID=a[$(touch x)] must be a whole number from 0"
    assert told in refused(start(TORCHRUN, "--backend", "torchtpu", **gke))


def test_no_number_of_a_slurm_job_is_octal(tmp_path):
    script(tmp_path / "scontrol", "echo node1")
    script(tmp_path / "srun", 'echo "$NNODES"')
    variables = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "x"}
    variables |= {"SLURM_NNODES": "9", "ELASTIC": "08", "ELASTIC_POLL": "00"}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    job = start("bash", "launch/slurm.sbatch", "--ckpt_dir", "a", **variables)
    assert succeed(job) == "8:9\n"


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"NPROC_PER_NODE": "1", "RDZV_ID": "x"}, "--backend torchtpu requires NODE_RANK instead"),
        ({}, "no TPU found in /dev/vfio: set NPROC_PER_NODE"),
        ({"NPROC_PER_NODE": "4", "TPU_TOPOLOGY": "2x2"}, "cannot import TorchTPU (No module named"),
    ],
)
def test_wrong_environment_of_torchtpu(variables, told, tmp_path):
    if "No module named" in told and importlib.util.find_spec("torch_tpu"):
        pytest.skip("torch_tpu is installed")
    flags = ["--fake_data", "--backend=torchtpu"]
    assert told in refused(start(TORCHRUN, *flags, **variables | warm(tmp_path)))


@pytest.mark.parametrize(
    ("nodes", "topology", "told"),
    [
        (1, "2x2", r"TORCH_TPU_TOPOLOGY=2x2 has 4 chips, but 1 host\(s\) start 2 process"),
        (2, "", "several hosts require TORCH_TPU_TOPOLOGY, the slice's chips per side"),
    ],
)
def test_slices_that_cannot_be_joined(nodes, topology, told, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_TOPOLOGY", topology)
    with pytest.raises(UsageError, match=told):
        torchrun.join_slice(torchrun.parse(f"--nodes {nodes} --torchtpu 2 -- x".split()))


@pytest.fixture
def echo(tmp_path):
    """In place of Python: prints each argument on a line, then the environment."""
    return str(script(tmp_path / "echo python", """printf '<%s>\\n' "$@"; env"""))


def test_arguments_reach_torchrun_and_the_program(echo):
    said = succeed(
        start(TORCHRUN, "--role", "a b", "--", "--ckpt_dir", "x  y*", "", PYTHON=echo,
              NPROC_PER_NODE="3", NNODES="4", MASTER_ADDR="first", RDZV_ID="job 1")
    )  # fmt: skip
    words = [line[1:-1] for line in said.splitlines() if line.startswith("<")]
    assert words == [
        str(ROOT / "launch" / "torchrun.py"), "--nodes", "4", "--rdzv_id", "--address=first",
        "--port", "29500", "--limit", "600", "--",
        "--nproc-per-node", "3", "--max-restarts", "0", "--role", "a b",
        str(ROOT / "run_vit_training.py"), "--backend", "cuda", "--ckpt_dir", "x  y*", "",
    ]  # fmt: skip
    assert "RDZV_ID=job 1" in said.splitlines()  # where ps does not show it to others


XLA_DIST = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "NODE_ADDRESSES": "a,b"}
GKE = {"TPU_WORKER_HOSTNAMES": "h-0.job,h-1.job", "TPU_WORKER_ID": "1"}
SLICES = {
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "h-first.job:8080",
}


@pytest.mark.parametrize(
    ("given", "nodes", "rank", "first", "hosts"),
    [
        (XLA_DIST, "2", "1", "a", "a,b"),
        (GKE, "2", "1", "h-0.job", "h-0.job,h-1.job"),
        (GKE | SLICES, "6", "5", "h-first.job", "h-0.job,h-1.job"),
    ],
)
def test_hosts_of_a_tpu_slice(given, nodes, rank, first, hosts, echo):
    """A process a device on each; nothing that is only for GPUs is set."""
    flags = ["--backend", "torchtpu", "--lr", "1"]
    said = succeed(start(TORCHRUN, *flags, PYTHON=echo, NPROC_PER_NODE="4", **given)).splitlines()
    words = [line[1:-1] for line in said if line.startswith("<")]
    assert words == [
        str(ROOT / "launch" / "torchrun.py"),
        *f"--nodes {nodes} --rank {rank} --address={first} --port 29500 --limit 600".split(),
        *"--torchtpu 4 -- --nproc-per-node 4 --max-restarts 0".split(),
        str(ROOT / "run_vit_training.py"),
        *"--backend cuda --backend torchtpu --lr 1".split(),
    ]
    assert f"TPU_WORKER_HOSTNAMES={hosts}" in said
    assert not [line for line in said if line.startswith(("NCCL_DEBUG=", "PYTORCH_ALLOC_CONF="))]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"OMP_NUM_THREADS": ""},
         {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
          "NCCL_DEBUG": "WARN", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
          "STEP_TIMEOUT_S": "1800"}),
        ({"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "INFO", "PYTORCH_ALLOC_CONF": "backend:native"},
         {"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "INFO", "PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"STEP_TIMEOUT_S": "0", "RUN_JOB_ID": "mine", "RUN_ATTEMPT": "3"},
         {"STEP_TIMEOUT_S": "0", "RUN_JOB_ID": "mine", "RUN_ATTEMPT": "3"}),
    ],
)  # fmt: skip
def test_environment_only_where_unset(given, expected, echo):
    said = succeed(start(TORCHRUN, PYTHON=echo, NPROC_PER_NODE="2", **given))
    variables = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    assert {name: variables.get(name) for name in expected} == expected


@pytest.fixture
def slurm(tmp_path):
    """What a batch script finds on a node: its own copy, SLURM_*, and srun and scontrol, which run
    the step on this machine and note what they are asked for."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    note = f'echo "$*" >> "{tmp_path}/slurm.log"'
    script(
        bin_dir / "scontrol", note, 'case "$1 $2" in',
        'show\\ hostnames) printf "localhost\\nsecond\\n" ;;',
        'show\\ job) echo "   JobState=${STATE-RUNNING} Reason=None"',
        '    echo "   EndTime=${END-} Deadline=N/A"; echo "   PreemptTime=${PREEMPTED-None}" ;;',
        "esac",
    )  # fmt: skip
    script(bin_dir / "scancel", note)
    script(
        bin_dir / "srun", "steps=()", "while [[ $1 == --* ]]; do shift; done",
        'for ((id = 0; id < SLURM_NNODES; id++)); do SLURM_NODEID=$id "$@" & steps+=($!); done',
        "code=0", 'for step in "${steps[@]}"; do wait "$step" || code=$?; done', "exit $code",
    )  # fmt: skip
    copy = shutil.copy(ROOT / "launch" / "slurm.sbatch", tmp_path / "slurm_script")
    variables = {
        "PATH": f"{bin_dir}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "1", "NPROC_PER_NODE": "1", "MASTER_PORT": free_port(),
    }  # fmt: skip

    def batch(*flags: object, **more: str) -> subprocess.Popen[str]:
        return start("bash", copy, *flags, cwd=tmp_path, **(variables | more))

    return batch


@pytest.mark.long
def test_slurm_trains_on_two_nodes(slurm, one_node, tmp_path):
    ckpt_dir = tmp_path / "my run"
    assert "training completed" in succeed(slurm(*TWO_STEPS, "--ckpt_dir", ckpt_dir))
    assert devices(ckpt_dir) == 2
    assert losses(ckpt_dir) == pytest.approx(losses(one_node), rel=1e-6)
    assert slurm_asked(tmp_path) == ["show hostnames node[1-2]"]


def slurm_asked(tmp_path):
    return (tmp_path / "slurm.log").read_text().splitlines()


def slurm_changed(tmp_path):
    """What Slurm was asked to do, not only to tell."""
    return [line for line in slurm_asked(tmp_path) if not line.startswith("show ")]


def started(job, tmp_path):
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.05)
    return job


def slurm_step(tmp_path, *lines):
    return str(script(tmp_path / "step", f'touch "{tmp_path}/started"', *lines))


@pytest.mark.parametrize(
    ("seconds", "awaited"),
    [
        (120, "signal=TERM"),  # the step ends with a checkpoint, then the job is requeued
        (5, "requeue"),  # no time for that
    ],
)
def test_slurm_requeues_at_the_time_limit(seconds, awaited, slurm, tmp_path):
    asked = f'grep -q {awaited} "{tmp_path}/slurm.log"'  # a busy machine may take long
    step = slurm_step(tmp_path, f"until {asked}; do sleep 0.1; done", "exit 3")
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
    job = started(slurm("--ckpt_dir=x", PYTHON=step, SLURM_NNODES="1", END=end), tmp_path)
    job.send_signal(signal.SIGUSR1)
    code, stdout, _ = finish(job)
    assert code == 3
    assert "the time limit is near, stopping job 1234 with a checkpoint" in stdout
    assert "requeueing job 1234" in stdout
    assert slurm_changed(tmp_path)[:2] == ["--signal=TERM 1234", "requeue 1234"]


@pytest.mark.parametrize(
    ("step_code", "variables", "requeued"),
    [
        (143, {"PREEMPTED": "2026-11-22T04:09:55"}, True),
        (0, {"PREEMPTED": "2026-11-22T04:09:55"}, False),  # it was done before that
        (143, {"PREEMPTED": "2026-11-22T04:09:55", "STATE": "PENDING"}, False),  # Slurm has done it
        (143, {}, False),  # `scancel --signal=TERM`
        (1, {}, False),
    ],
)
def test_slurm_requeues_what_was_preempted(step_code, variables, requeued, slurm, tmp_path):
    step = slurm_step(tmp_path, f"exit {step_code}")
    job = slurm("--ckpt_dir=x", PYTHON=step, SLURM_NNODES="1", **variables)
    code, stdout, _ = finish(job)
    assert code == step_code
    assert slurm_changed(tmp_path) == ["requeue 1234"] * requeued
    assert ("requeueing" in stdout) == requeued


@pytest.mark.parametrize(
    ("failures", "variables", "starts", "expected"),
    [(1, {}, 2, 0), (1, {"STATE": "CANCELLED"}, 1, 233)],
)
def test_slurm_starts_a_step_again_that_reached_no_node(
    failures, variables, starts, expected, slurm, tmp_path
):
    log = tmp_path / "starts"
    script(tmp_path / "step", f'echo >> "{log}"; (($(wc -l < "{log}") > {failures})) || exit 233')
    job = slurm("--ckpt_dir=x", PYTHON=str(tmp_path / "step"), SLURM_NNODES="1", **variables)
    code, _, stderr = finish(job)
    assert code == expected
    assert log.read_text().count("\n") == starts
    assert "a node does not respond" in stderr
    assert slurm_changed(tmp_path) == []


def test_slurm_script_outlives_sigterm(slurm, tmp_path):
    """Slurm sends it to the script and to the step, which writes a checkpoint and tells so."""
    step = slurm_step(
        tmp_path, f'until [[ -e "{tmp_path}/go" ]]; do sleep 0.1; done', "echo saved", "exit 143"
    )
    job = started(slurm("--ckpt_dir=x", PYTHON=step, SLURM_NNODES="1", STATE="PENDING"), tmp_path)
    job.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(1)
    (tmp_path / "go").touch()
    code, stdout, _ = finish(job)
    assert (code, stdout) == (143, "saved\n")
    assert slurm_changed(tmp_path) == []


def test_slurm_tells_the_program_which_start_this_is(slurm, echo):
    job = slurm("--ckpt_dir=x", PYTHON=echo, SLURM_NNODES="1", SLURM_RESTART_COUNT="2")
    said = succeed(job).splitlines()
    assert {"RUN_JOB_ID=slurm-1234", "RUN_ATTEMPT=2", "STEP_TIMEOUT_S=1800"} < set(said)
    assert said[said.index("<--max-restarts>") + 1] == "<3>"


@pytest.mark.parametrize(
    ("flags", "more", "told"),
    [
        ("--fake_data", {}, "--ckpt_dir is missing"),
        ("--ckpt_dir --fake_data", {}, "--ckpt_dir is missing"),
        ("--fake_data --log_dir x--ckpt_dir=y", {}, "--ckpt_dir is missing"),
        ("--ckpt_dir x", {"SLURM_JOB_ID": ""}, "run this script with sbatch"),
        ("--ckpt_dir x", {"SLURM_SUBMIT_DIR": "/"}, "run sbatch in the project's folder"),
    ],
)
def test_slurm_refuses(flags, more, told, slurm):
    code, _, stderr = finish(slurm(*flags.split(), **more))
    assert code == 2
    assert told in stderr
    assert stderr.count("\n") == 1


def test_requirements_agree():
    """But for PyTorch itself, which torch_xla's last release holds back, and for gcsfs: only TPU
    hosts train from gs:// as a rule."""
    tpu, gpu = pins("requirements-tpu.txt"), pins("requirements-gpu.txt")
    assert set(tpu) - set(gpu) == {"torch_xla", "libtpu", "jax", "jaxlib", "gcsfs"}
    of_pytorch = {"torch", "torchvision"}
    others = {name for name in set(tpu) & set(gpu) if tpu[name] != gpu[name]}
    assert others == of_pytorch
    # For older drivers it is the latest patch of the TPUs' PyTorch, for which torchao is too new.
    older = pins("requirements-gpu-cu128.txt")
    assert set(gpu) - set(older) == {"torchao"}
    assert {name for name in older if older[name] != gpu[name]} == of_pytorch
    for name in of_pytorch:
        assert older[name].rpartition(".")[0] == tpu[name].rpartition(".")[0]
    # TorchTPU is of the GPUs' PyTorch, and of the same packages beside it.
    torchtpu = pins("requirements-torchtpu.txt")
    assert {torchtpu[name] == gpu[name] for name in of_pytorch} == {True}
    assert set(torchtpu) - set(tpu) == {"torch_tpu"}
    assert {name for name in set(torchtpu) & set(tpu) if torchtpu[name] != tpu[name]} == {
        *of_pytorch,
        "libtpu",
    }
    # What all of them install stands in one file.
    common = pins("requirements-common.txt")
    for path in ROOT.glob("requirements-*.txt"):
        packages = re.findall(r"^([\w-]+)==", path.read_text(), re.MULTILINE)
        assert path.name == "requirements-common.txt" or not common.keys() & packages, path


@pytest.mark.long
def test_one_node_without_gpu(tmp_path):
    program = ["-m", "tests.fakes.one_process_with_gpu", "--backend", "cuda", "--fsdp", "fsdp2"]
    done = run_program(
        *program, "--fake_data", *TINY_MODEL, "--ckpt_dir", str(tmp_path), processes=2
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("run_vit_training")]
    assert f"error: PyTorch finds no CUDA GPU on {socket.gethostname()}, unlike on" in line
    assert "Error: " not in done.stderr.replace("ChildFailedError: ", "")
    assert not list(tmp_path.iterdir())


def test_torchrun_leaves_nothing_in_the_temporary_folder(tmp_path):
    (tmp_path / "tmp").mkdir()
    program = tmp_path / "program.py"
    program.write_text("import os; print('reports', os.environ['TORCHELASTIC_ERROR_FILE'])")
    words = ["launch/torchrun.py", *"--nodes 1 -- --nproc-per-node 1".split(), str(program)]
    done = run_program(*words, variables={"TMPDIR": str(tmp_path / "tmp")})
    assert f"reports {tmp_path}/tmp/torchelastic_" in done.stdout, done.stderr
    assert not list((tmp_path / "tmp").iterdir())


INSTALL_TE = ROOT / "launch" / "install_transformer_engine.sh"


@pytest.mark.parametrize(
    ("cuda", "file", "package"),
    [
        ("13.0", "requirements-gpu.txt", "transformer_engine[pytorch,core_cu13]==2.20.2"),
        ("12.8", "requirements-gpu-cu128.txt", "transformer_engine[pytorch,core_cu12]==2.12.0"),
    ],
)
def test_transformer_engine_is_compiled_for_the_pytorch_that_is_there(
    cuda, file, package, tmp_path
):
    """With this PyTorch as a constraint, CUDA's toolkit, and the headers of PyTorch's wheels."""
    answers = f"*torch*) echo {cuda} ;; *nvidia*) echo /wheels ;;"
    python = script(tmp_path / "python", f'case $2 in {answers} *) echo "$@" "$CPATH" ;; esac')
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "nvcc", "exit")
    run = start(INSTALL_TE, cwd=tmp_path, PYTHON=str(python), CUDA_HOME=str(tmp_path), CPATH="/own")
    compiled = succeed(run).splitlines()[-1]
    headers = "/wheels/cudnn/include:/wheels/nccl/include:/own"
    assert compiled == f"-m pip install --no-build-isolation -c {ROOT}/{file} {package} {headers}"


@pytest.mark.parametrize(
    ("words", "prints", "told"),
    [
        ("--help me", "13.0", None),
        ("--hlep", "13.0", "unknown argument --hlep"),
        ("", "13.0", "bin/nvcc: install the CUDA 13.0 toolkit, or set CUDA_HOME"),
        ("", "None", "has a PyTorch for CUDA None, not 12 or 13"),
        ("", "", "cannot import PyTorch: first run "),
    ],
)
def test_what_transformer_engine_needs(words, prints, told, tmp_path):
    python = script(tmp_path / "python", f"echo {prints}" if prints else "exit 1")
    run = start(INSTALL_TE, *words.split(), PYTHON=str(python), CUDA_HOME=str(tmp_path))
    if told:
        assert told in refused(run)
    else:
        assert succeed(run).startswith("Install TransformerEngine for --block te")
