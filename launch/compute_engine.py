"""Create TPU slices on Compute Engine, set them up, train on them, and delete them.

    python3 -m launch.compute_engine --tpu=NAME --topology=tpu7x:4x4x4 --flex_start=7d --delete \\
        [flags of launch.xla_dist] -- COMMAND ...

A slice of several hosts is a managed instance group, created from an instance template and a
workload policy with the slice's topology; a slice of one host is a VM. All of them are named NAME,
so running the same command again finds them. With --delete they are deleted at the end, also after
a failure; --delete without a command only deletes them. With --max_preemptions a slice that was
preempted is created again, and the command continues on it.
"""

import argparse
import contextlib
import fcntl
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("compute_engine", oldest=(3, 10), packages=())

from config_fields import bounded, count, not_empty, positive
from launch import NON_RETRYABLE, STOPS, Failed, LauncherParser, UsageError, write_line
from launch.ckpt_dir import add_network_disk, check_ckpt_dir
from launch.slices import (
    GROUP,
    NO_VMS,
    Missing,
    Refused,
    Unanswered,
    add_place,
    ask,
    ask_json,
    describe,
    gcloud_command,
    reading,
)
from launch.xla_dist import without_values
from tpu_machines import MACHINE_TYPES

_ROOT = Path(__file__).resolve().parents[1]
_IMAGE_PROJECT = "ubuntu-os-accelerator-images"
_IMAGE = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
_IMAGE_TPU7X = "ubuntu-accel-2404-amd64-tpu-tpu7x"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
"""By default a VM may not write to buckets."""
_MACHINES = (
    *("ct6e-standard-1t", "ct6e-standard-4t", "ct6e-standard-8t"),
    *("ct5p-hightpu-4t", "tpu7x-standard-4t"),
)
_ONE_HOST = {MACHINE_TYPES[machine]: machine for machine in _MACHINES}
"""Machine types by topology."""
_SEVERAL_HOSTS = {
    MACHINE_TYPES[machine].partition(":")[0]: machine
    for machine in _MACHINES
    if machine.endswith("-4t")
}
"""Machine types of slices of several hosts, which have four chips each, by kind of chip."""
_LAST_ASKS = 4
"""How often to ask, after a failure, whether the slices were preempted."""
LAST_ERROR = (
    "--sort-by=~insertTime",
    "--limit=1",
    "--format=value(error.errors[0].code,error.errors[0].message)",
)
"""Flags of ``gcloud compute operations list``."""
_ENDED = ("TERMINATED", "STOPPED", "STOPPING", "SUSPENDED")
"""States of VMs in which Google may keep them for good; spot VMs do not leave them."""
_TOO_OLD = ("unrecognized arguments", "Invalid choice")


class _Stopped(Exception):
    """Raised by a signal."""


class Resource(NamedTuple):
    """What is created on Compute Engine: a kind of ``gcloud compute``, as its words, and a name."""

    kind: tuple[str, ...]
    name: str
    create: list[str]
    """gcloud's command that makes it; in it ``_link`` stands for another one's address."""


_POLICY, _TEMPLATE, _VM = ("resource-policies",), ("instance-templates",), ("instances",)


def _link(kind: tuple[str, ...]) -> str:
    return f"LINK-OF-{kind[0]}"


