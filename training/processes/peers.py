"""Connections between processes that know a secret key.

Anybody on the network may connect to the port of a process. Whoever does not prove in time that it
knows the key is disconnected; only a few connections wait for that at once, without a thread each.
So strangers use up no file descriptors or threads, however many connect. Both ends send a random
word, and answer with a hash of both words and the key, which itself is never sent.
"""

import asyncio
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import NoReturn

_PROVES_WITHIN_S = 10.0
_ANSWERS_WITHIN_S = 60.0
_STRANGERS = 16
"""The number of connections that may not have proved anything yet; the oldest one must leave."""
_WORD = 32
"""The bytes of a random word, and of a proof."""


def serve(listening: socket.socket, key: bytes, receive: Callable[[Connection], None]) -> None:
    """Accept connections in a thread, and call ``receive`` for each whose other end knows the key,
    in a thread of its own."""

    def run() -> None:
        asyncio.run(_accept(listening, key, receive))

    threading.Thread(target=run, name="connections", daemon=True).start()


async def _accept(
    listening: socket.socket, key: bytes, receive: Callable[[Connection], None]
) -> NoReturn:
    listening.setblocking(False)
    strangers: list[asyncio.Task[None]] = []
    while True:
        try:
            other, _ = await asyncio.get_running_loop().sock_accept(listening)
        except OSError:  # e.g. too many open files; the other end reports it
            await asyncio.sleep(1)
            continue
        strangers = [each for each in strangers if not each.done()]
        if len(strangers) == _STRANGERS:
            strangers.pop(0).cancel()
        strangers.append(asyncio.create_task(_identify(other, key, receive)))


async def _identify(
    other: socket.socket, key: bytes, receive: Callable[[Connection], None]
) -> None:
    """Hand a connection over once its other end has proved that it knows the key, or close it."""
    loop = asyncio.get_running_loop()
    with other:  # closes nothing that is handed over
        try:
            async with asyncio.timeout(_PROVES_WITHIN_S):
                word, said = secrets.token_bytes(_WORD), b""
                await loop.sock_sendall(other, word)
                while len(said) < 2 * _WORD:
                    if not (more := await loop.sock_recv(other, 2 * _WORD - len(said))):
                        return
                    said += more
                other_word, proof = said[:_WORD], said[_WORD:]
                if not hmac.compare_digest(proof, _proof(key, b"client", word, other_word)):
                    return
                await loop.sock_sendall(other, _proof(key, b"server", word, other_word))
        except OSError:  # TimeoutError is one, too
            return
        other.setblocking(True)
        threading.Thread(target=receive, args=[Connection(other.detach())], daemon=True).start()


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Return a connection to a process that serves. Raises OSError, or AuthenticationError if it
    does not know the key."""
    with (
        socket.create_connection(address, _ANSWERS_WITHIN_S) as other,
        other.makefile("rb") as answers,
    ):
        word, own_word = answers.read(_WORD), secrets.token_bytes(_WORD)
        other.sendall(own_word + _proof(key, b"client", word, own_word))
        if not hmac.compare_digest(answers.read(_WORD), _proof(key, b"server", word, own_word)):
            raise AuthenticationError("the other process has another key")
        other.setblocking(True)
        return Connection(other.detach())


def _proof(key: bytes, role: bytes, server_word: bytes, client_word: bytes) -> bytes:
    return hmac.digest(key, role + server_word + client_word, "sha256")
