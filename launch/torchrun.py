"""Wait for the nodes of a run, then run torchrun's agent in this process; for launch/torchrun.sh.

torchrun's rendezvous, static or c10d, connects the nodes. ``Agent`` extends torchrun's own agent
where torchrun has no option: the time to save a checkpoint when processes are stopped, and exit
codes after which a restart does not help.

Whoever reaches a port of torchrun can write to its store. So the nodes' store listens at
MASTER_ADDR alone, a single node has a file in its place, and ``CheckedBackend`` lets torchrun
unpickle nothing but its own state.
"""

import argparse
import errno
import hashlib
import importlib
import io
import json
import math
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the folder of the project, in place of its own
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    try:
        importlib.import_module("torch")
    except (ImportError, OSError, ValueError) as error:  # ValueError: TORCH_LOGS
        reason = textwrap.shorten(str(error), 160)
        print(
            f"torchrun.sh: error: {sys.executable} cannot import PyTorch ({reason}): set PYTHON, "
            "or correct PyTorch's environment variables",
            file=sys.stderr,
        )
        sys.exit(2)

from torch.distributed import DistError, TCPStore, run
from torch.distributed.elastic.agent.server import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from launch import CRASH_SECONDS, NON_RETRYABLE, STOPS, UsageError, is_crash, write_line
from training.processes import rendezvous

STOP_SECONDS = 30
"""torchrun's own time for its processes to end."""
CONNECT_SECONDS = 120
"""The time for nodes that are all there to connect by torchrun's static rendezvous."""
FOREVER = 10**8


def say(text: str) -> None:
    write_line(f"torchrun.sh: {text}", sys.stderr)


# -- before torchrun: until the nodes of a run are there ------------------------------
#
# torchrun waits for the nodes too, but prints nothing meanwhile, and its join timeout names no
# node. The nodes register in a TCPStore at MASTER_ADDR:MASTER_PORT. Its server is kept: torchrun's
# rendezvous, in the same process, shares it (``multi_tenant``). So the port is never free for
# another program, and a node that comes later finds the same run there.

STORE_TIMEOUT = timedelta(seconds=10)
MISSING = "missing"
"""The key under which the serving node says which nodes are missing; empty once they are there."""


def wait_for_nodes(args: argparse.Namespace) -> tuple[TCPStore, bool]:
    """Wait for all nodes (elastic runs: for the least that may train); say which are missing.

    Returns the run's store, and whether this process serves it. Raises UsageError and TimedOut.
    """
    listening = listen_as_server(args)
    server = "the node at" if args.rdzv_id else "node 0 at"
    who = f"{socket.gethostname()} (process {os.getpid()})"
    store = None
    wait = rendezvous.Wait(args.limit, say, lambda: missing)
    while True:
        try:
            if store is None:
                mine = listening.dup() if listening else None
                store = rendezvous.connect(args.address, args.port, mine, STORE_TIMEOUT)
                node = register(store, args, who)
            if listening:
                store.set(MISSING, missing_nodes(store, args))
            elif (other := store.get(f"node/{node}").decode()) != who:
                raise UsageError(
                    f"NODE_RANK={node} is used both by this node and by {other}: give each node "
                    "its own"
                )
            missing = store.get(MISSING).decode()
        except (OSError, DistError) as error:
            store = None
            reason = getattr(error, "strerror", "") or "no answer"
            missing = f"{server} {args.address}:{args.port} ({reason})"
        if store is not None and not missing:
            return store, listening is not None
        wait.pause()


