"""The program under test: its start on each backend, its processes, what it leaves."""

import contextlib
import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.common import ROOT
from tests.support.cli import ALL_DIGITS, environment
from tests.support.running import running_with
from tests.support.tensorboard_files import scalars_of
from training.checkpoints.format import damage
from training.checkpoints.inventory import complete_checkpoints, step_of
from training.logs.records import TENSORBOARD_DIR, read_events, read_metrics

STEPS = 40
SAVE_INTERVAL, KEEP = 3, 3
# Four tokens an image, and dropout of every kind, so that random state counts. Eleven steps make an
# epoch; a checkpoint is written before each evaluation.
FLAGS = (
    "--hflip 0.5 --image_size 16 --patch_size 8 --embed_dim 32 --num_heads 2 --num_blocks 2 "
    "--num_classes 10 --mlp_dropout 0.1 --att_dropout 0.1 --pos_dropout 0.1 --drop_path_rate 0.2 "
    "--batch_size 128 --num_epochs 4 --warmup_steps 4 --lr 1e-2 --num_workers 1 "
    f"--max_steps {STEPS} --log_step_interval 1 --test_epoch_interval 2 --ckpt_epoch_interval 2 "
    f"--ckpt_step_interval {SAVE_INTERVAL} --keep_checkpoints {KEEP}"
).split()
COMPARED = ("loss", "grad_norm", "lr", "val_loss", "val_top1", "val_images")
LIMIT_S = 300.0
"""The seconds after which a program counts as hanging."""
# Of whoever starts the benchmark: a cluster's job, or torchrun.
_NOT_PASSED_ON = re.compile(
    "SLURM_|RUN_|RDZV_|MASTER_|TORCHELASTIC_|(NNODES|NODE_RANK|MAX_RESTARTS|STEP_TIMEOUT_S|RANK|"
    "LOCAL_RANK|WORLD_SIZE)$"
)


@dataclass(frozen=True)
class Setup:
    """A way to start the program on this machine's CPU."""

    title: str
    flags: tuple[str, ...]
    module: str = ""
    """The module that stands for run_vit_training.py, if any."""
    processes: int = 1
    groups: int = 0
    """Each process is a host with a disk of its own, for a second tier of checkpoints, in one of
    this many groups, as slices; 0: there are no such hosts."""
    python: tuple[str, ...] = (sys.executable,)
    variables: Mapping[str, str] = field(default_factory=dict)
    by_torchrun: bool = True
    """Whether torchrun starts the processes, if there are several."""

    def command(self, ckpt_dir: Path | str, *flags: str) -> list[str]:
        """Return the command line of a whole run."""
        program = ["-m", self.module] if self.module else [str(ROOT / "run_vit_training.py")]
        where = ["--data_dir", str(ALL_DIGITS), "--ckpt_dir", str(ckpt_dir)]
        alone = [*program, *self.flags, *where, *FLAGS, *flags]
        if self.processes == 1 or not self.by_torchrun:
            return [sys.executable, *alone]
        if not self.module:
            return [str(ROOT / "launch" / "torchrun.sh"), *alone[1:]]
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {self.processes}"
        return [*self.python, *torchrun.split(), *alone]

    @property
    def group_size(self) -> int:
        return self.processes // self.groups

    def why_not(self) -> str | None:
        """Return the reason why this machine cannot start it, or None."""
        if shutil.which(self.python[0]):
            return None
        return f"there is no {Path(self.python[0]).relative_to(ROOT)}: make test-torchtpu makes it"


