"""Run a JobSet of TPU slices elastically on Google Kubernetes Engine, on all usable slices.

    python3 -m launch.gke --elastic 1 launch/gke.yaml

replaces ``kubectl apply -f launch/gke.yaml``, with which Kubernetes starts all slices of a JobSet
or none. This launcher queries kubectl for the usable slices, applies the JobSet with that many
replicas, and applies it again with fewer or more when the number changes. It needs kubectl and can
run anywhere.
"""

import argparse
import contextlib
import copy
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("gke", oldest=(3, 10), packages=())

from config_fields import count, not_empty, path_or_url
from launch import STOPS, LauncherParser, UsageError, write_line
from launch.ckpt_dir import lost_checkpoints
from launch.slices import Refused, Unanswered, ask, ask_json, reading
from launch.xla_dist import add_elastic_times

JOB_SET_LABEL = "jobset.sigs.k8s.io/jobset-name"
POOL_LABEL = "cloud.google.com/gke-nodepool"
TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
TPU = "google.com/tpu"
_AFTER_GRACE_SECONDS = 5.0
"""The seconds after their grace period in which Kubernetes kills and forgets pods."""


def main(argv: Sequence[str]) -> int:
    try:
        args = parse(argv)
        return ElasticJobSet(args, read_job_set(args)).follow()
    except UsageError as error:
        print(f"gke: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # nothing has been started yet
        return 130


def say(text: str) -> None:
    write_line(f"{time.strftime('%H:%M:%S')} gke: {text}", sys.stderr)


# -- the command line ------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises UsageError."""
    parser = LauncherParser(
        prog="python3 -m launch.gke",
        allow_abbrev=False,
        description="Run a JobSet of TPU slices, such as launch/gke.yaml, on all of its slices "
        "that are usable. Ctrl-C, SIGTERM and SIGHUP delete the JobSet, and its programs save a "
        "checkpoint; a second signal exits immediately. If the JobSet is already running, it is "
        "monitored. Exit code: 0 if it completed, 1 if it failed or was deleted.",
    )
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        type=path_or_url,
        help="JobSet in YAML; its replicas are the maximum number of slices",
    )
    add(
        "--elastic",
        metavar="MIN",
        type=count,
        required=True,
        help="train on the usable slices if there are at least MIN, and add a slice when it "
        "becomes usable again. A slice is a node pool whose nodes are all ready and run no "
        "TPU pods of other jobs. Pass --mesh_dcn slices and --micro_batch_size to the "
        "program",
    )
    add_elastic_times(parser)
    add("--namespace", type=not_empty, help="namespace of the JobSet (default: kubectl's)")
    add("--context", type=not_empty, help="kubectl context of the cluster (default: kubectl's)")
    return parser.parse_args(argv)


# -- the cluster -----------------------------------------------------------------------


def kubectl_command(args: argparse.Namespace, *words: str) -> list[str]:
    command = ["kubectl", *words]
    for flag in ("namespace", "context"):
        if value := getattr(args, flag):
            command.append(f"--{flag}={value}")
    return command


def kubectl(args: argparse.Namespace, *words: str, content: str = "") -> str:
    """Return what kubectl prints; ``content`` is its input. Raises Unanswered and UsageError."""
    return ask(kubectl_command(args, *words), content)


def items(args: argparse.Namespace, *words: str) -> list[dict[str, Any]]:
    """Return the objects that ``kubectl get`` lists. Raises Unanswered and UsageError."""
    command = kubectl_command(args, "get", *words, "--output=json")
    with reading("kubectl"):
        return [dict(item) for item in ask_json(command)["items"]]


@dataclass(frozen=True)
class JobSet:
    """The JobSet of a file."""

    content: dict[str, Any]
    name: str
    slices: int
    """Its replicas: the most slices that it trains on."""
    machines: int
    """The machines of a slice."""
    selector: str
    """The labels by which kubectl selects the machines."""
    grace_s: float
    """The seconds that its pods have between SIGTERM and SIGKILL."""


