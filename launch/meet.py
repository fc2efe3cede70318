"""Let the nodes of a run meet, then run torchrun in this process; ``launch/torchrun.sh`` calls it.

One node meets nobody. Of several, torchrun waits for the others in compiled code: it says nothing,
and Ctrl-C does not reach it. Here they meet first, on the port that torchrun takes afterwards.
Every ten seconds each node says who is missing; signals and JOIN_TIMEOUT end it at once, until
torchrun has started its processes and looks after both itself.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the folder of the project, in place of its own
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch import IN_VAIN
from launch.meeting import Refused, meet, plain
from launch.watching import Watch, say

TORCHRUN_SECONDS = 900
"""The seconds of torchrun's own limit for connecting: never reached before JOIN_TIMEOUT."""
FOR_EVER = 10**8
"""The seconds that torchrun is told where JOIN_TIMEOUT is 0."""


def torchrun_words(args: argparse.Namespace, hosts: bool) -> Iterable[str]:
    """Yield torchrun's options for what the nodes have found out."""
    if args.nodes == 1:  # a free port, so that two runs on one machine do not meet
        yield from "--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0".split()
        return
    endpoint, limit = f"{args.address}:{args.port}", args.limit or FOR_EVER
    connecting = max(limit, TORCHRUN_SECONDS)
    yield from ("--nnodes", str(args.nodes))
    if args.rdzv_id:
        yield from ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id")
        yield from (args.rdzv_id, "--rdzv-conf", f"is_host={int(hosts)},join_timeout={limit}")
    else:
        yield from ("--node-rank", str(args.rank), "--master-addr", args.address)
        yield from ("--master-port", str(args.port), "--rdzv-conf", f"timeout={connecting}")


def number_starts(handler: Any) -> None:
    """Let the processes know which start of which job this is, the same on all nodes.

    torchrun's own count is a node's: where one fails, or is replaced, the others start their
    processes again and do not count it. And each start gets a store of its own: PyTorch 2.9 keeps
    the first one's, and tells its address only to the nodes of the first start (#135712).
    """
    rendezvous, earlier = handler.next_rendezvous, int(os.environ["RUN_ATTEMPT"])
    mine = 0

    def next_rendezvous(self: Any) -> Any:
        nonlocal mine
        self._bootstrap_store_info = None
        found = rendezvous(self)
        found.store.set(f"start/{found.rank}", f"{mine} {os.environ['RUN_JOB_ID']}")
        told = [found.store.get(f"start/{rank}").decode() for rank in range(found.world_size)]
        # A node that took the place of another one knows of no start before.
        start, job = max((int(start), job) for start, job in (line.split(" ", 1) for line in told))
        os.environ["RENDEZVOUS_ROUND"], os.environ["RUN_JOB_ID"] = str(start), job
        os.environ["RUN_ATTEMPT"] = str(earlier + start)
        mine = start + 1
        return found

    handler.next_rendezvous = next_rendezvous


def wait_for_checkpoints(context: Any, stopping: type[Exception]) -> None:
    """Give the processes of a torchrun that is told to stop the time that their checkpoint takes.

    torchrun kills them after 30 seconds, however long a scheduler's notice is. Those that hang are
    ended by --step_timeout_s. After another one has failed they have the 30 seconds: most then wait
    in compiled code for that one.
    """
    close = context.close

    def patient_close(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
        close(self, death_sig, FOR_EVER if isinstance(sys.exception(), stopping) else timeout)

    context.close = patient_close


def give_up_on_mistakes(agent: Any) -> None:
    """Let torchrun restart no processes of which one has said by its code that it does not help."""
    monitor = agent._monitor_workers

    def monitor_workers(self: Any, group: Any) -> Any:
        result = monitor(self, group)
        if any(failure.exitcode in IN_VAIN for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result

    agent._monitor_workers = monitor_workers


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--rank", type=int, help="this node's; not with --rdzv_id")
    parser.add_argument("--rdzv_id", default="", help="for nodes that number themselves")
    parser.add_argument("--address", help="the first node's")
    parser.add_argument("--port", type=int)
    parser.add_argument("--limit", type=int, default=0, help="seconds; 0: none")
    parser.add_argument("torchrun", nargs="+", help="after --: for torchrun")
    args = parser.parse_args(argv)
    # Two containers of one machine may agree in the name and in the process id.
    unique = f"{plain(socket.gethostname())}/{os.urandom(4).hex()}"
    args.name = unique if args.rdzv_id else str(args.rank)
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    watch = Watch(args.limit)
    try:
        # Before the meeting: a node without it, or with a wrong option, is not to come.
        from torch.distributed import DistError, run
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import PContext, SignalException
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
    except ImportError as error:
        say(f"error: {sys.executable} cannot import PyTorch ({error}): set PYTHON")
        return 2
    run.parse_args(args.torchrun)
    hosts = True
    if args.nodes > 1:
        watch.wait_for("the other nodes")
        try:
            job, hosts = meet(args, watch)
        except Refused as refusal:
            say(f"error: {refusal}")
            return 2
        os.environ.setdefault("RUN_JOB_ID", job)
        watch.wait_for("torchrun of the other nodes")
        number_starts(DynamicRendezvousHandler)
    wait_for_checkpoints(PContext, SignalException)
    give_up_on_mistakes(LocalElasticAgent)
    try:
        # torchrun would leave a folder of its own for its processes' reports, one a start.
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as logs:
            run.main(["--log-dir", logs, *torchrun_words(args, hosts), *args.torchrun])
    except (RendezvousError, DistError) as error:
        say(f"error: the nodes do not find each other: {plain(error)}")
        return 1
    except SignalException as stop:  # handed on to the processes; they have ended
        say(f"ended by {stop.sigval.name}")
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
