"""Let the nodes of a run meet, then run torchrun in this process; ``launch/torchrun.sh`` calls it.

Of several nodes, torchrun would wait for the others in compiled code: it prints nothing, Ctrl-C
does not reach it, and its join timeout names no missing node. So they meet first, on the port that
torchrun takes afterwards: one node has the port, the others connect and send lines of JSON, and it
lets them start. Every ten seconds each node prints who is missing; signals and JOIN_TIMEOUT end
it at once, until torchrun has started its processes and looks after both itself.
"""

import argparse
import contextlib
import errno
import importlib
import json
import math
import os
import re
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

if not __package__:  # run by its path: the folder of the project, in place of its own
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch import CRASH_SECONDS, IN_VAIN, STOPS, is_crash

SAY_SECONDS = 10.0
TORCHRUN_SECONDS = 900
"""The seconds of torchrun's own limit for connecting: never reached before JOIN_TIMEOUT."""
FOR_EVER = 10**8
"""The seconds that torchrun is given if JOIN_TIMEOUT is 0."""
GREETING_SECONDS = 10.0
"""The seconds within which whoever connects must send its greeting."""
ANSWER_SECONDS = 3.0
"""The seconds within which a node that has the port answers a greeting."""
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
LONGEST_LINE = 4096
NAMES_SHOWN = 8


class Refused(Exception):
    """Raised if this node cannot be one of the run's, whoever comes: one line, exit code 2."""


# -- Waiting: what for, how long, until which signal -----------------------------------------------


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"torchrun.sh: {text}\n".encode(errors="replace"))


