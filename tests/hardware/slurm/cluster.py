"""A Slurm cluster of real daemons: a login node, which has slurmctld, and nodes with slurmd.

Each node is a network and a host name of its own, joined by a bridge; see ``__main__``.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.cli import ROOT
from tests.support.running import Running, running_with

NODES = ("node1", "node2")
LOGIN = "login"
ADDRESSES = {name: f"10.77.0.{number}" for number, name in enumerate((LOGIN, *NODES), 10)}
GRACE_SECONDS = 60
KILL_WAIT_SECONDS = 30
"""From SIGTERM to SIGKILL where there is no GraceTime; Slurm's default."""

# slurm.sbatch asks for 8 GPUs and 64 CPUs a node: the nodes have them, on paper. Two partitions:
# a job in `urgent` puts those in `normal` back into the queue, after GraceTime.
SLURM_CONF = f"""
ClusterName=test
SlurmctldHost={LOGIN}
SlurmUser={{user}}
SlurmdUser={{user}}
AuthInfo=socket={{folder}}/munge/socket
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/spool-%n
SlurmctldPidFile={{folder}}/slurmctld.pid
SlurmdPidFile={{folder}}/slurmd-%n.pid
SlurmctldLogFile={{folder}}/slurmctld.log
SlurmdLogFile={{folder}}/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
KillWait={KILL_WAIT_SECONDS}
MessageTimeout=60
MpiDefault=none
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={",".join(NODES)} CPUs=64 Gres=gpu:8
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime={GRACE_SECONDS}
PartitionName=strict Nodes=ALL PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.variables = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM_", "SBATCH_"))
            },
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHON": sys.executable,
            "NPROC_PER_NODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._write_files()

    def _write_files(self) -> None:
        for name in (
            "munge",
            "state",
            "gpus",
            "cgroup",
            "cgroup/freezer",
            *(f"spool-{node}" for node in NODES),
        ):
            (self.folder / name).mkdir()
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(folder=self.folder, user=getpass.getuser())
        )
        (self.folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.folder}/cgroup\n"
        )
        for number in range(8):  # stand for /dev/nvidia0 to 7
            (self.folder / "gpus" / str(number)).touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpus/[0-7]\n")
        names = [f"{address} {name}" for name, address in ADDRESSES.items()]
        (self.folder / "hosts").write_text("\n".join(("127.0.0.1 localhost", *names, "")))

    # -- daemons ----------------------------------------------------------------------

    def start(self) -> None:
        ip = "ip link set lo up; ip link add cluster type bridge; ip link set cluster up; "
        shell(
            f"hostname {LOGIN}; mount --bind {self.folder}/hosts /etc/hosts; {ip}"
            f"ip address add {ADDRESSES[LOGIN]}/24 dev cluster"
        )
        # Of its own: most machines have control groups v2 only, which slurmd shares with systemd.
        shell(f"mount -t cgroup -o freezer cgroup {self.folder}/cgroup/freezer")
        munge = f"{self.folder}/munge"
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--socket={munge}/socket",
            f"--key-file={munge}/key",
            f"--seed-file={munge}/seed",
            f"--pid-file={munge}/pid",
        )
        until(lambda: (self.folder / "munge" / "socket").exists(), 30, "munged's socket")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        until(lambda: set(self.nodes().values()) == {"idle"}, 60, "both nodes to be idle")

    def start_node(self, node: str) -> None:
        """The node waits for its network, then becomes slurmd."""
        waiting = self._start(
            node,
            "unshare",
            "--net",
            "--uts",
            "bash",
            "-c",
            'read -r && exec slurmd -D -N "$0"',
            node,
        )
        login = os.stat("/proc/self/ns/net").st_ino
        namespace = Path("/proc", str(waiting.pid), "ns", "net")
        until(lambda: os.stat(namespace).st_ino != login, 30, f"{node}'s network")
        shell(
            f"ip link add to{node} type veth peer name eth0 netns {waiting.pid}; "
            f"ip link set to{node} master cluster up"
        )
        shell(
            f"nsenter --target {waiting.pid} --net --uts sh -ec 'hostname {node}; "
            f"ip link set lo up; ip address add {ADDRESSES[node]}/24 dev eth0; "
            "ip link set eth0 up'"
        )
        assert waiting.stdin is not None
        waiting.stdin.write(b"\n")
        waiting.stdin.flush()

    def lose_node(self, node: str) -> None:
        """Nothing runs there any more; Slurm is told at once what it would find out in minutes."""
        network = os.stat(f"/proc/{self._daemons[node].pid}/ns/net").st_ino
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.stat(path / "ns" / "net").st_ino == network:
                    os.kill(int(path.name), signal.SIGKILL)
        self._daemons[node].wait()
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def repair_node(self, node: str) -> None:
        self.start_node(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as output:
            daemon = subprocess.Popen(
                command,
                env=self.variables,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._daemons[name] = daemon
        return daemon

    def stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for node in NODES:
            for path, _, _ in os.walk(f"{self.folder}/cgroup/freezer/slurm_{node}", topdown=False):
                os.rmdir(path)

    # -- what a user types ------------------------------------------------------------

    def run(self, *command: object) -> str:
        done = subprocess.run(
            [str(word) for word in command],
            env=self.variables,
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, output: Path, *words: object, options: str = "") -> Job:
        """``sbatch launch/slurm.sbatch``, as it is."""
        said = self.run(
            "sbatch", f"--output={output}", *options.split(), "launch/slurm.sbatch", *words
        )
        return Job(self, said.rpartition(" ")[2], output)

    def nodes(self) -> dict[str, str]:
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)


class Job:
    def __init__(self, cluster: Cluster, number: str, output: Path) -> None:
        self.cluster, self.number, self._output = cluster, number, output

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def field(self, name: str) -> str:
        """Of ``scontrol show job``."""
        said = self.cluster.run("scontrol", "show", "job", self.number)
        found = re.search(rf"(?<!\S){name}=(\S*)", said)
        return found[1] if found else ""

    def wait(self, *states: str, seconds: float = 240) -> None:
        """Until its state is one of these.

        Slurm lets a job that was requeued rest for two minutes, as until then a node may take it
        for the one that has ended. Here a few seconds do.
        """
        hurried = set()

        def reached() -> bool:
            state, restarts = self.field("JobState"), self.field("Restarts")
            if self.field("Reason") == "BeginTime" and restarts not in hurried:
                hurried.add(restarts)
                self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+4")
            return state in states

        until(reached, seconds, f"job {self.number} to be {states}", self._told)

    def _told(self) -> str:
        log = (self.cluster.folder / "slurmctld.log").read_text().splitlines()[-40:]
        state = self.cluster.run("scontrol", "show", "job", self.number)
        return "\n".join((state, "-- output", self.output, "-- slurmctld", *log))

    def processes(self) -> dict[int, str]:
        """What runs of it on any node: the command lines."""
        return {each.pid: " ".join(each.words) for each in self._processes()}

    def rank(self, number: int) -> int:
        """The process that trains as this rank, not a loader of it."""
        ranks = [
            each.pid
            for each in self._processes()
            if f"RANK={number}" in each.variables and "run_vit_training.py" in " ".join(each.words)
        ]
        return min(ranks)

    def _processes(self) -> Iterator[Running]:
        return running_with(f"SLURM_JOB_ID={self.number}")

    def end(self) -> None:
        """Whatever has become of it."""
        self.cluster.run("scancel", self.number)
        until(lambda: not self.processes(), KILL_WAIT_SECONDS + 30, "its processes to end")


def shell(script: str) -> None:
    subprocess.run(["bash", "-euc", script], check=True)


def until(
    reached: Callable[[], bool], seconds: float, what: str, told: Callable[[], str] = str
) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}\n{told()}"
        time.sleep(0.2)
