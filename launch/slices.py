"""Access to the hosts of TPU slices through gcloud: list them, run a command, copy a file to all.

A slice is a TPU VM of the Cloud TPU API (``gcloud compute tpus tpu-vm``) or, on Compute Engine, a
managed instance group or a single VM. ``describe`` determines which; no other launcher module calls
gcloud about an existing slice.

    python3 -m launch.slices --tpu NAME FILE      copies a file to all hosts' home folders
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("slices", oldest=(3, 10), packages=())

from config_fields import not_empty
from launch import Failed, LauncherParser, UsageError, write_line

SSH_OPTIONS = ("-oServerAliveInterval=30", "-oServerAliveCountMax=4", "-oConnectTimeout=30")
"""ssh reports a worker that is gone after two minutes; by default it may wait for hours."""
ASK_SECONDS = 60.0
"""The seconds after which a call of gcloud, or a connection that only asks, counts as failed."""
_PATIENCE_SECONDS, _ASK_AGAIN_SECONDS = 300.0, 10.0
"""How long a launcher that starts asks about a slice until gcloud answers, and how often."""
_NEEDS_PERSON = re.compile(
    r"required property \[|invalid_grant|active account|credentials were not found|reauthentication"
    r"|permission|forbidden|unauthorized|must be logged in"
    r"|service_disabled|accessnotconfigured|has not been used in project|not enabled on project"
    r"|'projects/[^/']*' was not found|valid project id|user_project_denied|unknown zone"
    r"|no configuration has been provided|context \S+ does not exist|have a resource type",
    re.I,
)
"""What gcloud and kubectl say where they will say the same until somebody acts: no project, no
login, no permission, an API that is disabled, a cluster that is not configured."""
_NOT_FOUND = re.compile("NOT_FOUND|was not found")
"""What the Cloud TPU API and Compute Engine say of a resource that does not exist."""
_NO_COMMAND = 3
_FIND_COMMAND = (
    "import os, shutil, sys; os.chdir(os.path.expanduser(sys.argv[1])); "
    f"sys.exit(0 if shutil.which(sys.argv[2]) else {_NO_COMMAND})"
)


class Unanswered(Exception):
    """Raised if a command of a cloud fails or does not answer; with what it says."""


class Refused(Unanswered):
    """Raised if a command of a cloud will not answer until a person has put something right."""


class Missing(Unanswered):
    """Raised if what a command of a cloud is about does not exist."""


def ask(command: Sequence[str], content: str = "", seconds: float | None = ASK_SECONDS) -> str:
    """Return what a command of a cloud, gcloud or kubectl, prints; ``content`` is its input.

    Raises Unanswered, also after ``seconds``, or UsageError where it is not installed.
    """
    try:
        answer = subprocess.run(
            command,
            input=content,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=seconds,
            start_new_session=True,  # Ctrl-C is for the launcher alone
        )
    except FileNotFoundError:
        raise UsageError(f"{command[0]} not found on PATH: install it") from None
    except OSError as failure:
        raise UsageError(f"{command[0]} cannot be run: {failure.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command[0]} did not respond within {seconds:.0f} s") from None
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line.strip()] or ["no reason given"]
        # gcloud's line and, of Compute Engine, the list of reasons after it.
        first = next((n for n, line in enumerate(lines) if line.startswith("ERROR: ")), -1)
        error = lines[first]
        if error.rstrip().endswith(":"):
            rest = lines[first + 1 :]
            error += "".join([line[2:] for line in rest if line.startswith(" - ")] or rest[:1])
        reason = " ".join(re.sub(r"^ERROR: (\([\w.-]+\) )?", "", error).split())
        if needs_person(reason):
            raise Refused(reason)
        raise (Missing if _NOT_FOUND.search(reason) else Unanswered)(reason)
    return answer.stdout


def needs_person(reason: str) -> bool:
    """Return True if gcloud or kubectl will say this until a person has put something right."""
    return bool(_NEEDS_PERSON.search(reason))


def ask_json(command: Sequence[str], kind: type = dict) -> Any:
    """Return the JSON that a command of a cloud prints, an object or with ``kind`` a list.

    Raises Unanswered, and Refused for anything else that is printed.
    """
    text = ask(command)
    with reading(command[0]):
        content = json.loads(text)
        if not isinstance(content, kind):
            raise TypeError
    return content


@contextlib.contextmanager
def reading(program: str) -> Iterator[None]:
    """Raise Refused if an answer of gcloud or kubectl that is read inside has another form."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        raise Refused(f"{program}'s description of it is not in the expected JSON format") from None


