"""A port of each process of a run, at an address by which the other hosts reach it."""

import os
import socket

from training.processes import exchange

_SOMEWHERE = "192.0.2.1"
"""An address reserved for documentation (RFC 5737), reached through a host's default network."""
_WAITING = 64
"""The number of connections that may wait to be accepted."""


def open_ports() -> tuple[socket.socket, list[tuple[str, int]]]:
    """Return a socket on which this process listens, and the addresses of all processes by rank;
    all must call this. Raises UsageError in all processes if one of them cannot listen."""
    hosts = exchange.all_gather_object(_address_towards(os.environ.get("MASTER_ADDR", _SOMEWHERE)))
    address = hosts[exchange.rank()]
    elsewhere = [host for host in hosts if not host.startswith("127.")]
    if address.startswith("127.") and elsewhere:  # the host that MASTER_ADDR names
        address = _address_towards(elsewhere[0])
    with exchange.raise_on_all_ranks():
        listening = socket.create_server((address, 0), backlog=_WAITING)
    ports = exchange.all_gather_object([address, listening.getsockname()[1]])
    return listening, [(host, port) for host, port in ports]


def _address_towards(other: str) -> str:
    """Return the address of this host as seen by ``other``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))  # nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
