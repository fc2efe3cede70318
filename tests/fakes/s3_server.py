"""A real S3 server on 127.0.0.1 (moto's), which a test can take away or let refuse things.

What s3fs and botocore do with a network, with access rights and with errors is their own here.
"""

import io
import re
import threading
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.fakes.bucket_server import BUCKET, BucketServer

_DENIED = "<Code>AccessDenied</Code><Message>Access Denied</Message>"
_KEY = re.compile(rb"<Key>(.*?)</Key>")


class S3Server(BucketServer):
    scheme = "s3"

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._port = 0
        super().__init__()

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def variables(self) -> dict[str, str]:
        """Those of every AWS tool."""
        return {
            "AWS_ENDPOINT_URL": self._url,
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._client = boto3.client(
            "s3",
            endpoint_url=self._url,
            region_name="us-east-1",
            aws_access_key_id="anybody",
            aws_secret_access_key="none",
        )

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def make_bucket(self, name: str) -> None:
        self._client.create_bucket(Bucket=name)

    def write(self, name: str, content: bytes, bucket: str = BUCKET) -> None:
        self._client.put_object(Bucket=bucket, Key=name, Body=content)

    def read(self, name: str) -> bytes:
        return self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read()

    def remove(self, name: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=name)

    def names(self, prefix: str = "") -> list[str]:
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return sorted(each["Key"].removeprefix(prefix) for each in found)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"].lstrip("/")
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        if method == "POST" and "delete" in query:
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            keys = [key.decode() for key in _KEY.findall(body)]
            denied = [key for key in keys if not self.admit(f"DELETE {path.rstrip('/')}/{key}")]
            if denied:  # in a list, with the status of success
                start_response("200 OK", [("Content-Type", "application/xml")])
                errors = (f"<Error><Key>{key}</Key>{_DENIED}</Error>" for key in denied)
                return [f"<DeleteResult>{''.join(errors)}</DeleteResult>".encode()]
            environ["wsgi.input"] = io.BytesIO(body)
            return self._moto(environ, start_response)
        if method == "GET" and "/" not in path.rstrip("/"):
            request = f"LIST {path.rstrip('/')}/{query.get('prefix', [''])[0]}"
        else:
            request = f"{'PUT' if method == 'POST' else method} {path}"
        if not self.admit(request):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [] if method == "HEAD" else [f"<Error>{_DENIED}</Error>".encode()]
        return self._moto(environ, start_response)