def listen_as_server(args: argparse.Namespace) -> socket.socket | None:
    """Return a listening socket for the store's server, None if another node serves it: node 0
    does, or the first node at MASTER_ADDR. Raises UsageError."""
    address, port = args.address, args.port
    if not (rendezvous.is_own_address(address) if args.rdzv_id else args.rank == 0):
        return None
    try:
        try:
            return rendezvous.listen(address, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            return rendezvous.listen_everywhere(port)  # a router may know MASTER_ADDR as this host
    except OSError as error:
        if args.rdzv_id:  # another node of this machine serves
            return None
        raise UsageError(
            f"cannot listen on port {port} on this machine ({error.strerror}): set "
            "MASTER_PORT to a free port, the same on all nodes"
        ) from None


def register(store: TCPStore, args: argparse.Namespace, who: str) -> int:
    """Enter this node in the store, and a name for the job; return the node's number.

    Raises UsageError if the nodes there belong to another run.
    """
    run = {"NNODES": args.nodes, "MIN of NNODES=MIN:MAX": args.least, "RDZV_ID": args.rdzv_id}
    if args.rdzv_id:  # a secret, which is not for everybody who can read the store
        run["RDZV_ID"] = "SHA-256 " + hashlib.sha256(args.rdzv_id.encode()).hexdigest()
    first = json.loads(store.compare_set("run", "", json.dumps(run)))
    for variable, value in run.items():
        if first.get(variable) != value:
            raise UsageError(
                f"{variable} is '{value}' on this node, but '{first.get(variable)}' on the other "
                f"nodes at {args.address}:{args.port}"
            )
    job = f"{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    store.compare_set("job", "", job)
    node = store.add("numbered", 1) - 1 if args.rdzv_id else args.rank
    store.set(f"node/{node}", who)  # another node with the same number will notice
    if store.add(f"starts of {node}", 1) == 1:
        store.add("here", 1)
    return node


def missing_nodes(store: TCPStore, args: argparse.Namespace) -> str:
    """Return which nodes are missing, as a phrase; "" if enough are there."""
    nodes = args.least or args.nodes
    if store.add("here", 0) >= nodes:
        return ""
    if not args.rdzv_id:
        return rendezvous.missing_members(store, "node", nodes)
    present = [f"node/{node}" for node in range(nodes) if store.check([f"node/{node}"])]
    names = sorted(store.get(key).decode().partition(" ")[0] for key in present)
    return f"{nodes - len(present)} of {nodes} nodes (here: {rendezvous.shorten(names)})"


# -- torchrun's rendezvous --------------------------------------------------------------


class _State(pickle.Unpickler):
    """Reads the state of torchrun's c10d rendezvous, and makes objects of no other class."""

    _MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    _CLASSES = (
        (_MODULE, "_RendezvousState"),
        (_MODULE, "_NodeDesc"),
        ("builtins", "set"),
        *(("datetime", name) for name in ("datetime", "timedelta", "timezone")),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return super().find_class(module, name)


class CheckedBackend(RendezvousBackend):
    """torchrun's c10d backend, without what anybody who reaches the store may have put there.

    torchrun unpickles the state of the rendezvous, which can run any code.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        if found:
            self._check(found[0])
        return found

    def set_state(self, state: bytes, token: Token | None = None) -> Any:
        found = self._backend.set_state(state, token)
        if found:
            self._check(found[0])
        return found

    def _check(self, state: bytes) -> None:
        """Raise RendezvousStateError, before torchrun reads it, for a state of anything else."""
        try:
            _State(io.BytesIO(state)).load()
        except Exception as error:  # noqa: BLE001 - damaged pickles raise errors of many kinds
            raise RendezvousStateError(f"the rendezvous state is not torchrun's: {error}") from None


# -- torchrun's agent -------------------------------------------------------------------


class Agent(LocalElasticAgent):
    """torchrun's agent of a node, which lets processes finish a checkpoint when they are stopped.

    torchrun kills them after 30 seconds, however long a scheduler's notice is. Those that hang are
    ended by ``--step_timeout_s``. After a crash, here or on another node, the others mostly wait
    for it in compiled code: they are killed sooner.
    """

    _stop_seconds = STOP_SECONDS

    def _rendezvous(self, worker_group: Any) -> None:
        handler = worker_group.spec.rdzv_handler
        is_elastic = False
        if handler.get_backend() == "c10d":
            least, most = handler.settings.min_nodes, handler.settings.max_nodes
            is_elastic = least < most
        if is_elastic and worker_group.group_world_size:
            wait = handler.settings.timeout.last_call.total_seconds()
            say(f"waiting for {least} to {most} nodes, {wait:.0f} s for more than {least}")
        super()._rendezvous(worker_group)
        if is_elastic:
            say(f"starting on {worker_group.group_world_size} of up to {most} nodes")

    def _restart_workers(self, worker_group: Any) -> None:
        handler = worker_group.spec.rdzv_handler
        has_newcomer = False
        if handler.num_nodes_waiting():  # with the static rendezvous none ever waits
            participants = handler._state_holder.state.participants
            has_newcomer = len(participants) == worker_group.group_world_size
        if has_newcomer:
            say("a node has joined: saving a checkpoint and restarting with it")
        os.environ["RUN_FAILED_AT"] = str(time.time())  # for the processes' account of the restart
        self._stop_seconds = FOREVER if has_newcomer else CRASH_SECONDS
        super()._restart_workers(worker_group)
        self._stop_seconds = STOP_SECONDS

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._pcontext:
            is_stop = isinstance(sys.exception(), SignalException)
            self._pcontext.close(death_sig, FOREVER if is_stop else self._stop_seconds)
        super()._shutdown(death_sig)

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        """Look after the processes once; do not restart them if that cannot help.

        The end of all by SIGTERM while a node waits is no failure: another node, which saw it
        first, has asked them for a checkpoint.
        """
        assert isinstance(self._pcontext, SubprocessContext)
        processes = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]

        def kill_all() -> None:
            for process in processes:
                process.kill()

        killer = threading.Timer(CRASH_SECONDS, kill_all)
        ended = [process.poll() for process in processes]
        if any(code is not None and is_crash(code) for code in ended):
            killer.start()  # else torchrun, which asks the others to end, would wait for 30 s
        result = super()._monitor_workers(worker_group)
        killer.cancel()
        codes = {failure.exitcode for failure in result.failures.values()}
        if codes & set(NON_RETRYABLE):
            self._remaining_restarts = 0
        elif codes == {128 + signal.SIGTERM} and worker_group.spec.rdzv_handler.num_nodes_waiting():
            return RunResult(WorkerState.HEALTHY)
        return result


def run_agent(options: argparse.Namespace) -> None:
    """Do what torchrun does with its options, ``launch_agent``, with ``Agent`` as its agent.

    Raises ChildFailedError, SignalException, RendezvousError and DistError.
    """
    config, program, program_args = run.config_from_args(options)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    if config.rdzv_backend == "c10d":
        backend, store = create_backend(parameters)
        handler: Any = create_handler(store, CheckedBackend(backend), parameters)
    else:
        handler = get_rendezvous_handler(parameters)
    assert config.logs_specs  # made by config_from_args
    same = [field.name for field in fields(WorkerSpec) if hasattr(config, field.name)]
    spec = WorkerSpec(
        **{name: getattr(config, name) for name in same},
        local_world_size=config.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=program,
        args=tuple(program_args),
    )
    agent = Agent(
        spec,
        config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
    )
    is_stopped = False
    try:
        result = agent.run()
    except SignalException:
        is_stopped = True
        raise
    finally:
        if not is_stopped:  # else the other nodes may go on
            handler.shutdown()
    if result.is_failed():
        raise ChildFailedError(spec.get_entrypoint_name(), result.failures)


def torchrun_words(args: argparse.Namespace, is_server: bool, folder: str) -> list[str]:
    """Return torchrun's options that connect the nodes. ``folder``: one of this user alone."""
    if args.nodes == 1:  # no port, which other users of this machine could reach
        words = ["--nnodes", "1", "--local-addr", "127.0.0.1", "--rdzv-backend", "c10d"]
        return [*words, "--rdzv-conf", "store_type=file", "--rdzv-endpoint", f"{folder}/rendezvous"]
    words = ["--nnodes", f"{args.least or args.nodes}:{args.nodes}"]
    if not args.rdzv_id:
        words += ["--node-rank", str(args.rank), "--master-addr", args.address]
        words += ["--master-port", str(args.port)]
        return [*words, "--rdzv-conf", f"timeout={CONNECT_SECONDS}"]
    conf = f"is_host={int(is_server)},join_timeout={args.limit or FOREVER}"
    conf += f",last_call_timeout={args.elastic_wait}"
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{args.address}:{args.port}"]
    return [*words, "--rdzv-id", args.rdzv_id, "--rdzv-conf", conf]


# -- the program ------------------------------------------------------------------------


def join_slice(args: argparse.Namespace) -> None:
    """Set what TorchTPU's processes must know of their TPU slice, before torchrun starts them.

    From TORCH_TPU_TOPOLOGY, TORCH_TPU_SLICEBUILDER_ADDRESSES and torchrun's own variables torch_tpu
    0.2.0 makes those that libtpu reads. Each of several slices has a topology and addresses of its
    own. Raises UsageError.
    """
    hosts = args.nodes // int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)
    devices = hosts * args.torchtpu
    topology = os.environ.get("TORCH_TPU_TOPOLOGY") or os.environ.get("TPU_TOPOLOGY")  # GKE's: 4x4
    if topology:
        if not re.fullmatch(r"[1-9]\d{0,3}([,x][1-9]\d{0,3}){1,3}", topology):
            raise UsageError(
                f"TORCH_TPU_TOPOLOGY={topology} is not a list of chips per side, such as 4,4,1"
            )
        sides = [int(side) for side in re.split("[,x]", topology)]
        sides += [1] * (3 - len(sides))
        chips = math.prod(sides)
        if devices == 2 * chips:  # TPU7x: each of the two cores of a chip is a device
            sides.append(2)
        elif devices != chips:
            raise UsageError(
                f"TORCH_TPU_TOPOLOGY={topology} has {chips} chips, but {hosts} host(s) start "
                f"{args.torchtpu} process(es) each: correct it, or set NPROC_PER_NODE"
            )
        os.environ["TORCH_TPU_TOPOLOGY"] = ",".join(map(str, sides))
    elif hosts > 1:  # TorchTPU would take this host's own
        raise UsageError(
            "several hosts require TORCH_TPU_TOPOLOGY, the slice's chips per side, such as 4,4,1"
        )
    os.environ["NODE_RANK"] = str(args.rank or 0)  # else TorchTPU would start the TPU to ask it
    try:
        importlib.import_module("torch_tpu")
        public = importlib.import_module("torch.tpu.distributed")
        public.set_tpu_launch_env(nnodes=hosts, nproc_per_node=args.torchtpu)
    except ImportError as error:
        raise UsageError(
            f"{sys.executable} cannot import TorchTPU ({error}): install "
            "requirements-torchtpu.txt, or set PYTHON"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--rank", type=int, help="rank of this node; not with --rdzv_id")
    parser.add_argument(
        "--rdzv_id",
        action="store_const",
        const=os.environ.get("RDZV_ID", ""),
        default="",
        help="let the nodes number themselves; their run's id is in the environment, RDZV_ID",
    )
    parser.add_argument(
        "--least", type=int, help="minimum number of nodes to start with; requires --rdzv_id"
    )
    parser.add_argument(
        "--elastic_wait", type=int, default=30, help="seconds to wait for more than --least nodes"
    )
    parser.add_argument("--address", help="address of the first node")
    parser.add_argument("--port", type=int)
    parser.add_argument(
        "--limit", type=int, default=0, help="seconds to wait for all nodes; 0: no limit"
    )
    parser.add_argument(
        "--torchtpu", metavar="N", type=int, help="use TorchTPU with N processes per node"
    )
    parser.add_argument("torchrun", nargs="+", help="arguments for torchrun, after --")
    return parser.parse_args(argv)


def stop(number: int, frame: object) -> None:
    raise SignalException("", signal.Signals(number))


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    # What is ignored, as SIGHUP under nohup, stays so: torchrun would install handlers of its own.
    ignored = {n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    for number in STOPS:  # until torchrun does so, too, with the processes; they inherit the mask
        signal.signal(number, stop)
    run.parse_args(args.torchrun)  # a node with a wrong option must not come
    # Without this, PyTorch gives the address of the processes' store only to the nodes of the
    # first start (#135712), and serves one for a single node.
    is_off = bool(args.rdzv_id) or args.nodes == 1
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(is_off))
    is_server, store = True, None
    try:
        if args.torchtpu:
            join_slice(args)
        if args.nodes > 1:
            store, is_server = wait_for_nodes(args)
            os.environ.setdefault("RUN_JOB_ID", store.get("job").decode())
        # torchrun would leave a folder of its own for its processes' reports, one a start.
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as folder:
            if args.nodes == 1:
                os.environ["RUN_STORE_FILE"] = f"{folder}/store"
            words = [*torchrun_words(args, is_server, folder), *args.torchrun]
            words = ["--log-dir", folder, *words]
            run_agent(run.parse_args(words))
    except UsageError as error:
        say(f"error: {error}")
        return 2
    except rendezvous.TimedOut as late:
        say(
            f"error: timed out after {args.limit} s (JOIN_TIMEOUT) waiting for {late}: check these "
            "nodes, then start all nodes again"
        )
        return 1
    except RendezvousTimeoutError:
        say(
            f"error: fewer than {args.least or args.nodes} nodes joined within {args.limit} s "
            "(JOIN_TIMEOUT)"
        )
        return 1
    except (RendezvousError, DistError) as error:
        say(f"error: the nodes cannot connect to each other: {error}")
        return 1
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        for code in codes:
            if code in NON_RETRYABLE:
                return code  # the program has said why; other launchers must know, too
        raise  # with torchrun's report
    except SignalException as stopped:  # passed on to the processes; they have ended
        say(f"ended by {stopped.sigval.name}")
        return 128 + stopped.sigval
    del store  # kept until here: its server is torchrun's, too
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
