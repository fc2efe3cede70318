"""Run a command on all workers of a TPU pod, or of several slices, over gcloud's ssh.

    python3 -m launch.xla_dist --tpu=NAME -- python3 -u run_vit_training.py FLAGS

takes the place, and the command line, of ``torch_xla.distributed.xla_dist``, which torch_xla no
longer has. ``launch/pod_worker.py`` is its other end.
"""

import argparse
import base64
import json
import os
import re
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from launch import CRASH_SECONDS, IN_VAIN, pod_worker
from launch.pod import GRACE_SECONDS, Client, Pod
from launch.slices import Mistake, Slice, check_alike, describe, describe_command, ssh_command

MISTAKE = 2
"""The exit code for a wrong command line."""
STEP_TIMEOUT_SECONDS = 1800
LARGEST_COUNT = 10_000_000
"""The largest number of seconds, some months: Python cannot wait for larger ones."""
LONGEST_WORD = 120_000
"""The most bytes of one word of a command line; Linux allows 128 KiB."""
MEGASCALE_PORT = 8081
"""The port of libtpu on each worker for other slices: the one that Ray's launcher for TPUs chooses
(docs.ray.io, get_tpu_coordinator_env_vars)."""


class PodParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


def main(argv: Sequence[str]) -> int:
    try:
        args = parse(argv)
        job = f"{args.tpu[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        remote = remote_command(args, job, 0, 0, {})  # a mistake in it shows before anything starts
        if args.dry_run:
            for name in args.tpu:
                print(shlex.join(describe_command(args, name)))
            own = "NNODES, NODE_RANK" if len(args.tpu) == 1 else "MEGASCALE_SLICE_ID"
            print(f"# for every worker that it lists, with {own}, ...: --worker=0, without")
            print(shlex.join(ssh_command(args, args.tpu[0], 0, remote)))
            return 0
        if not shutil.which("gcloud"):
            raise Mistake("no gcloud on PATH: install it, https://cloud.google.com/sdk/docs")
        slices = [describe(args, name) for name in args.tpu]
        for each in slices:
            if problem := each.problem():
                raise Mistake(f"--tpu {each.name} {problem}")
        check_alike(slices)
        log_dir = Path(args.log_dir or f"runs/xla_dist-{job}")
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Mistake(f"--log_dir {log_dir}: {error.strerror}") from None
    except Mistake as mistake:
        print(f"xla_dist: error: {mistake}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:  # nothing has been started yet
        return 130
    pod = Pod(log_dir, args.grace)
    workers = sum(len(each.addresses) for each in slices)
    pod.say(f"{workers} worker(s) of {', '.join(args.tpu)}, logs in {log_dir}")
    failure: dict[str, str] = {}
    for attempt in range(args.max_restarts + 1):
        code = pod.run(clients(args, job, attempt, slices, failure))
        failure = {"RUN_FAILED_AT": str(pod.failed_at)}  # for the program's account of the restart
        if code in (0, *IN_VAIN) or pod.stopped:
            break
        left = args.max_restarts - attempt
        if left:
            pod.say(f"starting all workers again; {left - 1} restart(s) left after this one")
    return code


# -- the command line -----------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises Mistake."""
    parser = PodParser(
        prog="python3 -m launch.xla_dist",
        allow_abbrev=False,
        usage="%(prog)s --tpu NAME [options] -- COMMAND ...",
        description="Run COMMAND on all workers of a TPU pod, as "
        "torch_xla.distributed.xla_dist did. Ctrl-C, SIGTERM and SIGHUP reach the programs on the "
        "workers, which can write a checkpoint; a second Ctrl-C kills them. When one fails, the "
        "others are ended. Exit code: that of the first that failed.",
    )
    add = parser.add_argument
    # Which pod it is, and the program's environment there.
    add(
        "--tpu",
        metavar="NAME[,NAME...]",
        type=tpu_names,
        required=True,
        help="the TPU VM, as gcloud names it; several with commas: slices of one accelerator type "
        "and topology that train together, numbered in this order",
    )
    add("--zone", type=not_empty, help="its zone (default: gcloud's configuration)")
    add("--project", type=not_empty, help="its project (default: gcloud's configuration)")
    add(
        "--internal-ip",
        action="store_true",
        help="connect over internal addresses, as from one of the workers (default: external)",
    )
    add(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=variable,
        help="set in the program's environment; may be repeated. By default PJRT_DEVICE=TPU; "
        f"STEP_TIMEOUT_S={STEP_TIMEOUT_SECONDS}, the default of --step_timeout_s in "
        "run_vit_training.py, so that a hang is a failure (0: off); RUN_JOB_ID and RUN_ATTEMPT (0, "
        "1, ...), by which the program knows that it was started again; and for "
        "launch/torchrun.sh, which --backend torchtpu needs, NNODES, NODE_RANK, MASTER_ADDR, "
        "NODE_ADDRESSES and TORCH_TPU_TOPOLOGY, as gcloud describes the TPU; with several slices "
        "in their place MEGASCALE_COORDINATOR_ADDRESS (of the first worker of the first slice), "
        "MEGASCALE_PORT, MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID, which libtpu reads",
    )
    add(
        "--workdir",
        metavar="DIR",
        type=not_empty,
        default="~",
        help="folder on the workers to run COMMAND in (default: the home folder there)",
    )
    # Before the program starts, and when it ends.
    add(
        "--restart-tpuvm-pod-server",
        action="store_true",
        help="first end what earlier runs of xla_dist, of any name, left on the workers: it holds "
        "the chips. (There is no more server: PJRT runs in the program.) Default: left alone",
    )
    add(
        "--max_restarts",
        metavar="N",
        type=count,
        default=0,
        help="times to start all workers again after one failed, unless with exit codes 2 to 5, "
        "after which a restart does not help; training resumes from its newest checkpoint "
        "(default: 0)",
    )
    add(
        "--grace",
        metavar="SECONDS",
        type=count,
        help="seconds between SIGTERM and SIGKILL for the programs that are left when one has "
        f"failed or a connection broke (default: {GRACE_SECONDS:.0f}, or {CRASH_SECONDS} if one "
        "has crashed, as no checkpoint can be written then)",
    )
    add(
        "--log_dir",
        metavar="DIR",
        type=not_empty,
        help="folder for worker_<i>.log, all output of a worker (default: "
        "runs/xla_dist-NAME-TIME-PID)",
    )
    add(
        "--dry_run",
        action="store_true",
        help="print the gcloud commands, quoted for a shell, and run nothing",
    )
    own, command = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    if not command and not {"-h", "--help"} & set(own):
        raise Mistake(
            "no command: give it after --, as in --tpu=NAME -- python3 -u run_vit_training.py"
        )
    args = parser.parse_args(own, argparse.Namespace(command=command))
    if command and not command[0]:
        raise Mistake("the command after -- starts with an empty word")
    if "--backend torchtpu" in " ".join(command).replace("=", " "):
        if Path(command[0]).name.startswith("python"):
            raise Mistake(
                "--backend torchtpu requires a process a device: give launch/torchrun.sh in place "
                "of python3 run_vit_training.py"
            )
        if len(args.tpu) > 1:
            raise Mistake("--backend torchtpu works on one slice: give one name to --tpu")
    return args


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of 0 or more, up to {LARGEST_COUNT:,}"
        )
    return int(text)


