"""What the servers of S3 and of Google's storage have in common, for tests that run on both."""

import re
import threading
from abc import ABC, abstractmethod

BUCKET = "shelf"


class BucketServer(ABC):
    """Serves a bucket on 127.0.0.1, and can be taken away, refuse things or not answer.

    A request is told as "PUT shelf/run/step_2/manifest.json": GET is of a file's content, HEAD of
    what is known about it, or about a bucket, LIST of the names with a prefix; DELETE is of one
    file, also if it is one of many in a request. A rule is a pattern that whole requests match.
    """

    scheme: str

    def __init__(self) -> None:
        self.forbidden: list[str] = []
        """Rules of what is answered with 403."""
        self.stuck: list[str] = []
        """Rules of what gets no answer, until ``reset``."""
        self.requests: list[str] = []
        self._arrived, self._over = threading.Event(), threading.Event()
        self.start()
        self.make_bucket(BUCKET)

    @property
    @abstractmethod
    def variables(self) -> dict[str, str]:
        """By which a program finds the server."""

    @abstractmethod
    def start(self) -> None:
        """Serve, from the second time on at the same port."""

    @abstractmethod
    def stop(self) -> None:
        """Refuse all connections; what is in the bucket stays."""

    def close(self) -> None:
        self._over.set()
        self.stop()

    @abstractmethod
    def make_bucket(self, name: str) -> None: ...

    @abstractmethod
    def write(self, name: str, content: bytes, bucket: str = BUCKET) -> None: ...

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def remove(self, name: str) -> None: ...

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """The names of the files that begin so, without that, sorted."""

    def url(self, name: str) -> str:
        return f"{self.scheme}://{BUCKET}/{name}"

    def folders(self, prefix: str) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.names(prefix) if "/" in name})

    def reset(self) -> None:
        """Empty the bucket, and refuse nothing."""
        self.forbidden, self.stuck, self.requests = [], [], []
        self._over.set()
        self._arrived, self._over = threading.Event(), threading.Event()
        for name in self.names():
            self.remove(name)

    def wait_until_stuck(self) -> None:
        assert self._arrived.wait(120)

    def admit(self, request: str) -> bool:
        """Whether a request is allowed. Raises ConnectionAbortedError, late, for a stuck one."""
        self.requests.append(request)
        if _match(self.stuck, request):
            over = self._over
            self._arrived.set()
            over.wait()
            raise ConnectionAbortedError
        return self.allows(request)

    def allows(self, request: str) -> bool:
        return not _match(self.forbidden, request)


def _match(rules: list[str], request: str) -> bool:
    return any(re.fullmatch(rule, request) for rule in rules)