# -- the command line ------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; unknown flags are passed to xla_dist. Raises UsageError."""
    parser = LauncherParser(
        prog="python3 -m launch.compute_engine",
        allow_abbrev=False,
        usage="%(prog)s --tpu NAME --topology CHIP:SHAPE [options] [flags of launch.xla_dist] "
        "[-- COMMAND ...]",
        description="Create a TPU slice on Compute Engine unless it exists, wait until its VMs are "
        "running, set it up with launch/setup_pod.sh, and run COMMAND in ~/vit-fsdp on all "
        "its hosts with launch.xla_dist. Exit code: that of COMMAND; 1 if no slice could be "
        "created; 2 for a usage error.",
    )
    add = parser.add_argument
    add("--tpu", metavar="NAME", type=not_empty, required=True, help="name of the slice")
    add(
        "--topology",
        metavar="CHIP:SHAPE",
        required=True,
        help="chip type and number of chips along each side, as for --tpu_topology of "
        "--compile_only: v6e:8x8, v5p:4x4x8, tpu7x:4x4x4",
    )
    add(
        "--slices",
        type=positive,
        default=1,
        help="number of slices to train on together, named NAME-0, NAME-1, ... if more than one "
        "(default: 1)",
    )
    # How they are paid for.
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--spot", action="store_true", help="use spot VMs (default: on demand)")
    how.add_argument(
        "--flex_start",
        metavar="DURATION",
        help="use flex-start VMs, which Google provides when it has capacity, for at most "
        "DURATION, such as 7d or 36h; they are then deleted with their disks (default: on "
        "demand)",
    )
    how.add_argument(
        "--reservation", metavar="NAME", type=not_empty, help="use VMs of this reservation"
    )
    add("--machine_type", type=not_empty, help="machine type of the hosts (default: the chip's)")
    add(
        "--image_family",
        type=not_empty,
        help=f"image family in {_IMAGE_PROJECT} (default: the chip's)",
    )
    add(
        "--disk_size",
        default="200GB",
        type=not_empty,
        help="boot disk size of each host (default: 200GB)",
    )
    add(
        "--vm_flag",
        metavar="FLAG",
        action="append",
        default=[],
        help="additional gcloud flag for creating the VMs, as in --vm_flag=--subnet=NAME; may be "
        "repeated",
    )
    add(
        "--delete",
        action="store_true",
        help="at the end, delete everything that was created, including the data on the disks, "
        "also after a failure or Ctrl-C; refused if COMMAND writes checkpoints there; without "
        "COMMAND, only delete it (default: delete only what a failed creation leaves behind)",
    )
    add(
        "--max_preemptions",
        metavar="N",
        type=count,
        default=0,
        help="number of times to replace slices that were preempted or have reached the end of "
        "--flex_start: they are deleted, created again and set up, and COMMAND continues from "
        "its newest checkpoint (default: 0)",
    )
    add_network_disk(parser)
    add("--torchtpu", action="store_true", help="install TorchTPU (see launch/setup_pod.sh)")
    add(
        "--poll",
        metavar="SECONDS",
        type=bounded(float, 0, 86400),
        default=30,
        help="seconds between checks whether the VMs are running (default: 30)",
    )
    add("--dry_run", action="store_true", help="print all commands without running them")
    add_place(parser, any_api=False)
    options, command = list(argv), []
    if "--" in options:
        at = options.index("--")
        options, command = options[:at], options[at + 1 :]
    args, launcher = parser.parse_known_args(options)
    args.launcher, args.command, args.tpu_api = launcher, command, "compute"
    if not command and not args.delete:
        raise UsageError("no command: pass it after --, or --delete to delete the slice")
    if any(word.partition("=")[0] == "--tpu_api" for word in launcher):
        raise UsageError("--tpu_api cannot be used here: this launcher always uses Compute Engine")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", args.tpu):
        raise UsageError(
            f"--tpu {args.tpu}: names on Compute Engine consist of lower-case letters, digits "
            "and hyphens, at most 52"
        )
    if args.flex_start and not re.fullmatch(r"(\d+[dhms])+", args.flex_start):
        raise UsageError(
            f"--flex_start {args.flex_start} is not a duration: use for example 7d or 36h"
        )
    chip, _, shape = args.topology.partition(":")
    if chip not in _SEVERAL_HOSTS:
        older = "; for v4 and v5e use launch/queued_resource.sh" if chip in ("v4", "v5e") else ""
        known = ", ".join(_SEVERAL_HOSTS)
        raise UsageError(
            f"--topology {args.topology}: chips available on Compute Engine are {known}{older}"
        )
    sides = [int(side) for side in shape.split("x")] if re.fullmatch(r"\d+(x\d+)*", shape) else []
    dimensions = 2 if chip == "v6e" else 3
    chips = math.prod(sides)
    is_shape = len(sides) == dimensions and sides == sorted(sides)
    if args.topology not in _ONE_HOST and not (is_shape and chips > 4 and chips % 4 == 0):
        raise UsageError(
            f"--topology {args.topology} is not a valid slice shape: give {dimensions} sides in "
            "ascending order whose product is a multiple of 4 chips"
        )
    args.shape, args.hosts = shape, 1 if args.topology in _ONE_HOST else chips // 4
    args.machine_type = args.machine_type or _ONE_HOST.get(args.topology, _SEVERAL_HOSTS[chip])
    args.image_family = args.image_family or (_IMAGE_TPU7X if chip == "tpu7x" else _IMAGE)
    if deletes := [flag for flag in ("delete", "max_preemptions") if getattr(args, flag)]:
        check_ckpt_dir(command, f"--{deletes[0]}", args.network_disk)
    args.names = [args.tpu]
    if args.slices > 1:
        args.names = [f"{args.tpu}-{number}" for number in range(args.slices)]
    return args


