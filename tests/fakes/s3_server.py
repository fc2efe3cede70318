"""A real S3 server on 127.0.0.1 (moto's), which a test can take away or let refuse things.

What s3fs and botocore do with a network, with access rights and with errors is their own here.
"""

import io
import re
import threading
from collections.abc import Iterable
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "shelf"
_DENIED = "<Code>AccessDenied</Code><Message>Access Denied</Message>"
_KEY = re.compile(rb"<Key>(.*?)</Key>")


class S3Server:
    """Serves one bucket. A rule is what requests match: "PUT /shelf/run/.*"."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._port = 0
        self.forbidden: list[str] = []
        """Rules of what is answered with 403. DELETE is what S3 calls DeleteObjects, too."""
        self.stuck: list[str] = []
        """Rules of what gets no answer, until ``reset``."""
        self.requests: list[str] = []
        self._arrived, self._over = threading.Event(), threading.Event()
        self.start()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="anybody",
            aws_secret_access_key="none",
        )
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def variables(self) -> dict[str, str]:
        """By which a program finds the server: those of every AWS tool."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Serve, from the second time on at the same port."""
        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Refuse all connections; what is in the bucket stays."""
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Empty the bucket, and refuse nothing."""
        self.forbidden, self.stuck, self.requests = [], [], []
        self._over.set()
        self._arrived, self._over = threading.Event(), threading.Event()
        for name in self.names():
            self.client.delete_object(Bucket=BUCKET, Key=name)

    def names(self, prefix: str = "") -> list[str]:
        """The names of the files that begin so, without that, sorted."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return sorted(each["Key"].removeprefix(prefix) for each in found)

    def folders(self, prefix: str) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.names(prefix) if "/" in name})

    def wait_until_stuck(self) -> None:
        assert self._arrived.wait(120)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(f"{method} {path}")
        if _match(self.stuck, f"{method} {path}"):
            over = self._over
            self._arrived.set()
            over.wait()
            raise ConnectionAbortedError
        if _match(self.forbidden, f"{method} {path}"):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [] if method == "HEAD" else [f"<Error>{_DENIED}</Error>".encode()]
        if method == "POST" and environ["QUERY_STRING"].startswith("delete"):
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            keys = [key.decode() for key in _KEY.findall(body)]
            denied = [k for k in keys if _match(self.forbidden, f"DELETE {path.rstrip('/')}/{k}")]
            if denied:  # in a list, with the status of success
                start_response("200 OK", [("Content-Type", "application/xml")])
                errors = (f"<Error><Key>{key}</Key>{_DENIED}</Error>" for key in denied)
                return [f"<DeleteResult>{''.join(errors)}</DeleteResult>".encode()]
            environ["wsgi.input"] = io.BytesIO(body)
        return self._moto(environ, start_response)


def _match(rules: list[str], request: str) -> bool:
    return any(re.fullmatch(rule, request) for rule in rules)