@dataclass(frozen=True)
class Slice:
    """A TPU slice as gcloud described it. Slices that train together have the same ``kind``."""

    name: str
    kind: str
    """Accelerator type and topology, as "V5LITE_POD 4x4" or "v6e-16 4x4"; empty if gcloud did not
    say."""
    topology: str
    """Chips along each side, as "4x4"; empty if gcloud did not say."""
    addresses: tuple[str, ...]
    """Of its workers, inside of their network."""
    problem: str
    """Why no program can be started on it, as far as gcloud says; "" if one can."""
    vms: tuple[str, ...] | None = None
    """On Compute Engine: the names of its workers' VMs; None for one of the Cloud TPU API."""
    is_spot: bool = False
    """Whether it is spot capacity, which does not come back after a preemption."""


APIS = ("tpu", "compute")
"""What may have a slice: the Cloud TPU API, Compute Engine."""
GROUP = ("instance-groups", "managed")

# -- gcloud's command lines ------------------------------------------------------------


def add_place(parser: argparse.ArgumentParser, *, any_api: bool = True) -> None:
    """Add the flags that say where slices are, and how to reach them; with ``any_api`` also which
    of ``APIS`` has them."""
    add = parser.add_argument
    add("--zone", type=not_empty, help="zone of the slice (default: gcloud's configuration)")
    add("--project", type=not_empty, help="project of the slice (default: gcloud's configuration)")
    if any_api:
        add(
            "--tpu_api",
            choices=APIS,
            help="API that manages the slice: the Cloud TPU API (tpu), or Compute Engine "
            "(compute) for an instance group or VM (default: query both)",
        )
    add(
        "--internal-ip",
        action="store_true",
        help="connect over internal IP addresses, for example from a VM in the same network "
        "(default: external)",
    )
    add(
        "--tunnel-through-iap",
        action="store_true",
        help="connect to Compute Engine VMs without external addresses through Google's "
        "Identity-Aware Proxy (default: off)",
    )


def gcloud_command(args: argparse.Namespace, *words: str, in_zone: bool = True) -> list[str]:
    """Return a command of ``gcloud compute``; without ``in_zone`` about what is in no zone."""
    command = ["gcloud", "compute", *words, "--quiet"]  # asks nothing
    for flag in ("zone", "project") if in_zone else ("project",):
        if value := getattr(args, flag):
            command.append(f"--{flag}={value}")
    return command


def describe_command(args: argparse.Namespace, api: str, name: str) -> list[str]:
    """Return the first command that asks one of ``APIS`` about a slice."""
    service = ("tpus", "tpu-vm") if api == "tpu" else GROUP
    return gcloud_command(args, *service, "describe", name, "--format=json")


def ssh_command(args: argparse.Namespace, slice_: Slice, worker: int, remote: str) -> list[str]:
    """Return the command that runs ``remote`` in a shell of one of this slice's workers."""
    command = _connect(args, slice_, worker, "ssh", f"--command={remote}")
    return command + [f"--ssh-flag={option}" for option in SSH_OPTIONS]


def _connect(
    args: argparse.Namespace, slice_: Slice, worker: int, how: str, *words: str
) -> list[str]:
    """Return a command of gcloud's ssh or scp; a word "NAME:" stands for the worker's home."""
    if slice_.vms is None:
        if args.tunnel_through_iap:
            raise UsageError("--tunnel-through-iap works only with slices on Compute Engine")
        name, service, number = slice_.name, ["tpus", "tpu-vm"], [f"--worker={worker}"]
    else:
        name, service, number = slice_.vms[worker], [], []
    target = [name] if how == "ssh" else []
    rest = [f"{name}:" if word == "NAME:" else word for word in words]
    command = gcloud_command(args, *service, how, *target, *number, *rest)
    command += ["--internal-ip"] if args.internal_ip else []
    return command + (["--tunnel-through-iap"] if args.tunnel_through_iap else [])


# -- what they say ---------------------------------------------------------------------


def describe(args: argparse.Namespace, name: str) -> Slice:
    """Ask gcloud for a slice. Raises Missing if there is none of this name, UsageError if there are
    two, Refused if a person has to act, and Unanswered if asking again may help."""
    asked = [args.tpu_api] if args.tpu_api else APIS

    def ask_api(api: str) -> Slice | Unanswered:
        try:
            with reading("gcloud"):
                return (_describe_node if api == "tpu" else _describe_vms)(args, name)
        except Unanswered as reason:
            return reason

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [*pool.map(ask_api, asked)]
    found = [answer for answer in answers if isinstance(answer, Slice)]
    if len(found) > 1:
        raise UsageError(
            f"--tpu {name} exists both in the Cloud TPU API and on Compute Engine: pass --tpu_api "
            "tpu or --tpu_api compute"
        )
    if not found:
        where = ("Cloud TPU API: ", "Compute Engine: ") if len(asked) > 1 else ("",)
        reasons = "; ".join(f"{api}{reason}" for api, reason in zip(where, answers, strict=True))
        kinds = {type(answer) for answer in answers}
        if Unanswered in kinds:
            raise Unanswered(f"gcloud cannot describe --tpu {name}: {reasons}")
        check = "; check the name and --zone" if Missing in kinds else ""
        kind = Refused if Refused in kinds else Missing
        raise kind(f"gcloud cannot describe --tpu {name}{check}: {reasons}")
    return found[0]