class Watch:
    """Prints what the node waits for, and ends the process on a signal or at the limit.

    In a thread, as the main one may be in compiled code. Python's handler for signals, in C, writes
    to a pipe whatever the main thread does; the default action would do nothing in a container,
    where this is process 1.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._handler = limit, lambda number, frame: None
        self.wait_for("")
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in STOPS:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                # Only what Python's own handler does before this one is needed.
                signal.signal(number, self._handler)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._follow, daemon=True).start()

    def wait_for(self, what: str) -> None:
        """Wait for this from now on, with a limit of its own.

        ``waiting_for`` may later be set to something more exact.
        """
        self._begin = self._said = time.monotonic()
        self.waiting_for = what

    def _follow(self) -> None:
        # Until torchrun has started, and installed its own handlers.
        while signal.getsignal(signal.SIGTERM) == self._handler:
            now = time.monotonic()
            if self.waiting_for and now - self._said >= SAY_SECONDS:
                self._said = now
                say(f"waiting for {self.waiting_for}, {now - self._begin:.0f} s so far")
            if self.waiting_for and self._limit and now - self._begin >= self._limit:
                say(
                    f"error: {self.waiting_for} did not come within {self._limit:.0f} s "
                    "(JOIN_TIMEOUT): see why, and start all nodes again"
                )
                os._exit(1)
            if select.select([self._reader], [], [], 0.5)[0]:
                number = os.read(self._reader, 1)[0]
                is_needed = signal.getsignal(signal.SIGTERM) == self._handler
                if number in STOPS and is_needed:
                    say(f"ended by {signal.Signals(number).name}")
                    os._exit(128 + number)


# -- What is sent over a connection ----------------------------------------------------------------


def keep_alive(connection: socket.socket) -> None:
    """Notice a machine at the other end that crashed, and so closes nothing."""
    with contextlib.suppress(OSError):  # it has hung up already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)


def send(connection: socket.socket, **message: Any) -> None:
    """Send an object; a peer that is gone is noticed when it is read from."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def receive(lines: BinaryIO) -> dict[str, Any] | None:
    """Wait for the next object; None at the end, and for what no node would send."""
    try:
        message = json.loads(lines.readline(LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def plain(text: object) -> str:
    """Make harmless what came over the network and goes to a terminal, or into a variable."""
    return re.sub(r"[^ -~]", "?", str(text))[:200]


def few(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


# -- The meeting -----------------------------------------------------------------------------------


def meet(args: argparse.Namespace, watch: Watch) -> tuple[str, bool]:
    """Meet the other nodes; return the job's name, and whether this node had the port.

    Raises Refused.
    """
    if listener := listen(args):
        return Host(listener, args, watch).wait(), True
    job = join(args, watch)
    if job is None:
        say(f"torchrun runs at {args.address}:{args.port} already: joining it")
    return job or args.rdzv_id, False


def listen(args: argparse.Namespace) -> socket.socket | None:
    """Return a listener on the port to which the others connect; None if another node has it.

    Raises Refused.
    """
    if not args.rdzv_id and args.rank > 0:
        return None
    own_names = {socket.gethostname(), socket.getfqdn()}
    address = "" if not args.rdzv_id or args.address in own_names else args.address
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address or None, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if not address and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", args.port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        return socket.create_server(where[:2], family=family, backlog=1024)
    except OSError as error:
        if args.rdzv_id:  # the address is another node's, or another node of this one has it
            return None
        if error.errno == errno.EADDRINUSE:
            raise Refused(
                f"port {args.port} is in use on this machine, by another run perhaps: "
                "set MASTER_PORT, the same on all nodes"
            ) from None
        raise Refused(f"port {args.port}: {error.strerror}: set MASTER_PORT") from None


class Host:
    """The node that has the port: waits for all nodes, lets them start, frees the port."""

    def __init__(self, listener: socket.socket, args: argparse.Namespace, watch: Watch) -> None:
        self._listener, self._args, self._watch = listener, args, watch
        self._here: dict[str, socket.socket | None] = {args.name: None}
        """The connections of the nodes that are here, by name; None for this one."""
        self._are_all_here = False
        self._changed = threading.Condition()
        """Held by whoever reads or changes these two."""

    def wait(self) -> str:
        """Wait for all nodes; return the job's name, which all of them got."""
        threading.Thread(target=self._accept, daemon=True).start()
        with self._changed:
            self._report_missing()
            # torchrun waits for those that are not needed.
            enough = self._args.least or self._args.nodes
            self._changed.wait_for(lambda: len(self._here) >= enough)
            self._are_all_here = True
            job = f"{plain(socket.gethostname())}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            self._listener.shutdown(socket.SHUT_RDWR)  # lets the thread go that accepts
            self._listener.close()
            for connection in filter(None, self._here.values()):
                send(connection, go=job)
            # They close first: the side that does keeps the port for a minute.
            self._changed.wait_for(lambda: len(self._here) == 1, timeout=5)
        return job

    def _report_missing(self) -> None:
        """Set what this node waits for, and send it to the others; wake the one that waits."""
        self._changed.notify_all()
        nodes = self._args.least or self._args.nodes
        if self._are_all_here or len(self._here) >= nodes:
            return
        if self._args.rdzv_id:
            names = few(sorted(name.partition("/")[0] for name in self._here))
            missing = f"{nodes - len(self._here)} of {nodes} nodes (here: {names})"
        else:
            ranks = [str(rank) for rank in range(nodes) if str(rank) not in self._here]
            missing = f"node{'s' * (len(ranks) > 1)} {few(ranks)} of {nodes}"
        self._watch.waiting_for = missing
        for connection in filter(None, self._here.values()):
            send(connection, missing=missing)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: all are here
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """Let one node in, and out if it leaves; refuse whoever is none."""
        with connection, connection.makefile("rb") as lines:
            keep_alive(connection)
            connection.settimeout(GREETING_SECONDS)
            message = receive(lines)
            if message is None:
                return
            name = plain(message.get("name"))
            with self._changed:
                if self._are_all_here:
                    return
                refusal = self._refusal(message)
                if not refusal:
                    self._here[name] = connection
                    self._report_missing()
            if refusal:
                send(connection, refused=refusal)
                say(f"{plain(message.get('who'))} was refused: {refusal}")
                return
            connection.settimeout(None)
            while receive(lines) is not None:
                pass
            with self._changed:
                del self._here[name]
                self._report_missing()

    def _refusal(self, message: dict[str, Any]) -> str:
        """Return why the sender of this message cannot be one of the nodes; else ""."""
        for key, variable in (
            ("nodes", "NNODES"),
            ("least", "MIN of NNODES=MIN:MAX"),
            ("rdzv_id", "RDZV_ID"),
        ):
            there, here = message.get(key), getattr(self._args, key)
            if there != here:
                return f"{variable} is '{plain(there)}' there and '{here}' here"
        name = plain(message.get("name"))
        if name in self._here:
            return (
                f"NODE_RANK={name} is here already; another run on this "
                "machine needs another MASTER_PORT"
            )
        if not self._args.rdzv_id and name not in map(str, range(self._args.nodes)):
            return f"NODE_RANK={name} is not 0 to {self._args.nodes - 1}"
        return ""


def join(args: argparse.Namespace, watch: Watch) -> str | None:
    """Connect to the node that has the port; return the job's name when all nodes are there.

    None if torchrun runs there already: this node is to join it. Raises Refused.
    """
    host = "the node that has" if args.rdzv_id else "node 0 at"
    greeting = {
        "name": args.name,
        "nodes": args.nodes,
        "least": args.least,
        "rdzv_id": args.rdzv_id,
        "who": f"{socket.gethostname()} (process {os.getpid()})",
    }
    watch.waiting_for = f"{host} {args.address}:{args.port}"
    while True:
        try:
            connection = socket.create_connection((args.address, args.port), timeout=5)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            why = ""
            with connection, connection.makefile("rb") as lines:
                keep_alive(connection)
                # No host of a meeting keeps silent; torchrun's store does.
                connection.settimeout(ANSWER_SECONDS if args.rdzv_id else GREETING_SECONDS)
                send(connection, **greeting)
                while (message := receive(lines)) is not None:
                    why = "it left"
                    connection.settimeout(None)
                    if "refused" in message:
                        raise Refused(plain(message["refused"]))
                    if "missing" in message:
                        watch.waiting_for = plain(message["missing"])
                    if message.get("go"):
                        return plain(message["go"])
            if args.rdzv_id and not why:
                return None
            why = why or "another program answers there"
        watch.waiting_for = f"{host} {args.address}:{args.port} ({why})"
        time.sleep(1)


# -- torchrun --------------------------------------------------------------------------------------


def torchrun_words(args: argparse.Namespace, hosts: bool) -> Iterable[str]:
    """Yield torchrun's options; ``hosts``: whether this node had the port of the meeting."""
    if args.nodes == 1:  # a free port, so that two runs on one machine do not meet
        yield from "--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0".split()
        return
    endpoint, limit = f"{args.address}:{args.port}", args.limit or FOR_EVER
    connecting = max(limit, TORCHRUN_SECONDS)
    yield from ("--nnodes", f"{args.least or args.nodes}:{args.nodes}")
    if args.rdzv_id:
        conf = f"is_host={int(hosts)},join_timeout={limit},last_call_timeout={args.elastic_wait}"
        yield from ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id")
        yield from (args.rdzv_id, "--rdzv-conf", conf)
    else:
        yield from ("--node-rank", str(args.rank), "--master-addr", args.address)
        yield from ("--master-port", str(args.port), "--rdzv-conf", f"timeout={connecting}")


def join_slice(args: argparse.Namespace) -> None:
    """Set what TorchTPU's processes must know of their TPU slice, before torchrun starts them.

    From TORCH_TPU_TOPOLOGY, TORCH_TPU_SLICEBUILDER_ADDRESSES and torchrun's own variables torch_tpu
    0.2.0 makes those that libtpu reads. Each of several slices has a topology and addresses of its
    own. Raises Refused.
    """
    hosts = args.nodes // int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)
    devices = hosts * args.torchtpu
    topology = os.environ.get("TORCH_TPU_TOPOLOGY") or os.environ.get("TPU_TOPOLOGY")  # GKE's: 4x4
    if topology:
        if not re.fullmatch(r"[1-9]\d{0,3}([,x][1-9]\d{0,3}){1,3}", topology):
            raise Refused(f"TORCH_TPU_TOPOLOGY={plain(topology)} is not chips a side, as 4,4,1")
        sides = [int(side) for side in re.split("[,x]", topology)]
        sides += [1] * (3 - len(sides))
        chips = math.prod(sides)
        if devices == 2 * chips:  # TPU7x: each of the two cores of a chip is a device
            sides.append(2)
        elif devices != chips:
            raise Refused(
                f"TORCH_TPU_TOPOLOGY={topology} is {chips} chips, but {hosts} host(s) start "
                f"{args.torchtpu} process(es) each: set it, or NPROC_PER_NODE"
            )
        os.environ["TORCH_TPU_TOPOLOGY"] = ",".join(map(str, sides))
    elif hosts > 1:  # TorchTPU would take this host's own
        raise Refused("several hosts require TORCH_TPU_TOPOLOGY, the slice's chips, as 4,4,1")
    os.environ["NODE_RANK"] = str(args.rank or 0)  # else TorchTPU would start the TPU to ask it
    try:
        importlib.import_module("torch_tpu")
        public = importlib.import_module("torch.tpu.distributed")
        public.set_tpu_launch_env(nnodes=hosts, nproc_per_node=args.torchtpu)
    except ImportError as error:
        raise Refused(
            f"{sys.executable} cannot import TorchTPU ({error}): "
            "install requirements-torchtpu.txt, or set PYTHON"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise Refused(str(error)) from None


def number_starts(handler: Any, args: argparse.Namespace) -> None:
    """Set the number of this start and the name of the job for the processes, on all nodes alike.

    torchrun's own count is a node's: where one fails, or is replaced, the others start their
    processes again and do not count it. And each start gets a store of its own: PyTorch 2.9 keeps
    the first one's, and gives its address only to the nodes of the first start (#135712).
    """
    rendezvous, earlier = handler.next_rendezvous, int(os.environ["RUN_ATTEMPT"])
    mine = 0

    def next_rendezvous(self: Any) -> Any:
        nonlocal mine
        self._bootstrap_store_info = None
        if args.least and mine:
            say(
                f"waiting for {args.least} to {args.nodes} nodes, {args.elastic_wait} s for more "
                f"than {args.least}"
            )
        found = rendezvous(self)
        if args.least:
            say(f"starting on {found.world_size} of up to {args.nodes} nodes")
        found.store.set(f"start/{found.rank}", f"{mine} {os.environ['RUN_JOB_ID']}")
        lines = [found.store.get(f"start/{rank}").decode() for rank in range(found.world_size)]
        # A node that took the place of another one knows of no start before.
        start, job = max((int(start), job) for start, job in (line.split(" ", 1) for line in lines))
        os.environ["RENDEZVOUS_ROUND"], os.environ["RUN_JOB_ID"] = str(start), job
        os.environ["RUN_ATTEMPT"] = str(earlier + start)
        mine = start + 1
        return found

    handler.next_rendezvous = next_rendezvous


def keep_ignored() -> None:
    """Block SIGINT and SIGHUP where they are ignored, as under nohup or in a script's background.

    torchrun replaces "ignore" by handlers of its own. What is blocked reaches neither those nor the
    processes that it starts, which inherit the mask. Before there are threads, which do, too.
    """
    ignored = {n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, ignored)


def wait_for_checkpoints(context: Any, stopping: type[Exception], agent: Any) -> None:
    """Give the processes time to write a checkpoint when torchrun is asked to stop, or when all
    are to start again with a node that came.

    torchrun kills them after 30 seconds, however long a scheduler's notice is. Those that hang are
    ended by --step_timeout_s. After one has crashed, here or on another node, the others are killed
    sooner; if all end for the same reason they have the 30 seconds.
    """
    close, restart = context.close, agent._restart_workers
    a_node_came = restarts = False

    def patient_close(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
        ended = [each.proc.poll() for each in self.subprocess_handlers.values()]
        if a_node_came or isinstance(sys.exception(), stopping):
            timeout = FOR_EVER
        elif restarts or any(code is not None and is_crash(code) for code in ended):
            timeout = CRASH_SECONDS
        close(self, death_sig, timeout)

    def restart_workers(self: Any, group: Any) -> None:
        nonlocal a_node_came, restarts
        handler = group.spec.rdzv_handler
        if handler.num_nodes_waiting():  # never where NODE_RANK numbers them: none comes later
            a_node_came = len(handler._state_holder.state.participants) == group.group_world_size
        os.environ["RUN_FAILED_AT"] = str(time.time())  # for the processes' account of the restart
        if a_node_came:
            say("a node has come: all write a checkpoint and start again with it")
        restarts = True
        restart(self, group)
        a_node_came = restarts = False

    context.close, agent._restart_workers = patient_close, restart_workers


def judge_ends(agent: Any, healthy: Any) -> None:
    """Let torchrun not restart processes after an exit code after which a restart does not help.

    And not count the end of processes as a failure if all write a checkpoint together for a node
    that came: other nodes may have sent the signal first.
    """
    monitor = agent._monitor_workers

    def monitor_workers(self: Any, group: Any) -> Any:
        result = monitor(self, group)
        codes = {failure.exitcode for failure in result.failures.values()}
        if codes & set(IN_VAIN):
            self._remaining_restarts = 0
        elif codes == {128 + signal.SIGTERM} and group.spec.rdzv_handler.num_nodes_waiting():
            return healthy
        return result

    agent._monitor_workers = monitor_workers


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--rank", type=int, help="this node's; not with --rdzv_id")
    parser.add_argument("--rdzv_id", default="", help="for nodes that number themselves")
    parser.add_argument("--least", type=int, help="so many nodes are enough; with --rdzv_id")
    parser.add_argument(
        "--elastic_wait", type=int, default=30, help="seconds that these wait for more"
    )
    parser.add_argument("--address", help="the first node's")
    parser.add_argument("--port", type=int)
    parser.add_argument("--limit", type=int, default=0, help="seconds; 0: none")
    parser.add_argument("--torchtpu", metavar="N", type=int, help="TorchTPU, N processes a node")
    parser.add_argument("torchrun", nargs="+", help="after --: for torchrun")
    args = parser.parse_args(argv)
    # Two containers of one machine may agree in the name and in the process id.
    unique = f"{plain(socket.gethostname())}/{os.urandom(4).hex()}"
    args.name = unique if args.rdzv_id else str(args.rank)
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    keep_ignored()
    watch = Watch(args.limit)
    try:
        # Before the meeting: a node without PyTorch, or with a wrong option, must not come.
        from torch.distributed import DistError, run
        from torch.distributed.elastic.agent.server import RunResult, WorkerState
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import PContext, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
    except ImportError as error:
        say(f"error: {sys.executable} cannot import PyTorch ({error}): set PYTHON")
        return 2
    run.parse_args(args.torchrun)
    hosts = True
    try:
        if args.torchtpu:
            join_slice(args)
        if args.nodes > 1:
            watch.wait_for("the other nodes")
            job, hosts = meet(args, watch)
            os.environ.setdefault("RUN_JOB_ID", job)
            watch.wait_for("torchrun of the other nodes")
            number_starts(DynamicRendezvousHandler, args)
    except Refused as refusal:
        say(f"error: {refusal}")
        return 2
    wait_for_checkpoints(PContext, SignalException, LocalElasticAgent)
    judge_ends(LocalElasticAgent, RunResult(WorkerState.HEALTHY))
    try:
        # torchrun would leave a folder of its own for its processes' reports, one a start.
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as logs:
            run.main(["--log-dir", logs, *torchrun_words(args, hosts), *args.torchrun])
    except (RendezvousError, DistError) as error:
        say(f"error: the nodes do not find each other: {plain(error)}")
        return 1
    except ChildFailedError as failed:
        in_vain = [each.exitcode for each in failed.failures.values() if each.exitcode in IN_VAIN]
        if not in_vain:
            raise  # with torchrun's report
        return in_vain[0]  # the program has said why; other launchers must know, too
    except SignalException as stop:  # handed on to the processes; they have ended
        say(f"ended by {stop.sigval.name}")
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
