"""Where the store listens through which the processes of a run find each other."""

import ipaddress
import socket


def listen_at(address: str, port: int) -> int | None:
    """Return the file descriptor of a socket that listens at an address of this host, for
    TCPStore's ``master_listen_fd``: by default it listens on all networks, and whoever reaches it
    can change what it holds.

    Returns None if other hosts may know this host by another address. Raises OSError.
    """
    (family, *_, place), *others = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    is_own_name = address in (socket.gethostname(), socket.getfqdn())
    if others or (is_own_name and ipaddress.ip_address(place[0]).is_loopback):
        return None  # /etc/hosts often has 127.0.1.1 for a host's own name
    return socket.create_server(place[:2], family=family).detach()
