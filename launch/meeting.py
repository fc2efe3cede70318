"""Lets the nodes of a run meet: one has the port, the others come, and it tells them to start.

What is sent are lines of JSON, over plain sockets.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import select
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from launch.watching import Watch, say

GREETING_SECONDS = 10.0
"""The seconds that whoever connects has to say who it is."""
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
LONGEST_LINE = 4096
NAMES_SHOWN = 8


class Refused(Exception):
    """Raised when this node cannot be one of the run's, whoever comes: one line, exit code 2."""


# -- what is said over a connection ---------------------------------------------------


class Line:
    """A connection over which each side says objects, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in KEEP_ALIVE.items():  # a machine that crashed says no goodbye
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        self.began = time.monotonic()
        self._rest = b""
        self.name = ""
        """The node at its other end, once that has said so."""

    def send(self, **message: Any) -> None:
        """Send an object; a peer that is gone is noticed when it is read from."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the objects that have come; None at the end, and for what no node would send."""
        try:
            data = self.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *complete, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > LONGEST_LINE:
            return None
        try:
            messages = [json.loads(line) for line in complete]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        self.socket.close()


def plain(text: object) -> str:
    """Make harmless what came over the network and goes to a terminal, or into a variable."""
    return re.sub(r"[^ -~]", "?", str(text))[:200]


# -- the node that the others come to -------------------------------------------------


class Host:
    """Waits until all nodes are connected, then tells them to start, and frees the port."""

    def __init__(self, listener: socket.socket, args: argparse.Namespace, watch: Watch) -> None:
        self._listener, self._args, self._watch = listener, args, watch
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._lines: set[Line] = set()
        self._told = ""

    def wait(self) -> str:
        """Wait for all nodes; return the job's name, which all of them got."""
        while self._missing_count():
            self._tell()
            for key, _ in self._selector.select(timeout=1):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.data)
            for line in [line for line in self._lines if not line.name]:
                if time.monotonic() - line.began > GREETING_SECONDS:
                    self._drop(line)
        job = new_job()
        self._listener.close()
        for line in self._lines:
            line.socket.settimeout(5)
            line.send(go=job)
        for line in self._lines:
            # They close first: the side that does keeps the port for a minute.
            while line.receive():
                pass
            line.close()
        return job

    def _here(self) -> set[str]:
        return {self._args.name} | {line.name for line in self._lines if line.name}

    def _missing_count(self) -> int:
        return self._args.nodes - len(self._here())

    def _tell(self) -> None:
        if self._args.rdzv_id:
            some = few(sorted(name.partition("/")[0] for name in self._here()))
            missing = f"{self._missing_count()} of {self._args.nodes} nodes (here: {some})"
        else:
            ranks = [str(rank) for rank in range(self._args.nodes) if str(rank) not in self._here()]
            missing = f"node{'s' * (len(ranks) > 1)} {few(ranks)} of {self._args.nodes}"
        self._watch.waiting_for = missing
        if missing != self._told:
            self._told = missing
            for line in self._lines:
                line.send(missing=missing)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            line = Line(connection)
            self._lines.add(line)
            self._selector.register(connection, selectors.EVENT_READ, line)

    def _hear(self, line: Line) -> None:
        messages = line.receive()
        if messages is None:
            self._drop(line)
            return
        for message in messages:
            if line.name:
                continue
            if refusal := self._refusal(message):
                line.send(refused=refusal)
                say(f"{plain(message.get('who'))} was refused: {refusal}")
                self._drop(line)
                return
            line.name = plain(message.get("name"))
            self._told = ""  # tell this one, too

    def _refusal(self, message: dict[str, Any]) -> str:
        """Return why the sender of this message cannot be one of the nodes; else ""."""
        mine = greeting(self._args)
        for key in ("nodes", "rdzv_id"):
            if message.get(key) != mine[key]:
                name = {"nodes": "NNODES", "rdzv_id": "RDZV_ID"}[key]
                return f"{name} is '{plain(message.get(key))}' there and '{mine[key]}' here"
        if plain(message.get("name")) in self._here():
            return (
                f"NODE_RANK={plain(message.get('name'))} is here already; another run on this "
                "machine needs another MASTER_PORT"
            )
        ranks = map(str, range(self._args.nodes))
        if not self._args.rdzv_id and plain(message.get("name")) not in ranks:
            return f"NODE_RANK={plain(message.get('name'))} is not 0 to {self._args.nodes - 1}"
        return ""

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line.socket)
        self._lines.discard(line)
        line.close()


def few(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def new_job() -> str:
    return f"{plain(socket.gethostname())}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


# -- a node that comes to it ----------------------------------------------------------


def join(args: argparse.Namespace, watch: Watch) -> str | None:
    """Go to the node that has the port; return the job's name. None if torchrun is at work there:
    this node is to join it."""
    host = "the node that has" if args.rdzv_id else "node 0 at"
    watch.waiting_for = f"{host} {args.address}:{args.port}"
    while True:
        why = ""
        try:
            connection = socket.create_connection((args.address, args.port), timeout=5)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            connection.settimeout(None)
            line = Line(connection)
            try:
                job = converse(line, args, watch)
            finally:
                line.close()
            if job:
                return job
            if args.rdzv_id and not line.name:
                return None
            why = "it left" if line.name else "another program answers there"
        watch.waiting_for = f"{host} {args.address}:{args.port} ({why})"
        time.sleep(1)


def converse(line: Line, args: argparse.Namespace, watch: Watch) -> str | None:
    """Talk to the host until it says to start; return the job's name, None if it leaves.

    Raises Refused.
    """
    line.send(**greeting(args))
    while True:
        if not line.name and not select.select([line.socket], [], [], GREETING_SECONDS)[0]:
            return None  # no host of a meeting keeps silent
        messages = line.receive()
        if messages is None:
            return None
        for message in messages:
            line.name = args.address
            if "refused" in message:
                raise Refused(plain(message["refused"]))
            if "missing" in message:
                watch.waiting_for = plain(message["missing"])
            if message.get("go"):
                return plain(message["go"])


def greeting(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": args.name,
        "nodes": args.nodes,
        "rdzv_id": args.rdzv_id,
        "who": f"{socket.gethostname()} (process {os.getpid()})",
    }


# -- one or the other -----------------------------------------------------------------


def listen(args: argparse.Namespace) -> socket.socket | None:
    """Return a listener on the port that the others come to; None if another node has it.

    Raises Refused.
    """
    if not args.rdzv_id and args.rank > 0:
        return None
    own_names = {socket.gethostname(), socket.getfqdn()}
    address = "" if not args.rdzv_id or args.address in own_names else args.address
    family = socket.AF_INET
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


def meet(args: argparse.Namespace, watch: Watch) -> tuple[str, bool]:
    """Meet the other nodes; return the job's name, and whether this node had the port.

    Raises Refused.
    """
    if listener := listen(args):
        return Host(listener, args, watch).wait(), True
    given = join(args, watch)
    if given is None:
        say(f"torchrun is at work at {args.address}:{args.port}: joining it")
    return given or args.rdzv_id, False
