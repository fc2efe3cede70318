"""The store through which the processes of a run, or its nodes, find each other.

PyTorch waits for the others silently, in compiled code that handles no signal. Here each one polls
the store, says every 10 seconds who is missing, and gives up after JOIN_TIMEOUT.
"""

import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore

SAY_SECONDS = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_NAMES_SHOWN = 8


class TimedOut(Exception):
    """Raised if some are missing after JOIN_TIMEOUT; the message says who, as a phrase."""


class Wait:
    """Paces a loop that polls a store until all are there."""

    def __init__(
        self, limit_s: float, say: Callable[[str], None], missing: Callable[[], str]
    ) -> None:
        """Start to wait for at most ``limit_s`` seconds; 0: without a limit.

        ``missing`` returns who is missing, as a phrase; it is called only for a message.
        """
        self._limit_s, self._say, self._missing = limit_s, say, missing
        self._start = self._last_said = time.monotonic()
        self._pause_s = _FIRST_PAUSE_S

    def pause(self) -> None:
        """Sleep until the next poll; say now and then who is missing. Raises TimedOut."""
        now = time.monotonic()
        if 0 < self._limit_s <= now - self._start:
            raise TimedOut(self._missing())
        if now - self._last_said >= SAY_SECONDS:
            self._last_said = now
            self._say(f"waiting for {self._missing()}, {now - self._start:.0f} s so far")
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def shorten(names: Sequence[str]) -> str:
    """Return the first names, as a list in words, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def missing_members(store: Store, noun: str, count: int) -> str:
    """Return who has not set its key, "NOUN/NUMBER", e.g. "nodes 1, 3 of 4"."""
    numbers = [str(n) for n in range(count) if not store.check([f"{noun}/{n}"])]
    return f"{noun}{'s' * (len(numbers) > 1)} {shorten(numbers)} of {count}"


def connect(
    address: str, port: int, listening: socket.socket | None, timeout: timedelta
) -> TCPStore:
    """Return the store at an address, without waiting for others; serve it if ``listening`` there,
    a socket that the store then owns. Other stores of this process at the same port share its
    server. Raises OSError and DistError."""
    if listening is None:  # TCPStore would ignore signals while it waits for the server
        socket.create_connection((address, port), timeout=5).close()
    return TCPStore(
        address,
        port,
        is_master=listening is not None,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach() if listening else None,
    )


# -- where a store listens: by default at all addresses, and whoever reaches it can change it ------


def listen(address: str, port: int) -> socket.socket:
    """Return a socket for a store that listens at an address of this host alone, or at all if other
    hosts may know this host by another address. Raises OSError."""
    (family, *_, place), *others = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    # /etc/hosts often has 127.0.1.1 for a host's own name.
    if others or (_is_own_name(address) and ipaddress.ip_address(place[0]).is_loopback):
        return listen_everywhere(port)
    return socket.create_server(place[:2], family=family)


def listen_everywhere(port: int) -> socket.socket:
    """Return a socket that listens at all addresses of this host. Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_own_address(address: str) -> bool:
    """Return True if an address is this host's name, or one at which it can listen."""
    if _is_own_name(address):
        return True
    try:
        (family, *_, place), *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        socket.create_server(place[:2], family=family).close()
    except OSError:
        return False
    return True


def _is_own_name(address: str) -> bool:
    return address in (socket.gethostname(), socket.getfqdn())
