"""Wait, before torchrun starts, until the nodes of a run are there, and say which are missing.

torchrun waits for the nodes too, but prints nothing meanwhile, and its join timeout names no node.
The nodes register in a TCPStore at MASTER_ADDR:MASTER_PORT. Its server is kept: torchrun's
rendezvous, in the same process, shares it (``multi_tenant``). So the port is never free for another
program, and a node that comes later finds the same run there.
"""

import argparse
import json
import os
import socket
import sys
import time
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from launch import Mistake, write_line

SAY_SECONDS = 10.0
STORE_TIMEOUT = timedelta(seconds=10)
NAMES_SHOWN = 8
MISSING = "missing"
"""The key under which the serving node says which nodes are missing; empty once they are there."""


class TimedOut(Exception):
    """Raised if nodes are missing after JOIN_TIMEOUT: one line, exit code 1."""


def say(text: str) -> None:
    write_line(f"torchrun.sh: {text}", sys.stderr)


def wait_for_nodes(args: argparse.Namespace) -> tuple[TCPStore, bool]:
    """Wait for all nodes (elastic runs: for the least that may train); say which are missing.

    Returns the run's store, and whether this process serves it. Raises Mistake and TimedOut.
    """
    serves = is_server(args)
    server = "the node that has" if args.rdzv_id else "node 0 at"
    who = f"{socket.gethostname()} (process {os.getpid()})"
    store = None
    begin = last_said = time.monotonic()
    while True:
        try:
            if store is None:
                if not serves:  # TCPStore would wait in compiled code, where no signal is handled
                    socket.create_connection((args.address, args.port), timeout=5).close()
                store = TCPStore(
                    args.address,
                    args.port,
                    is_master=serves,
                    timeout=STORE_TIMEOUT,
                    wait_for_workers=False,
                    multi_tenant=True,
                )
                node = register(store, args, who)
            if serves:
                store.set(MISSING, missing_nodes(store, args))
            elif (other := store.get(f"node/{node}").decode()) != who:
                raise Mistake(f"NODE_RANK={node} is this node's and that of {other}")
            missing = store.get(MISSING).decode()
        except (OSError, DistError) as error:
            store = None
            reason = getattr(error, "strerror", "") or "no answer"
            missing = f"{server} {args.address}:{args.port} ({reason})"
        if store is not None and not missing:
            return store, serves
        seconds = time.monotonic() - begin
        if args.limit and seconds >= args.limit:
            raise TimedOut(
                f"{missing} did not come within {args.limit} s (JOIN_TIMEOUT): see why, and start "
                "all nodes again"
            )
        if time.monotonic() - last_said >= SAY_SECONDS:
            last_said = time.monotonic()
            say(f"waiting for {missing}, {seconds:.0f} s so far")
        time.sleep(0.5)


def is_server(args: argparse.Namespace) -> bool:
    """Return whether this node is to serve the store: node 0, or the first at MASTER_ADDR.

    Raises Mistake.
    """
    if not args.rdzv_id and args.rank > 0:
        return False
    is_named = args.address in (socket.gethostname(), socket.getfqdn())
    address = "" if is_named or not args.rdzv_id else args.address
    try:
        family, *_, place = socket.getaddrinfo(
            address or None, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        socket.create_server(place[:2], family=family).close()
    except OSError as error:
        if args.rdzv_id:  # the address is another node's, or another node of this machine serves
            return False
        raise Mistake(
            f"port {args.port} cannot be served on this machine: {error.strerror}: set "
            "MASTER_PORT, the same on all nodes"
        ) from None
    return True


def register(store: TCPStore, args: argparse.Namespace, who: str) -> int:
    """Enter this node in the store, and a name for the job; return the node's number.

    Raises Mistake if the nodes there belong to another run.
    """
    run = {"NNODES": args.nodes, "MIN of NNODES=MIN:MAX": args.least, "RDZV_ID": args.rdzv_id}
    first = json.loads(store.compare_set("run", "", json.dumps(run)))
    for variable, value in run.items():
        if first[variable] != value:
            raise Mistake(
                f"{variable} is '{value}' here, but '{first[variable]}' on the other nodes at "
                f"{args.address}:{args.port}"
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
    present = [node for node in range(nodes) if store.check([f"node/{node}"])]
    names = [str(node) for node in range(nodes) if node not in present]
    if args.rdzv_id:
        names = sorted(store.get(f"node/{node}").decode().partition(" ")[0] for node in present)
    shown, more = ", ".join(names[:NAMES_SHOWN]), len(names) - NAMES_SHOWN
    shown += f" and {more} more" if more > 0 else ""
    if args.rdzv_id:
        return f"{nodes - len(present)} of {nodes} nodes (here: {shown})"
    return f"node{'s' * (len(names) > 1)} {shown} of {nodes}"