def resources_of(args: argparse.Namespace) -> list[Resource]:
    """Return what the slices need, in the order in which it is created."""
    vms = [
        f"--machine-type={args.machine_type}",
        f"--image-project={_IMAGE_PROJECT}",
        f"--image-family={args.image_family}",
        f"--boot-disk-size={args.disk_size}",
        f"--scopes={_SCOPE}",
        "--maintenance-policy=TERMINATE",  # there is no live migration of TPUs
    ]
    if args.spot:
        vms += ["--provisioning-model=SPOT", "--instance-termination-action=STOP"]
    if args.flex_start:
        vms += ["--provisioning-model=FLEX_START", f"--max-run-duration={args.flex_start}"]
        vms += ["--instance-termination-action=DELETE", "--reservation-affinity=none"]
    if args.reservation:
        vms += ["--provisioning-model=RESERVATION_BOUND", "--instance-termination-action=DELETE"]
        vms += ["--reservation-affinity=specific", f"--reservation={args.reservation}"]
    vms += args.vm_flag
    if args.hosts == 1:
        if args.flex_start:  # so long it waits, at most, for capacity; groups wait without end
            vms.append("--request-valid-for-duration=2h")
        return [
            Resource(_VM, name, gcloud_command(args, *_VM, "create", name, *vms, "--async"))
            for name in args.names
        ]
    policy = [*_POLICY, "create", "workload-policy", args.tpu, f"--region={_region(args)}"]
    policy += ["--type=HIGH_THROUGHPUT", f"--accelerator-topology={args.shape}"]
    template = [*_TEMPLATE, "create", args.tpu, f"--instance-template-region={_region(args)}", *vms]
    # In bulk: all VMs or none. A lost VM is not replaced alone, which would break the slice.
    group = [f"--size={args.hosts}", "--target-size-policy-mode=bulk"]
    group += ["--default-action-on-vm-failure=do-nothing"]
    group += [f"--template={_link(_TEMPLATE)}", f"--workload-policy={_link(_POLICY)}"]
    return [
        Resource(_POLICY, args.tpu, gcloud_command(args, *policy, in_zone=False)),
        Resource(_TEMPLATE, args.tpu, gcloud_command(args, *template, in_zone=False)),
        *(
            Resource(GROUP, name, gcloud_command(args, *GROUP, "create", name, *group))
            for name in args.names
        ),
    ]


def _region(args: argparse.Namespace) -> str:
    return args.zone.rpartition("-")[0]


def command_for(args: argparse.Namespace, verb: str, resource: Resource) -> list[str]:
    """Return gcloud's command that describes or deletes a resource."""
    is_zonal = resource.kind in (GROUP, _VM)
    words = [*resource.kind, verb, resource.name]
    words += [] if is_zonal else [f"--region={_region(args)}"]
    words += ["--format=json"] if verb == "describe" else []
    return gcloud_command(args, *words, in_zone=is_zonal)


# -- creating, waiting, deleting -------------------------------------------------------


def say(text: str) -> None:
    print(f"compute_engine: {text}", file=sys.stderr, flush=True)