_NEWER = str(ROOT / ".venv-newer" / "bin" / "python")
_HOSTS = "tests.fakes.hosts_with_disks"
_EACH_STEP = ("--local_ckpt_step_interval", "1")
SETUPS = {
    "xla": Setup("XLA, 2 devices", ("--backend", "xla", "--cpu_devices", "2")),
    "fsdp2": Setup("FSDP2, 2 processes", ("--backend", "cuda", "--fsdp", "fsdp2"), processes=2),
    "megatron": Setup(
        "Megatron-FSDP, 2 processes",
        ("--backend", "cuda", "--fsdp", "megatron"),
        module="tests.fakes.megatron_on_cpu",
        processes=2,
    ),
    "xla_hosts": Setup(
        "XLA, 2 rehearsed slices of 2 hosts",
        ("--mesh_dcn", "2", "--micro_batch_size", "32", *_EACH_STEP),
        module="tests.fakes.pod_of_hosts",
        processes=4,
        groups=2,
        variables={"SLICES": "2"},
        by_torchrun=False,
    ),
    "fsdp2_hosts": Setup(
        "FSDP2, 2 replicas of 2 hosts",
        tuple("--backend cuda --fsdp fsdp2 --mesh_dcn 2 --micro_batch_size 32".split())
        + _EACH_STEP,
        module=_HOSTS,
        processes=4,
        groups=2,
    ),
    "simple_hosts": Setup(
        "SimpleFSDP as one graph, 2 replicas of 2 hosts",
        tuple("--backend cuda --fsdp simple --compile --mesh_dcn 2 --micro_batch_size 32".split())
        + _EACH_STEP,
        module=_HOSTS,
        processes=4,
        groups=2,
    ),
    "megatron_hosts": Setup(
        "Megatron-FSDP, 2 groups of 2 hosts, AdamW's state over all",
        tuple(
            "--backend cuda --fsdp megatron --mesh_dcn 2 --outer_dp_sharding_strategy optim "
            "--zero_dp_strategy 3".split()
        )
        + _EACH_STEP,
        module=_HOSTS,
        processes=4,
        groups=2,
    ),
    "torchtpu_hosts": Setup(
        "TorchTPU, 2 hosts",
        _EACH_STEP,
        module="tests.fakes.torchtpu_on_cpu",
        processes=2,
        groups=1,
        python=(_NEWER, "-m", "tests.hardware.torchtpu.plugin"),
        variables={"PROGRAM": _HOSTS},
    ),
    "alone": Setup("FSDP2, 1 process", ("--backend", "cuda", "--fsdp", "fsdp2")),
}


# -- processes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A process of a running program."""

    pid: int
    parent: int
    rank: int | None
    """The number that its launcher gave it; its children, as loader processes, have it too."""
    command: list[str]