def read_job_set(args: argparse.Namespace) -> JobSet:
    """Let kubectl read the file. Raises UsageError if it is no JobSet that can be elastic."""
    words = ("create", "--dry-run=client", "--output=json", f"--filename={args.file}")
    try:
        content = json.loads(kubectl(args, *words))
        if content["kind"] != "JobSet":
            raise UsageError(f"{args.file} contains a {content['kind']}, not exactly one JobSet")
        (job,) = content["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        labels, slices = dict(pod["nodeSelector"]), int(job.get("replicas", 1))
        machines = int(job["template"]["spec"]["parallelism"])
        grace = float(pod.get("terminationGracePeriodSeconds", 30))
        lost = [lost_checkpoints(*each) for each in commands_of(pod)]
    except Unanswered as reason:
        raise UsageError(f"kubectl cannot read {args.file}: {reason}") from None
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UsageError(
            f"{args.file} is not like launch/gke.yaml: it must have one replicated job with "
            "parallelism, nodeSelector and containers"
        ) from None
    if TOPOLOGY_LABEL not in labels:
        raise UsageError(f"{args.file}: nodeSelector lacks {TOPOLOGY_LABEL}")
    if slices < 2:
        raise UsageError(
            f"{args.file}: --elastic requires several slices; set replicas to 2 or more"
        )
    if not 1 <= args.elastic <= slices:
        raise UsageError(
            f"--elastic {args.elastic} must be between 1 and {slices}, the replicas in {args.file}"
        )
    if any(lost):
        raise UsageError(
            f"{args.file}: pods are deleted with the checkpoints in {next(filter(None, lost))}: "
            "use --ckpt_dir gs://bucket/folder, or a folder in a volume that outlives them"
        )
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    return JobSet(content, str(content["metadata"]["name"]), slices, machines, selector, grace)


def commands_of(pod: dict[str, Any]) -> list[tuple[list[str], list[str]]]:
    """Return the command of each container of a pod, and its folders in volumes that outlive the
    pod."""
    volumes = {
        volume["name"]
        for volume in pod.get("volumes", [])
        if not {"emptyDir", "ephemeral"} & volume.keys()
    }
    commands = []
    for container in pod["containers"]:
        command = [*container.get("command", []), *container.get("args", [])]
        mounts = container.get("volumeMounts", [])
        folders = [mount["mountPath"] for mount in mounts if mount["name"] in volumes]
        commands.append((command, folders))
    return commands


def usable_slices(
    job: JobSet, nodes: Sequence[dict[str, Any]], pods: Sequence[dict[str, Any]]
) -> int:
    """Return how many slices this JobSet can be on: node pools whose machines are all ready, and
    have no pods with TPUs but its own."""
    taken = {
        pod["spec"].get("nodeName")
        for pod in pods
        if pod.get("status", {}).get("phase") in ("Pending", "Running")
        and pod["metadata"].get("labels", {}).get(JOB_SET_LABEL) != job.name
        and any(
            TPU in container.get("resources", {}).get("limits", {})
            for container in pod["spec"]["containers"]
        )
    }
    ready = Counter(
        node["metadata"]["labels"].get(POOL_LABEL)
        for node in nodes
        if is_ready(node)
        and not node["spec"].get("unschedulable")
        and node["metadata"]["name"] not in taken
    )
    return sum(machines >= job.machines for machines in ready.values())


def is_ready(node: dict[str, Any]) -> bool:
    return any(
        (condition["type"], condition["status"]) == ("Ready", "True")
        for condition in node.get("status", {}).get("conditions", [])
    )


# -- the run ---------------------------------------------------------------------------


class ElasticJobSet:
    """A JobSet that is applied to the slices that can be used, until it ends."""

    def __init__(self, args: argparse.Namespace, job: JobSet) -> None:
        self._args, self._job = args, job
        self._slices = 0
        """The slices that the JobSet is on; 0: it does not run."""
        self._fewer_since: float | None = None
        self._said = ""
        self._stopped_by, self._stop = 0, threading.Event()
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._stopped_by:
            raise SystemExit(128 + number)
        self._stopped_by = number
        self._stop.set()

    def follow(self) -> int:
        """Run the JobSet on the slices that can be used; return the exit code. Raises UsageError if
        a person has to act before it can be started."""
        while not self._stopped_by:
            try:
                with reading("kubectl"):
                    code = self._look()
            except Unanswered as reason:
                if isinstance(reason, Refused) and not self._slices:
                    raise UsageError(str(reason)) from None
                code = None
                self._say_once(f"the cluster does not respond, retrying: {reason}")
            if code is not None:
                return code
            self._stop.wait(self._args.elastic_poll)
        if self._slices:
            say("deleting the JobSet; its programs save a checkpoint")
            self._end()
        return 128 + (signal.SIGINT if self._stopped_by == signal.SIGINT else signal.SIGTERM)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            say(text)
        self._said = text

    def _job_set(self) -> dict[str, Any] | None:
        """Return the JobSet as the cluster has it; None if it has none."""
        job_sets = items(self._args, "jobsets.jobset.x-k8s.io")
        return next((item for item in job_sets if item["metadata"]["name"] == self._job.name), None)

    def _look(self) -> int | None:
        """Look at the cluster once and do what follows; return the exit code if it has ended."""
        job, args, job_set = self._job, self._args, self._job_set()
        if not job_set and self._slices:
            say(f"error: JobSet {job.name} was deleted")
            return 1
        if job_set:
            for condition in job_set.get("status", {}).get("conditions", []):
                if condition["status"] == "True" and condition["type"] in ("Completed", "Failed"):
                    say(
                        f"JobSet {job.name} has {condition['type'].lower()}; before starting it "
                        f"again: kubectl delete jobset {job.name}"
                    )
                    return int(condition["type"] == "Failed")
            if not self._slices and job_set["metadata"].get("deletionTimestamp"):
                self._say_once(f"waiting for the deleted JobSet {job.name} to end")
                return None
            if not self._slices:
                say(f"JobSet {job.name} is already running, monitoring it")
            self._slices = job_set["spec"]["replicatedJobs"][0]["replicas"]

        nodes = items(args, "nodes", f"--selector={job.selector}")
        usable = usable_slices(job, nodes, items(args, "pods", "--all-namespaces"))
        usable = min(job.slices, usable)
        if usable >= (self._slices or job.slices):
            self._fewer_since = None
            if usable > self._slices:
                self._start(usable)
            return None
        now = time.monotonic()
        self._fewer_since = self._fewer_since or now
        says = f"{usable} of {job.slices} slices are usable"
        if now - self._fewer_since < args.elastic_wait:
            self._say_once(f"{says}: waiting for more")
        elif usable < args.elastic:
            self._say_once(f"{says}, --elastic requires {args.elastic}: waiting for more")
        else:
            self._start(usable)
        return None

    def _start(self, slices: int) -> None:
        """Let the JobSet be on so many slices, after it has ended on others."""
        job, names = self._job, f"{slices} of {self._job.slices} slices"
        if self._slices:
            say(
                f"changing from {self._slices} to {names}: ending the JobSet, with a checkpoint "
                "if possible"
            )
            self._end()
        if self._stopped_by:
            return
        # With ELASTIC_SLICES the program checks its flags for each number of slices.
        content = copy.deepcopy(job.content)
        (replicated_job,) = content["spec"]["replicatedJobs"]
        replicated_job["replicas"] = slices
        elastic_slices = f"{self._args.elastic}:{job.slices}"
        for container in replicated_job["template"]["spec"]["template"]["spec"]["containers"]:
            variables = container.setdefault("env", [])
            variables.append({"name": "ELASTIC_SLICES", "value": elastic_slices})
        kubectl(self._args, "apply", "--filename=-", content=json.dumps(content))
        self._slices, self._fewer_since, self._said = slices, None, ""
        say(
            f"started {job.name} on {names}; follow its output with: kubectl logs -f --prefix -l "
            f"{JOB_SET_LABEL}={job.name} --max-log-requests {slices * job.machines}"
        )

    def _end(self) -> None:
        """Delete the JobSet and wait until its pods have ended: two runs must not be in one folder.

        Pods on machines that are gone never end: these are forgotten after their grace period.
        Such a machine cannot train on, as the others of its slice have ended.
        """
        args, job, is_deleted = self._args, self._job, False
        forget_at = time.monotonic() + job.grace_s + _AFTER_GRACE_SECONDS
        while True:
            with contextlib.suppress(Unanswered), reading("kubectl"):
                if not is_deleted:
                    kubectl(
                        args,
                        *("delete", "jobsets.jobset.x-k8s.io", job.name),
                        *("--ignore-not-found", "--wait=false", "--cascade=foreground"),
                    )
                    is_deleted = True
                pods = items(args, "pods", f"--selector={JOB_SET_LABEL}={job.name}")
                if not pods and not self._job_set():
                    self._slices = 0
                    return
                if time.monotonic() > forget_at:
                    nodes = items(args, "nodes", f"--selector={job.selector}")
                    ready = {node["metadata"]["name"] for node in nodes if is_ready(node)}
                    lost = [
                        pod["metadata"]["name"]
                        for pod in pods
                        if pod["spec"].get("nodeName") not in ready
                    ]
                    if lost:
                        say(f"force-deleting pods on lost nodes: {', '.join(lost)}")
                        kubectl(args, "delete", "pods", *lost, "--force", "--grace-period=0")
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