def create_missing(
    args: argparse.Namespace, resources: Sequence[Resource], made: list[Resource]
) -> None:
    """Create what is not there; ``made``: what was asked for. Raises UsageError if something is
    there that is of another topology or a person has to act, and Failed if a creation is
    refused."""
    links: dict[str, str] = {}
    for resource in resources:
        look = command_for(args, "describe", resource)
        has = wants = ""
        try:
            try:
                content = ask_json(look)
            except Missing:
                say(f"creating {resource.kind[0]} {resource.name}")
                made.append(resource)  # first: a call that fails may have been heard
                create = resource.create
                for name, link in links.items():
                    create = [word.replace(name, link) for word in create]
                ask(create)
                content = ask_json(look)
            with reading("gcloud"):
                links[_link(resource.kind)] = str(content["selfLink"])
                if resource.kind == _POLICY:
                    has, wants = content["workloadPolicy"]["acceleratorTopology"], args.shape
                elif resource.kind == GROUP:
                    has, wants = f"{content['targetSize']} VMs", f"{args.hosts} VMs"
                elif resource.kind == _VM:
                    has, wants = content["machineType"].rpartition("/")[2], args.machine_type
        except Unanswered as reason:
            problem = str(reason)
            if any(word in problem for word in _TOO_OLD):
                problem = f"gcloud 562 or newer is required (gcloud components update): {problem}"
            kind = UsageError if isinstance(reason, Refused) else Failed
            raise kind(f"{resource.kind[0]} {resource.name}: {problem}") from None
        if has != wants:
            raise UsageError(
                f"{resource.kind[0]} {resource.name} already exists with {has}, but --topology "
                f"{args.topology} requires {wants}: choose another --tpu, or delete it"
            )


def wait_for_slices(args: argparse.Namespace) -> None:
    """Return when all VMs of all slices run. Raises Failed for a slice that will not come, and
    UsageError if a person has to act."""
    told: dict[str, str] = {}
    while True:
        for name in args.names:
            try:
                problem = describe(args, name).problem
            except Missing as reason:
                raise Failed(
                    f"{name} no longer exists: {_last_error(args, name) or reason}"
                ) from None
            except Refused as reason:
                raise UsageError(str(reason)) from None
            except Unanswered as reason:  # gcloud may fail once in days of waiting
                problem = str(reason)
            else:
                if "QUOTA" in problem.upper() or any(state in problem for state in _ENDED):
                    raise Failed(f"{name} {problem}: delete it and try again")
            if problem and told.get(name) != problem:
                say(f"{name} {problem}; waiting")
            told[name] = problem
        if not any(told.values()):
            return
        time.sleep(args.poll)


def _last_error(args: argparse.Namespace, name: str) -> str:
    """Return why a VM was not created, as the newest operation about it says."""
    with contextlib.suppress(Unanswered):
        words = ["operations", "list", *LAST_ERROR, f"--filter=targetLink~/{name}$ AND error:*"]
        return " ".join(ask(gcloud_command(args, *words, in_zone=False)).split())
    return ""


def ended_slices(args: argparse.Namespace, *, or_missing: bool = False) -> list[str]:
    """Return the names of the slices whose VMs have ended; ``or_missing``: or do not exist. Raises
    UsageError if a person has to act."""
    ended = []
    for name in args.names:
        is_missing = False
        try:
            problem = describe(args, name).problem
        except Refused as reason:
            raise UsageError(str(reason)) from None
        except Unanswered as reason:
            problem, is_missing = str(reason), isinstance(reason, Missing)
        if any(sign in problem for sign in (*_ENDED, NO_VMS)) or (is_missing and or_missing):
            say(f"{name} {problem}")
            ended.append(name)
    return ended


def slices_ended_by_now(args: argparse.Namespace) -> list[str]:
    """Return the names of the slices that have ended, asked several times after a failure: a
    preemption is not known at once."""
    for _ in range(_LAST_ASKS):
        # Without flex-start somebody may have deleted a missing one on purpose.
        if ended := ended_slices(args, or_missing=bool(args.flex_start)):
            return ended
        time.sleep(args.poll)
    return []


