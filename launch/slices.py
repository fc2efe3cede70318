"""The hosts of TPU slices through ``gcloud compute tpus tpu-vm``, for ``launch.xla_dist``.

``describe`` asks which hosts a slice has, ``ssh_command`` runs a command on one of them; no other
module of the launcher calls gcloud.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from launch import Mistake

SSH_OPTIONS = ("-oServerAliveInterval=30", "-oServerAliveCountMax=4", "-oConnectTimeout=30")
"""ssh reports a worker that is gone after two minutes; by default it may wait for hours."""
ASK_SECONDS = 60.0
"""The seconds after which a call of gcloud, or a connection that only asks, counts as failed."""
_NO_COMMAND = 3
_FIND_COMMAND = (
    "import os, shutil, sys; os.chdir(os.path.expanduser(sys.argv[1])); "
    f"sys.exit(0 if shutil.which(sys.argv[2]) else {_NO_COMMAND})"
)


class Unanswered(Exception):
    """Raised if a command of a cloud fails or does not answer; with what it says."""


def ask(command: Sequence[str], content: str = "") -> str:
    """Return what a command of a cloud, gcloud or kubectl, prints; ``content`` is its input.

    Raises Unanswered, or Mistake where it is not installed.
    """
    try:
        answer = subprocess.run(
            command,
            input=content,
            capture_output=True,
            text=True,
            check=False,
            timeout=ASK_SECONDS,
            start_new_session=True,  # Ctrl-C is for the launcher alone
        )
    except FileNotFoundError:
        raise Mistake(f"no {command[0]} on PATH: install it") from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command[0]} had no answer within {ASK_SECONDS:.0f} s") from None
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line.strip()] or ["no reason given"]
        error = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])  # gcloud's
        raise Unanswered(" ".join(re.sub(r"^ERROR: (\([\w.-]+\) )?", "", error).split()))
    return answer.stdout


@dataclass(frozen=True)
class Slice:
    """A TPU slice as gcloud described it. Slices that train together have the same ``kind``."""

    name: str
    kind: str
    """Accelerator type and topology, as "V5LITE_POD 4x4"."""
    topology: str
    """Chips along each side, as "4x4"; empty if gcloud did not say."""
    addresses: tuple[str, ...]
    """Of its workers, inside of their network."""
    problem: str
    """Why no program can be started on it, as far as gcloud says; "" if one can."""


# -- gcloud's command lines ------------------------------------------------------------


def gcloud_command(args: argparse.Namespace, *words: str) -> list[str]:
    """Return a command of ``gcloud compute tpus tpu-vm``."""
    command = ["gcloud", "compute", "tpus", "tpu-vm", *words, "--quiet"]  # asks nothing
    for flag in ("zone", "project"):
        if value := getattr(args, flag):
            command.append(f"--{flag}={value}")
    return command


def ssh_command(args: argparse.Namespace, name: str, worker: int, remote: str) -> list[str]:
    """Return the command that runs ``remote`` in a shell of one of this slice's workers."""
    command = gcloud_command(args, "ssh", name, f"--worker={worker}", f"--command={remote}")
    if args.internal_ip:
        command.append("--internal-ip")
    return command + [f"--ssh-flag={option}" for option in SSH_OPTIONS]


# -- what they say ---------------------------------------------------------------------


def describe(args: argparse.Namespace, name: str) -> Slice:
    """Ask gcloud for a slice. Raises Mistake if gcloud is missing or does not know the slice."""
    try:
        node = dict(json.loads(ask(gcloud_command(args, "describe", name, "--format=json"))))
    except Unanswered as reason:
        raise Mistake(
            f"gcloud cannot describe --tpu {name}, check it and --zone: {reason}"
        ) from None
    except (TypeError, ValueError):
        raise Mistake(f"gcloud described --tpu {name} by something else than JSON") from None
    config = node.get("acceleratorConfig", {})
    topology, state = config.get("topology", ""), node.get("state")
    kind = f"{config.get('type') or node.get('acceleratorType', '')} {topology}".strip()
    addresses = tuple(host.get("ipAddress", "") for host in node.get("networkEndpoints") or ())
    problem = "" if addresses else "has no workers (no networkEndpoints)"
    if state != "READY":
        problem = f"is {state}, not READY: start or create it first"
    return Slice(name, kind, topology, addresses, problem)


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
            return f"{name} is {slice_.kind} now, and was {kind}"
        return _start_problem(args, slice_) or slice_
    except (Mistake, OSError, ValueError) as error:  # gcloud may fail once in days
        return str(error)


def _start_problem(args: argparse.Namespace, slice_: Slice) -> str:
    """Return why one of its workers cannot start the program; "" if all can."""
    remote = shlex.join(["exec", "python3", "-c", _FIND_COMMAND, args.workdir, args.command[0]])
    clients: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + ASK_SECONDS
    try:
        for worker in range(len(slice_.addresses)):
            client = subprocess.Popen(
                ssh_command(args, slice_.name, worker, remote),
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
                    f"worker {worker} of {slice_.name} has no {args.command[0]} in {args.workdir}"
                )
            if code:
                return f"worker {worker} of {slice_.name} cannot be reached"
    except subprocess.TimeoutExpired:
        return f"worker {worker} of {slice_.name} does not answer"
    finally:
        for client in clients:
            if client.poll() is None:
                os.killpg(client.pid, signal.SIGKILL)
                client.wait()
    return ""
