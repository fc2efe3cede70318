"""Run a command on all workers of a TPU pod, or of several slices, over gcloud's ssh.

    python3 -m launch.xla_dist --tpu=NAME -- python3 -u run_vit_training.py FLAGS

replaces ``torch_xla.distributed.xla_dist``, which torch_xla no longer includes, with the same
command line. ``launch/pod_worker.py`` runs on the workers.
"""

import argparse
import base64
import functools
import itertools
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("xla_dist", oldest=(3, 10), packages=())

from config_fields import count, local_path, not_empty, positive
from launch import (
    CRASH_SECONDS,
    NON_RETRYABLE,
    Failed,
    LauncherParser,
    UsageError,
    pod_worker,
    write_line,
)
from launch.pod import AS_ASKED, GRACE_SECONDS, Ending, Pod, Worker
from launch.slices import (
    APIS,
    Slice,
    add_place,
    describe_command,
    describe_patiently,
    describe_usable,
    ssh_command,
)

STEP_TIMEOUT_SECONDS = 1800
LONGEST_WORD = 120_000
"""The most bytes of one word of a command line; Linux allows 128 KiB."""
LONGEST_LINE = 60_000
"""The most bytes of --env together: a pipe holds 64 KiB, so that writing them never waits."""
REPAIR_SECONDS, SPOT_SECONDS = 1800, 120
"""The seconds that Google has to repair a slice before a restart is given up. A spot slice that was
preempted does not come back: its state must only become known."""
MEGASCALE_PORT = 8081
"""The port of libtpu on each worker for other slices: the one that Ray's launcher for TPUs chooses
(docs.ray.io, get_tpu_coordinator_env_vars)."""