def ignore_signals() -> None:
    """Ctrl-C once more must not leave what costs money."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def delete(args: argparse.Namespace, resources: Sequence[Resource]) -> bool:
    """Delete those of the resources that exist, the newest first; return whether none is left. Of
    the others, say that they may incur costs."""
    none_left = True
    for resource in reversed(resources):
        command = command_for(args, "delete", resource)
        say(f"deleting {resource.kind[0]} {resource.name}")
        try:
            ask(command, seconds=None)
        except Missing:
            continue
        except (UsageError, Unanswered) as reason:
            say(f"{reason}")
            say(
                f"error: {resource.kind[0]} {resource.name} may still exist and incur costs; "
                f"delete it with: {shlex.join(command)}"
            )
            none_left = False
    return none_left


# -- all of it -------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    try:
        args = parse(argv)
        if not args.zone:
            args.zone = ask(["gcloud", "config", "get-value", "compute/zone"]).strip()
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", args.zone):
                raise UsageError("--zone is not set, and gcloud has no default zone: pass --zone")
        resources = resources_of(args)
        place = [f"--zone={args.zone}", *([f"--project={args.project}"] if args.project else [])]
        place += ["--internal-ip"] if args.internal_ip else []
        place += ["--tunnel-through-iap"] if args.tunnel_through_iap else []
        place += ["--tpu_api=compute"]
        which = ["--torchtpu"] if args.torchtpu else []
        setups = [
            ["bash", "launch/setup_pod.sh", f"--tpu={name}", *place, *which] for name in args.names
        ]
        launch = [sys.executable, "-m", "launch.xla_dist", f"--tpu={','.join(args.names)}", *place]
        launch += ["--workdir=vit-fsdp", *args.launcher]
        # A mistake in xla_dist's flags must show now, not when the slice has come.
        checked = subprocess.run(
            [*launch, "--dry_run", "--", *(args.command or ["true"])],
            cwd=_ROOT,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if checked.returncode:
            raise UsageError(checked.stderr.strip().removeprefix("xla_dist: error: "))
        if args.dry_run:
            commands = []
            if args.command:
                commands += [resource.create for resource in resources]
                commands += [*setups, [*without_values(launch), "--", *args.command]]
            for resource in reversed(resources if args.delete else ()):
                commands.append(command_for(args, "delete", resource))
            write_line("\n".join(map(shlex.join, commands)), sys.stdout)
            return 0
    except (UsageError, Unanswered) as error:
        say(f"error: {error}")
        return 2
    if not args.command:
        ignore_signals()
        return 0 if delete(args, resources) else 1
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    lock = cache / "vit_fsdp" / f"compute_engine-{args.tpu}-{args.zone}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = lock.open("ab")  # until this process ends
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say(f"error: another compute_engine uses {args.tpu} ({lock}): stop that one first")
        return 2
    return run(args, resources, setups, [*launch, "--", *args.command])


def run(
    args: argparse.Namespace,
    resources: Sequence[Resource],
    setups: Sequence[Sequence[str]],
    launch: Sequence[str],
) -> int:
    """Create the slices, run the commands that set them up, then ``launch``; return the exit code.

    With ``--delete`` all is deleted at the end, but what was there before only if it is what was
    asked for. Without, what was created is deleted where creating fails.
    """
    job: subprocess.Popen[bytes] | None = None
    is_stopped = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True
        if job is None:
            raise _Stopped(number)
        job.send_signal(number)

    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, handle)
    made: list[Resource] = []
    to_delete: Sequence[Resource] = made
    code, preemptions_left = 1, args.max_preemptions
    try:
        # What an earlier command has left may have been preempted since.
        ended = ended_slices(args) if preemptions_left else []
        while True:
            if ended:
                preemptions_left -= 1
                say(f"replacing {', '.join(ended)}; {preemptions_left} replacement(s) left")
                vms = [resource for resource in resources if resource.kind in (GROUP, _VM)]
                if not delete(args, [resource for resource in vms if resource.name in ended]):
                    raise Failed("cannot replace what was not deleted")
            made.clear()
            create_missing(args, resources, made)
            to_delete = resources if args.delete else made
            wait_for_slices(args)
            to_delete = resources if args.delete else ()
            for command in setups:
                if subprocess.run(command, cwd=_ROOT, check=False).returncode:
                    say(f"error: {shlex.join(command)} has failed")
                    code = 1
                    break
            else:
                # In a session of its own: a terminal's Ctrl-C would come to it twice.
                job = subprocess.Popen(launch, cwd=_ROOT, start_new_session=True)
                code = job.wait()
                job = None
            if code in (0, *NON_RETRYABLE) or is_stopped or not preemptions_left:
                break
            if not (ended := slices_ended_by_now(args)):
                break
    except _Stopped as stopped:
        code = 128 + stopped.args[0]
        say(f"stopped by {signal.Signals(stopped.args[0]).name}")
        if not args.delete and made:
            to_delete = ()
            say(
                f"{args.tpu} is still running and incurs costs: run the same command to continue, "
                "or with --delete and no command to delete it"
            )
    except (Failed, UsageError) as failure:
        code = 2 if isinstance(failure, UsageError) else 1
        say(f"error: {failure}")
    finally:
        ignore_signals()
        delete(args, to_delete)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