def describe_patiently(args: argparse.Namespace, name: str) -> Slice:
    """``describe``, again while gcloud does not answer. Raises UsageError where that is in vain,
    and Failed if gcloud does not answer for minutes."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return describe(args, name)
        except (Missing, Refused) as reason:
            raise UsageError(str(reason)) from None
        except Unanswered as reason:
            if time.monotonic() > deadline:
                raise Failed(str(reason)) from None
            print(f"{reason}; asking again", file=sys.stderr, flush=True)
            time.sleep(_ASK_AGAIN_SECONDS)


def _ask_gcloud(
    args: argparse.Namespace, *words: str, kind: type = dict, in_zone: bool = True
) -> Any:
    return ask_json(gcloud_command(args, *words, "--format=json", in_zone=in_zone), kind)


def _describe_node(args: argparse.Namespace, name: str) -> Slice:
    """Ask the Cloud TPU API. Raises Unanswered, and anything for an answer of another form."""
    node = _ask_gcloud(args, "tpus", "tpu-vm", "describe", name)
    config = node.get("acceleratorConfig", {})
    topology, state = config.get("topology", ""), node["state"]
    kind = f"{config.get('type') or node.get('acceleratorType', '')} {topology}".strip()
    addresses = tuple(host.get("ipAddress", "") for host in node.get("networkEndpoints") or ())
    problem = "" if addresses else "has no workers (no networkEndpoints)"
    if state != "READY":
        problem = f"is {state}, not READY: start or create it first"
    scheduling = node.get("schedulingConfig", {})
    is_spot = bool(scheduling.get("spot") or scheduling.get("preemptible"))
    return Slice(name, kind, topology, addresses, problem, is_spot=is_spot)


# -- on Compute Engine -----------------------------------------------------------------

NO_VMS = "has size 0 and no VMs"
"""What is said here of a group whose VMs were deleted, as at the end of flex-start."""


def _describe_vms(args: argparse.Namespace, name: str) -> Slice:
    """Ask Compute Engine for an instance group or, if there is none, for a VM of this name. Raises
    Unanswered, and anything for an answer of another form."""
    try:
        group = _ask_gcloud(args, *GROUP, "describe", name)
    except Missing:
        vm = _ask_gcloud(args, "instances", "describe", name)
        state = vm["status"]
        problem = "" if state == "RUNNING" else f"is {state}, not RUNNING: start it first"
        return _slice_of(name, [vm], problem)
    members = _ask_gcloud(args, *GROUP, "list-instances", name, kind=list)
    if problem := _group_problem(group, members):
        return Slice(name, "", "", (), problem, ())
    urls = [member["instance"] for member in members]
    names = " ".join(url.rpartition("/")[2] for url in urls)
    which = f"--filter=name=({names})"
    listed = _ask_gcloud(args, "instances", "list", which, kind=list, in_zone=False)
    return _slice_of(name, [vm for vm in listed if vm["selfLink"] in urls], "", len(urls))


def _group_problem(group: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> str:
    """Return why an instance group is no slice whose VMs all run; "" if it is one."""
    wanted, status = group["targetSize"], group.get("status", {})
    running = sum(
        member.get("instanceStatus") == "RUNNING" and member.get("currentAction") == "NONE"
        for member in members
    )
    if not wanted:
        return f"{NO_VMS}: create it again"
    if running < wanted or len(members) != wanted:
        # Where a group that is created as a whole says why it still waits, and where each VM does.
        progress = status.get("bulkInstanceOperation", {}).get("lastProgressCheck", {})
        attempts = [progress.get("error", {})]
        attempts += [member.get("lastAttempt", {}).get("errors", {}) for member in members]
        errors = [error for attempt in attempts for error in attempt.get("errors", ())]
        states = {member.get("instanceStatus") or member.get("currentAction") for member in members}
        why = f"{errors[0].get('code')}: {errors[0].get('message')}" if errors else ""
        why = why or ", ".join(sorted(filter(None, states - {"RUNNING", "NONE"})))
        return f"has {running} of {wanted} VMs running" + (f" ({why})" if why else "")
    if wanted > 1 and not group.get("resourcePolicies", {}).get("workloadPolicy"):
        return "has no workload policy, so its VMs do not form a slice"
    for topology in status.get("appliedAcceleratorTopologies", ()):
        if topology["state"] != "ACTIVE":
            return f"has topology {topology['acceleratorTopology']} in state {topology['state']}"
    return ""


def _slice_of(name: str, vms: Sequence[Mapping[str, Any]], problem: str, count: int = 1) -> Slice:
    """Return the slice of these VMs, ``count`` if none is missing, by what the metadata of each
    says: the worker's number, the accelerator type and the topology."""
    workers: dict[int, Mapping[str, Any]] = {}
    kinds = set()
    for vm in vms:
        metadata = {item["key"]: item["value"] for item in vm["metadata"].get("items", ())}
        tpu_env = dict(re.findall(r"(?m)^(\w+): *'?(.*?)'?$", metadata.get("tpu-env", "")))
        if "TOPOLOGY" in tpu_env:
            workers[int(metadata["agent-worker-number"])] = vm
            kinds.add((tpu_env["TPU_ACCELERATOR_TYPE"], tpu_env["TOPOLOGY"]))
    if problem or len(kinds) != 1 or sorted(workers) != [*range(count)]:
        problem = problem or (
            f"is not a slice: only {len(workers)} of its {count} VMs have metadata of one slice's "
            "workers (tpu-env, agent-worker-number)"
        )
        return Slice(name, "", "", (), problem, ())
    in_order = [workers[number] for number in range(count)]
    ((accelerator, topology),) = kinds
    return Slice(
        name,
        f"{accelerator} {topology}",
        topology,
        tuple(vm["networkInterfaces"][0]["networkIP"] for vm in in_order),
        problem,
        tuple(vm["name"] for vm in in_order),
        vms[0].get("scheduling", {}).get("provisioningModel") == "SPOT",
    )


