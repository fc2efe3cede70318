"""TPU slices as gcloud knows them, and its command lines."""

import argparse
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

SSH_OPTIONS = ("-oServerAliveInterval=30", "-oServerAliveCountMax=4", "-oConnectTimeout=30")
"""ssh reports a worker that is gone after two minutes; by default it may wait for hours."""


class Mistake(Exception):
    """Raised for a mistake of the user: one line on stderr, exit code 2."""


@dataclass(frozen=True)
class Slice:
    """A TPU slice as gcloud described it. Slices that train together have the same ``kind``."""

    name: str
    state: str
    kind: str
    """Accelerator type and topology, as "V5LITE_POD 4x4"."""
    topology: str
    """Chips along each side, as "4x4"; empty if gcloud did not say."""
    addresses: tuple[str, ...]
    """Of its workers, inside of their network."""

    def problem(self) -> str:
        """Return why no program can be started on it, as far as gcloud says; "" if it can."""
        if self.state != "READY":
            return f"is {self.state}, not READY: start or create it first"
        return "" if self.addresses else "has no workers (no networkEndpoints)"


# -- gcloud's command lines ------------------------------------------------------------


def gcloud(args: argparse.Namespace, *words: str) -> list[str]:
    command = ["gcloud", "compute", "tpus", "tpu-vm", *words, "--quiet"]  # asks nothing
    for flag in ("zone", "project"):
        if value := getattr(args, flag):
            command.append(f"--{flag}={value}")
    return command


def describe_command(args: argparse.Namespace, name: str) -> list[str]:
    return gcloud(args, "describe", name, "--format=json")


def ssh_command(args: argparse.Namespace, name: str, worker: int, remote: str) -> list[str]:
    """Return what runs ``remote`` in a shell of one of this slice's workers."""
    command = gcloud(args, "ssh", name, f"--worker={worker}", f"--command={remote}")
    if args.internal_ip:
        command.append("--internal-ip")
    return command + [f"--ssh-flag={option}" for option in SSH_OPTIONS]


# -- what they say ---------------------------------------------------------------------


def describe(args: argparse.Namespace, name: str) -> Slice:
    """Ask gcloud for a slice. Raises Mistake if it does not know it."""
    asked = subprocess.run(
        describe_command(args, name), capture_output=True, text=True, check=False
    )
    if asked.returncode:
        lines = [line for line in asked.stderr.splitlines() if line.strip()] or ["no reason given"]
        reason = " ".join(re.sub(r"^ERROR: (\([\w.-]+\) )?", "", lines[0]).split())
        raise Mistake(f"gcloud cannot describe --tpu {name}, check it and --zone: {reason}")
    try:
        node = json.loads(asked.stdout)
    except ValueError:
        raise Mistake(f"gcloud described --tpu {name} by something else than JSON") from None
    config = node.get("acceleratorConfig", {})
    topology = config.get("topology", "")
    return Slice(
        name,
        node.get("state"),
        f"{config.get('type') or node.get('acceleratorType', '')} {topology}".strip(),
        topology,
        tuple(each.get("ipAddress", "") for each in node.get("networkEndpoints") or ()),
    )


def check_alike(slices: Sequence[Slice]) -> None:
    """Raise Mistake if they are not of the same kind."""
    first = slices[0]
    for each in slices[1:]:
        if each.kind != first.kind:
            raise Mistake(
                f"--tpu {each.name} is {each.kind}, {first.name} is {first.kind}: several slices "
                "must have one accelerator type and topology"
            )