class Running:
    """A program that was started, with all the processes that came of it.

    All carry a mark in their environment, by which they are found whoever their parent is by now.
    """

    def __init__(self, command: list[str], log: Path, **variables: str) -> None:
        self._mark = f"FAULT_TRY={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        inherited = {k: v for k, v in environment().items() if not _NOT_PASSED_ON.match(k)}
        ours = {
            "PYTHON": sys.executable,
            "NPROC_PER_NODE": "2",
            "PYTHONPATH": str(ROOT),
            name: value,
        }
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            self.root = subprocess.Popen(
                command,
                cwd=ROOT,
                env=inherited | ours | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known: list[int] = []

    def members(self) -> list[Member]:
        """Return all processes that live."""
        found = []
        for process in running_with(self._mark):
            with contextlib.suppress(OSError):  # it has ended
                stat = Path(f"/proc/{process.pid}/stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                names = ("RANK=", "REHEARSAL_WORKER=")
                ranks = [int(v.partition("=")[2]) for v in process.variables if v.startswith(names)]
                rank = ranks[0] if ranks else None
                found.append(Member(process.pid, parent, rank, process.words))
        self._known = [member.pid for member in found]
        return found

    def ranks(self) -> dict[int, Member]:
        """Return the training processes that live, by rank."""
        members = {member.pid: member for member in self.members()}
        root = members.get(self.root.pid)
        if any(member.rank is not None for member in members.values()):
            parents = {m.pid for m in members.values() if m.rank is not None}
            return {
                m.rank: m
                for m in members.values()
                if m.rank is not None and m.parent not in parents
            }
        return {0: root} if root else {}

    def loaders(self) -> list[Member]:
        """Return the processes that load images: copies of the training processes."""
        training = {member.pid: member for member in self.ranks().values()}
        return [
            m
            for m in self.members()
            if m.parent in training and m.command == training[m.parent].command
        ]

    def signal(self, number: int, pids: list[int] | None = None) -> None:
        """Send a signal to all processes, or to some that were members."""
        for pid in pids or [*self._known, *(m.pid for m in self.members())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ended(self) -> bool:
        """Return True if what was started has ended; others of its processes may live."""
        return self.root.poll() is not None

    def wait(self, limit_s: float = LIMIT_S) -> bool:
        """Wait for what was started to end; return False if it has not by then."""
        try:
            self.root.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for_all(self, limit_s: float) -> list[Member]:
        """Wait for all its processes to end; return those that have not by then."""
        deadline = time.monotonic() + limit_s
        self.wait(limit_s)
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def wait_until(self, condition: Callable[[], bool], pause_s: float = 0.02) -> bool:
        """Wait until a condition holds; return False if the program ends, or hangs, before."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self.ended() or time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
        return True

    def output(self) -> str:
        """Return what it has printed on stdout and stderr."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[Running]:
    """Start a program; on leaving, none of its processes is left."""
    program = Running(command, log, **variables)
    try:
        yield program
    finally:
        while program.members():
            program.signal(signal.SIGKILL)
            time.sleep(0.02)
        program.root.wait()


# -- what a run leaves ----------------------------------------------------------------


def last_step(ckpt_dir: Path) -> int:
    """Return the last step in metrics.jsonl; 0 if there is none."""
    return max((r["step"] for r in read_metrics(ckpt_dir) if "loss" in r), default=0)


def last_step_printed(output: str) -> int:
    """Return the last step of which a start has printed the loss; 0 if there is none."""
    return max(map(int, re.findall(r"^epoch \d+ step (\d+), lr", output, re.MULTILINE)), default=0)


def newest_step(ckpt_dir: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    return max((step_of(path) for path in complete_checkpoints(ckpt_dir)), default=0)


def resumed_step(output: str) -> int:
    """Return the step at which a start resumed, as it printed; 0 if it started a new run."""
    found = re.search(r"^resuming .* at step (\d+)", output, re.MULTILINE)
    return int(found[1]) if found else 0


def _curves(ckpt_dir: Path) -> list[tuple]:
    """Return what has to be equal, in the order of the file: (step, epoch, column, value)."""
    return [
        (record["step"], record["epoch"], column, record[column])
        for record in read_metrics(ckpt_dir)
        for column in COMPARED
        if column in record
    ]


def other_records_differ(ckpt_dir: Path) -> str | None:
    """Return what TensorBoard's files or events.jsonl have other than metrics.jsonl; else None."""
    records = read_metrics(ckpt_dir)
    for column, tag in (("loss", "train/loss"), ("val_loss", "val/loss")):
        wanted = [(r["step"], r[column]) for r in records if r.get(column) is not None]
        shown = scalars_of(ckpt_dir / TENSORBOARD_DIR, tag)
        for ours, theirs in itertools.zip_longest(shown, wanted):
            if None in (ours, theirs) or ours != (theirs[0], np.float32(theirs[1])):
                return f"TensorBoard's {tag} differs: {ours}, expected {theirs}"
    # A start continues after a step up to which the starts before it have noted all.
    noted: set[int] = set()
    for event in read_events(ckpt_dir):
        step, kind = event["step"], event["event"]
        if kind == "start":
            if missing := set(range(1, step + 1)) - noted:
                return f"events.jsonl lacks step {min(missing)}, and a start continues after {step}"
            noted &= set(range(1, step + 1))
        new = {"first_step": 1, "steps": event.get("steps", 0)}.get(kind, 0)
        noted |= set(range(step - new + 1, step + 1))
    last = max(record["step"] for record in records)
    if missing := set(range(1, last + 1)) - noted:
        return f"events.jsonl lacks step {min(missing)}"
    return None


def difference(ckpt_dir: Path, expected: Path) -> str | None:
    """Return what of a completed run is damaged, or not bit by bit as in another; else None."""
    found, wanted = _curves(ckpt_dir), _curves(expected)
    for ours, theirs in zip(found, wanted, strict=False):
        if ours != theirs:
            return f"metrics.jsonl differs: {ours}, expected {theirs}"
    if len(found) != len(wanted):
        return f"metrics.jsonl has {len(found)} values, expected {len(wanted)}"
    if problem := other_records_differ(ckpt_dir):
        return problem
    steps = [step_of(path) for path in complete_checkpoints(ckpt_dir)]
    if steps[-1:] != [STEPS] or len(steps) != KEEP:
        return f"checkpoints of steps {steps}, expected {KEEP}, the last of step {STEPS}"
    for path in complete_checkpoints(ckpt_dir):
        if problem := damage(path):
            return f"{path.name} is damaged: {problem}"
    return None