# -- whether a program can start -------------------------------------------------------


def describe_usable(args: argparse.Namespace, name: str, kind: str) -> Slice | str:
    """Return the slice if it is of this kind and all its workers can start the program now; else
    why not.

    ssh must reach a worker, and it must have the command: a slice that was created again is empty.
    """
    try:
        slice_ = describe(args, name)
        if slice_.problem:
            return f"{name} {slice_.problem.partition(',')[0]}"
        if slice_.kind != kind:
            return f"{name} is now {slice_.kind}, but was {kind}"
        return _start_problem(args, slice_) or slice_
    except (UsageError, Unanswered, OSError, ValueError) as error:
        return str(error)


def _start_problem(args: argparse.Namespace, slice_: Slice) -> str:
    """Return why one of its workers cannot start the program; "" if all can."""
    remote = shlex.join(["exec", "python3", "-c", _FIND_COMMAND, args.workdir, args.command[0]])
    clients: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + ASK_SECONDS
    try:
        for worker in range(len(slice_.addresses)):
            client = subprocess.Popen(
                ssh_command(args, slice_, worker, remote),
                start_new_session=True,  # Ctrl-C is for xla_dist alone
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            clients.append(client)
        for worker, client in enumerate(clients):
            code = client.wait(timeout=max(0.0, deadline - time.monotonic()))
            if code == _NO_COMMAND:
                return (
                    f"worker {worker} of {slice_.name} does not find {args.command[0]} in "
                    f"{args.workdir}"
                )
            if code:
                return f"worker {worker} of {slice_.name} cannot be reached"
    except subprocess.TimeoutExpired:
        return f"worker {worker} of {slice_.name} does not respond"
    finally:
        for client in clients:
            if client.poll() is None:
                os.killpg(client.pid, signal.SIGKILL)
                client.wait()
    return ""


# -- the command line: a file to all workers -------------------------------------------


def copy_to_workers(args: argparse.Namespace, slice_: Slice, file: str) -> None:
    """Copy a file to the home folders of all workers. Raises UsageError if that fails."""

    def copy(worker: int) -> None:
        command = _connect(args, slice_, worker, "scp", file, "NAME:")
        if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
            raise UsageError(f"cannot copy {file} to worker {worker} of {slice_.name}")

    copy(0)  # alone: it may have to make the ssh key, and to tell it to the slice
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(copy, range(1, len(slice_.addresses))))


def main(argv: Sequence[str]) -> int:
    parser = LauncherParser(prog="python3 -m launch.slices", allow_abbrev=False)
    parser.add_argument(
        "--tpu", metavar="NAME", type=not_empty, required=True, help="name of the slice"
    )
    add_place(parser)
    parser.add_argument("file", help="file to copy to the home folder of each worker")
    try:
        args = parser.parse_args(argv)
        slice_ = describe_patiently(args, args.tpu)
        if slice_.problem:
            raise Failed(f"--tpu {slice_.name} {slice_.problem}")
        write_line(f"copying to {len(slice_.addresses)} worker(s) of {slice_.name}", sys.stdout)
        copy_to_workers(args, slice_, args.file)
    except (UsageError, Failed) as reason:
        print(f"slices: error: {reason}", file=sys.stderr)
        return 2 if isinstance(reason, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