def add_elastic_times(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how long to wait for missing slices, and how often to ask for them."""
    parser.add_argument(
        "--elastic_wait",
        metavar="SECONDS",
        type=count,
        default=300,
        help="with --elastic: seconds to wait for missing slices before training starts or "
        "continues without them (default: %(default)s); xla_dist also waits this long, "
        "before a restart, for a slice that Google is repairing (without --elastic: "
        f"{REPAIR_SECONDS}, for spot slices {SPOT_SECONDS})",
    )
    parser.add_argument(
        "--elastic_poll",
        metavar="SECONDS",
        type=positive,
        default=30,
        help="seconds between checks for missing slices (default: %(default)s)",
    )


def main(argv: Sequence[str]) -> int:
    try:
        args = parse(argv)
        job = f"{args.tpu[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        remote = remote_command(args, job, 0, 0, {})  # a mistake in it shows before anything starts
        if args.dry_run:
            variables = "NNODES, NODE_RANK" if len(args.tpu) == 1 else "MEGASCALE_SLICE_ID"
            names = ", ".join(dict(args.env))
            awaited = f"; it reads {names} from stdin, as a line of JSON" if names else ""
            for api in [args.tpu_api] if args.tpu_api else APIS:
                for name in args.tpu:
                    write_line(shlex.join(describe_command(args, api, name)), sys.stdout)
                print(
                    f"# run on each worker that this lists, with {variables}, ... set; shown for "
                    f"one worker, without them{awaited}"
                )
                vms = (f"VM-OF-{args.tpu[0]}",) if api == "compute" else None
                first = Slice(args.tpu[0], "", "", (), "", vms)
                write_line(shlex.join(ssh_command(args, first, 0, remote)), sys.stdout)
            return 0
        described = [describe_patiently(args, name) for name in args.tpu]
        slices = [slice_ for slice_ in described if not slice_.problem]
        for slice_ in described:
            if slice_.problem and not (slices and args.elastic):
                raise Failed(f"--tpu {slice_.name} {slice_.problem}")
        args.tpu_api = "tpu" if slices[0].vms is None else "compute"  # asked for from now on
        if args.elastic_wait is None:
            args.elastic_wait = SPOT_SECONDS if slices[0].is_spot else REPAIR_SECONDS
        for slice_ in slices[1:]:
            if slice_.kind != slices[0].kind:
                raise UsageError(
                    f"--tpu {slice_.name} is {slice_.kind}, but {slices[0].name} is "
                    f"{slices[0].kind}: all slices must have the same accelerator type and "
                    "topology"
                )
        log_dir = args.log_dir or Path(f"runs/xla_dist-{job}")
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--log_dir {log_dir}: {error.strerror}") from None
    except (UsageError, Failed) as reason:
        print(f"xla_dist: error: {reason}", file=sys.stderr)
        return 2 if isinstance(reason, UsageError) else 1
    except KeyboardInterrupt:  # nothing has been started yet
        return 130
    pod = Pod(log_dir, args.grace)
    workers = sum(len(slice_.addresses) for slice_ in slices)
    names = ", ".join(slice_.name for slice_ in slices)
    pod.say(f"{workers} worker(s) of {names}, logs in {log_dir}")
    return keep_running(args, job, pod, slices)


def keep_running(args: argparse.Namespace, job: str, pod: Pod, slices: list[Slice]) -> int:
    """Run the program on these slices, and again after a failure; return the exit code.

    With ``--elastic`` on those that can be used then, and on more as soon as they can.
    """
    kind, restarts_left = slices[0].kind, args.max_restarts
    variables: dict[str, str] = {}
    awaited: Sequence[str] = args.tpu
    must_ask = len(slices) < len(args.tpu)
    for attempt in itertools.count():
        if must_ask:
            slices = find_slices(args, pod, kind, awaited)
            if pod.stopped_by:
                pod.say(f"stopped by {signal.Signals(pod.stopped_by).name}; no program is running")
                return 128 + (signal.SIGINT if pod.stopped_by == signal.SIGINT else signal.SIGTERM)
            if not slices:
                return 1
        names = [slice_.name for slice_ in slices]
        if args.elastic:
            variables["ELASTIC_SLICES"] = f"{args.elastic}:{len(args.tpu)}"
            pod.say(f"starting on {len(names)} of {len(args.tpu)} slices: {', '.join(names)}")
        has_ended = threading.Event()
        if missing := [name for name in args.tpu if name not in names]:
            growth = (args, pod, attempt, kind, missing, has_ended)
            threading.Thread(target=ask_for_growth, args=growth, daemon=True).start()
        code = pod.run(workers_of(args, job, attempt, slices, variables), attempt)
        has_ended.set()
        if code in (0, *NON_RETRYABLE) or pod.stopped_by:
            break
        variables["RUN_FAILED_AT"] = str(pod.failed_at)  # for the program's account of the restart
        must_ask, awaited = True, names  # a slice may be under repair, then with other addresses
        if pod.asked_to_end and code == AS_ASKED:
            awaited = ()
            continue
        if not restarts_left:
            break
        restarts_left -= 1
        pod.say(f"restarting all workers; {restarts_left} restart(s) left after this one")
    return code


# -- fewer slices, and more -----------------------------------------------------------


def find_slices(
    args: argparse.Namespace, pod: Pod, kind: str, awaited: Sequence[str]
) -> list[Slice]:
    """Return the slices that can be used, once all that are ``awaited`` can, or ``--elastic_wait``
    seconds later.

    If they are too few even then, return none, after a line that says so. A signal ends the
    waiting, too.
    """
    least = args.elastic or len(args.tpu)
    deadline = time.monotonic() + args.elastic_wait
    last_reasons = ""
    usable: list[Slice] = []
    while not pod.stopped_by:
        answers = pod.meanwhile(lambda: [describe_usable(args, name, kind) for name in args.tpu])
        usable = [answer for answer in answers or () if isinstance(answer, Slice)]
        reasons = "; ".join(answer for answer in answers or () if isinstance(answer, str))
        left = deadline - time.monotonic()
        names = {slice_.name for slice_ in usable}
        waits = left > 0 and (len(usable) < least or not names.issuperset(awaited))
        if reasons and reasons != last_reasons:
            last_reasons = reasons
            pod.say(reasons + (f"; waiting up to {left:.0f} s" if waits else ""))
        if not waits:
            break
        pod.meanwhile(functools.partial(time.sleep, min(left, args.elastic_poll)))
    if len(usable) < least and not pod.stopped_by:
        required = f"--elastic requires {least}" if args.elastic else "all are required"
        pod.say(f"error: only {len(usable)} of {len(args.tpu)} slices are usable, {required}")
        return []
    return usable


def ask_for_growth(
    args: argparse.Namespace,
    pod: Pod,
    attempt: int,
    kind: str,
    missing: Sequence[str],
    has_ended: threading.Event,
) -> None:
    """Ask every ``--elastic_poll`` seconds for the missing slices; once one of them can be used,
    end the attempt, so that all start again with it."""
    while not has_ended.wait(args.elastic_poll):
        for name in missing:
            if isinstance(describe_usable(args, name, kind), Slice):
                why = f"{name} is usable again: saving a checkpoint and restarting with it"
                pod.events.put(Ending(attempt, why))
                return


# -- the command line -----------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises UsageError."""
    parser = LauncherParser(
        prog="python3 -m launch.xla_dist",
        allow_abbrev=False,
        usage="%(prog)s --tpu NAME [options] -- COMMAND ...",
        description="Run COMMAND on all workers of a TPU pod, like "
        "torch_xla.distributed.xla_dist did. Ctrl-C, SIGTERM and SIGHUP are forwarded to the "
        "programs on the workers, which can save a checkpoint; a second Ctrl-C kills them. If "
        "one program fails, the others are stopped. Exit code: that of the first program that "
        "failed.",
    )
    add = parser.add_argument
    # Which pod it is, and the program's environment there.
    add(
        "--tpu",
        metavar="NAME[,NAME...]",
        type=tpu_names,
        required=True,
        help="name of the TPU VM in gcloud; for multislice training a comma-separated list of "
        "slices with the same accelerator type and topology, numbered in this order",
    )
    add_place(parser)
    add(
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        type=variable,
        help="set an environment variable of the program; may be repeated. NAME alone takes the "
        "value from this program's environment: use it for passwords and tokens, because other "
        "users can read a command line. Values are sent over ssh's stdin. Set by default: "
        f"PJRT_DEVICE=TPU; STEP_TIMEOUT_S={STEP_TIMEOUT_SECONDS}, which ends a program that "
        "hangs (0: off); RUN_JOB_ID and RUN_ATTEMPT (0, 1, ...); NNODES, NODE_RANK, MASTER_ADDR "
        "and, of the worker's slice, NODE_ADDRESSES and TORCH_TPU_TOPOLOGY, for "
        "launch/torchrun.sh; with several slices also MEGASCALE_COORDINATOR_ADDRESS, "
        "MEGASCALE_PORT, MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID, for libtpu",
    )
    add(
        "--workdir",
        metavar="DIR",
        type=not_empty,
        default="~",
        help="folder on the workers to run COMMAND in (default: the home folder)",
    )
    # Before the program starts, and when it ends.
    add(
        "--restart-tpuvm-pod-server",
        action="store_true",
        help="first stop programs that earlier xla_dist runs, of any name, left on the workers, "
        "because they occupy the chips. The flag keeps torch_xla's name; no server is "
        "restarted (default: off)",
    )
    add(
        "--max_restarts",
        metavar="N",
        type=count,
        default=0,
        help="number of times to restart all workers after one failed; exit codes 2 to 5 are not "
        "retried, because a restart does not help; training resumes from the newest "
        "checkpoint (default: 0)",
    )
    add(
        "--elastic",
        metavar="MIN",
        type=count,
        help="with several slices and --max_restarts: after a failure, continue on the slices "
        "that are READY and reachable by ssh if there are at least MIN, and add a slice "
        "when it becomes usable again. Pass --mesh_dcn slices and --micro_batch_size to the "
        "program (default: all slices or none)",
    )
    add_elastic_times(parser)
    add(
        "--grace",
        metavar="SECONDS",
        type=count,
        help="seconds between SIGTERM and SIGKILL for the remaining programs after one failed or "
        f"a connection was lost (default: {GRACE_SECONDS:.0f}, or {CRASH_SECONDS} after a "
        "crash, when no checkpoint can be saved)",
    )
    add(
        "--log_dir",
        metavar="DIR",
        type=local_path,
        help="folder for worker_<i>.log files with the output of each worker (default: "
        "runs/xla_dist-NAME-TIME-PID)",
    )
    add(
        "--dry_run",
        action="store_true",
        help="print the gcloud commands, quoted for a shell, without running them",
    )
    options, command = list(argv), []
    if "--" in options:
        at = options.index("--")
        options, command = options[:at], options[at + 1 :]
    if not command and not {"-h", "--help"} & set(options):
        raise UsageError(
            "no command: pass it after --, as in --tpu=NAME -- python3 -u run_vit_training.py"
        )
    args = parser.parse_args(options, argparse.Namespace(command=command))
    if command and not command[0]:
        raise UsageError("the command after -- is empty")
    for word in command:
        if "://BUCKET" in word:  # in the command lines of --plan; names of buckets are lower-case
            raise UsageError(f"{word}: write the name of your bucket in place of BUCKET")
    is_torchtpu = "--backend torchtpu" in " ".join(command).replace("=", " ")
    if is_torchtpu and Path(command[0]).name.startswith("python"):
        raise UsageError(
            "--backend torchtpu needs one process per device: run launch/torchrun.sh instead of "
            "python3 run_vit_training.py"
        )

    # What comes with --elastic.
    given = {word.partition("=")[0] for word in options}
    for flag in ("--elastic_wait", "--elastic_poll"):
        if flag in given and args.elastic is None and not args.max_restarts:
            raise UsageError(f"{flag} requires --elastic or --max_restarts")
    if args.elastic is None:
        if "--elastic_wait" not in given:
            args.elastic_wait = None  # until the slices are known
        return args
    slices = len(args.tpu)
    if slices == 1:
        raise UsageError("--elastic requires several slices: use --tpu NAME,NAME")
    if not 1 <= args.elastic <= slices:
        raise UsageError(
            f"--elastic {args.elastic} must be between 1 and {slices}, the number of slices"
        )
    if not args.max_restarts:
        raise UsageError(
            "--elastic requires --max_restarts, because each lost slice uses one restart"
        )
    for name, _ in args.env:
        if name == "ELASTIC_SLICES" or (name.startswith("MEGASCALE_") and name[-4:] != "PORT"):
            raise UsageError(f"--elastic sets {name} itself: remove --env {name}")
    return args


def variable(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE, or NAME for a variable of this environment. Messages do not show a value,
    which may be secret."""
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"{name!r} is not a variable's name: use NAME=VALUE")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set here: export it, or use {name}=VALUE")
    return name, value if equals else os.environ[name]


def without_values(flags: Sequence[str]) -> list[str]:
    """Return flags of this program with ``--env NAME`` for each ``--env NAME=VALUE``, to print."""
    shown: list[str] = []
    for word in flags:
        if shown and shown[-1] == "--env":
            word = word.partition("=")[0]
        elif word.startswith("--env="):
            word = "=".join(word.split("=")[:2])
        shown.append(word)
    return shown


def tpu_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
            raise argparse.ArgumentTypeError(f"{name!r} is not a valid TPU VM name")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{name} is listed twice")
    return names


# -- the workers ----------------------------------------------------------------------


def workers_of(
    args: argparse.Namespace,
    job: str,
    attempt: int,
    slices: Sequence[Slice],
    shared: dict[str, str],
) -> list[Worker]:
    """Return the workers of these slices, which run the program with the environment variables
    ``shared`` and those by which it finds the others.

    They are numbered over all slices of ``--tpu`` in their order, the same in each start.
    """
    workers = []
    for slice_id, slice_ in enumerate(slices):
        in_slice = len(slice_.addresses)
        for number in range(in_slice):
            index, place = args.tpu.index(slice_.name) * in_slice + number, ""
            variables = shared | {  # what launch/torchrun.sh reads
                "MASTER_ADDR": slices[0].addresses[0],
                "NNODES": str(len(slices) * in_slice),
                "NODE_ADDRESSES": ",".join(slice_.addresses),
                "NODE_RANK": str(slice_id * in_slice + number),
            }
            if slice_.topology:  # 4x4 or 4x4x4
                sides = [*slice_.topology.split("x"), "1"][:3]
                variables["TORCH_TPU_TOPOLOGY"] = ",".join(sides)
            if len(args.tpu) > 1:  # by which libtpu and the program find the other slices
                place = f" (worker {number} of {slice_.name})"
                variables |= {
                    "MEGASCALE_COORDINATOR_ADDRESS": slices[0].addresses[0],
                    "MEGASCALE_PORT": str(MEGASCALE_PORT),
                    "MEGASCALE_NUM_SLICES": str(len(slices)),
                    "MEGASCALE_SLICE_ID": str(slice_id),
                }
            remote = remote_command(args, job, attempt, index, variables)
            command = ssh_command(args, slice_, number, remote)
            workers.append(Worker(index, place, command, dict(args.env)))
    return workers


def remote_command(
    args: argparse.Namespace, job: str, attempt: int, index: int, variables: dict[str, str]
) -> str:
    """Return the command that runs the program on one worker, with its environment variables; those
    of ``--env`` are named only.

    Raises UsageError if something is too long.
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
            **variables,
        },
        "awaits": [*dict(args.env)],
        "workdir": args.workdir,
        "grace": GRACE_SECONDS if args.grace is None else args.grace,
        "end_all": args.restart_tpuvm_pod_server and attempt == 0,
    }
    # One line of ASCII: what is in it passes through gcloud, ssh and the worker's shell unchanged.
    source = base64.b85encode(zlib.compress(Path(pod_worker.__file__).read_bytes(), 9)).decode()
    start = f"import base64, zlib; exec(zlib.decompress(base64.b85decode({source!r})))"
    remote = shlex.join(["exec", "python3", "-c", start, json.dumps(task)])
    if len(remote) > LONGEST_WORD:
        raise UsageError("the command is too long for a command line: put the arguments in a file")
    if len(json.dumps(dict(args.env))) > LONGEST_LINE:
        raise UsageError(f"--env: the values are longer than {LONGEST_LINE:,} bytes together")
    return remote


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