def tpu_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
            raise argparse.ArgumentTypeError(f"{name!r} is not the name of a TPU VM")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name} is there twice")
    return names


def not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


# -- the workers ----------------------------------------------------------------------


def clients(
    args: argparse.Namespace,
    job: str,
    attempt: int,
    slices: Sequence[Slice],
    more: dict[str, str],
) -> list[Client]:
    """Return what runs the program on each worker of these slices, with ``more`` variables.

    A worker has the same number in each start: that of all slices of ``--tpu``, in their order.
    """
    found = []
    for slice_id, slice_ in enumerate(slices):
        first = args.tpu.index(slice_.name) * len(slice_.addresses)
        for worker in range(len(slice_.addresses)):
            index, place = first + worker, ""
            own = for_torchrun(slice_, worker)
            if len(args.tpu) > 1:
                place = f" (worker {worker} of {slice_.name})"
                own = for_megascale(slices, slice_id)
            remote = remote_command(args, job, attempt, index, own | more)
            found.append(Client(index, place, ssh_command(args, slice_.name, worker, remote)))
    return found


def remote_command(
    args: argparse.Namespace, job: str, attempt: int, index: int, own: dict[str, str]
) -> str:
    """Return the command that runs the program on one worker, with this worker's variables.

    Raises Mistake if it is too long.
    """
    task: dict[str, Any] = {
        "job": f"{job}-{index}",
        "attempt": attempt,
        "command": args.command,
        "env": {
            "PJRT_DEVICE": "TPU",
            "STEP_TIMEOUT_S": str(STEP_TIMEOUT_SECONDS),
            "RUN_JOB_ID": job,
            "RUN_ATTEMPT": str(attempt),
            **own,
            **dict(args.env),
        },
        "workdir": args.workdir,
        "grace": GRACE_SECONDS if args.grace is None else args.grace,
        "end_all": args.restart_tpuvm_pod_server and attempt == 0,
    }
    # One line of ASCII: what is in it passes through gcloud, ssh and the worker's shell unchanged.
    source = base64.b85encode(zlib.compress(Path(pod_worker.__file__).read_bytes(), 9)).decode()
    start = f"import base64, zlib; exec(zlib.decompress(base64.b85decode({source!r})))"
    remote = shlex.join(["exec", "python3", "-c", start, json.dumps(task)])
    if len(remote) > LONGEST_WORD:
        raise Mistake("the command and --env are too long for a command line: use a file")
    return remote


def for_torchrun(slice_: Slice, worker: int) -> dict[str, str]:
    """Return the variables that launch/torchrun.sh reads on a worker of the only slice."""
    own = {
        "NNODES": str(len(slice_.addresses)),
        "MASTER_ADDR": slice_.addresses[0],
        "NODE_ADDRESSES": ",".join(slice_.addresses),
        "NODE_RANK": str(worker),
    }
    if slice_.topology:  # 4x4 or 4x4x4
        own["TORCH_TPU_TOPOLOGY"] = ",".join([*slice_.topology.split("x"), "1"][:3])
    return own


def for_megascale(slices: Sequence[Slice], slice_id: int) -> dict[str, str]:
    """Return the variables by which libtpu finds the other slices, on a worker of this one.

    MASTER_ADDR must not be there: torch_xla then finds process 0, which may be on any worker.
    """
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": slices[0].addresses[0],
        "MEGASCALE_PORT": str(MEGASCALE_PORT),
        "MEGASCALE_NUM_SLICES": str(len(slices)),
        "MEGASCALE_SLICE_ID": str(slice_id),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
