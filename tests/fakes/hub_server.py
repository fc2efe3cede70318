"""The Hugging Face Hub on 127.0.0.1, as far as ``huggingface_hub`` asks it for models, and
``datasets`` for data sets.

Large files are behind a redirect, as there. What a test may change: which repositories there are,
what a revision is, who may read, and where a connection breaks.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote

TOKEN = "hf_secretsecretsecret"
"""The token of the one user."""


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by name, by commit."""
    revisions: dict[str, str] = field(default_factory=dict)
    """Commits by the names of branches and tags."""
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add files to a branch; return the commit."""
        before = self.commits.get(self.revisions.get(branch, ""), {})
        parts = [str(len(self.commits)).encode(), *(n.encode() + f for n, f in files.items())]
        commit = hashlib.sha1(b"".join(parts)).hexdigest()
        self.commits[commit] = before | files
        self.revisions[branch] = commit
        return commit


class HubServer:
    """Use it as a context manager; ``variables`` are the environment of who is to find it."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        """By name; the names of data sets begin with datasets/."""
        self.requests: list[str] = []
        """Method and path of each request."""
        self.breaks: list[int] = []
        """After so many bytes the connection of the next download of a large file breaks."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                server._answer(self)

            do_HEAD = do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def variables(self, cache: Any, token: str = "") -> dict[str, str]:
        named = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_TOKEN": token}
        return {name: value for name, value in named.items() if value}

    def downloads(self, file: str) -> int:
        """How often the content of a large file was asked for."""
        large = self._sha256_of_name(file)
        return sum(request in {f"GET /large/{sha}" for sha in large} for request in self.requests)

    def _sha256_of_name(self, file: str) -> set[str]:
        contents = (
            files[file]
            for repository in self.repositories.values()
            for files in repository.commits.values()
            if file in files
        )
        return {hashlib.sha256(content).hexdigest() for content in contents}

    # -- answers -----------------------------------------------------------------------------------

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append(f"{request.command} {path}")
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length) if length else b""
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token != TOKEN:
            return self._refuse(request, 401, "", "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            return self._json(request, {"name": "us", "type": "user"}, 200 if token else 401)
        if path == "/api/repos/create":
            about = json.loads(body)
            name = f"{about.get('organization') or 'us'}/{about['name']}"
            status = 409 if name in self.repositories else 200
            if status == 200:
                self.repositories[name] = Repository(private=about.get("visibility") == "private")
                self.repositories[name].commit({})
            return self._json(request, {"url": f"{self.url}/{name}"}, status)
        if match := re.fullmatch(r"/large/(\w+)", path):
            return self._large(request, match[1])
        api, file = _OF_API.fullmatch(path), _OF_FILE.fullmatch(path)
        match = file or api
        name = f"{(match['kind'] or '').replace('models/', '')}{match['name']}" if match else ""
        repository = self.repositories.get(name)
        if match is None or repository is None or (repository.private and not token):
            # As the Hub, which does not tell who may not know.
            return self._refuse(
                request, 404 if token else 401, "RepoNotFound", "Repository not found"
            )
        action = api["action"] if api else None
        if repository.gated and (file or action == "auth-check"):
            return self._refuse(request, 403, "GatedRepo", "Access to model is restricted")
        if action == "auth-check":
            return self._json(request, {})
        revision = unquote(match["revision"] or "main")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(request, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if file:
            return self._file(request, commit, files, unquote(file["path"]))
        if action == "tree":
            folder = f"{unquote(match['path'])}/" if match["path"] else ""
            below = [path for path in _entries(files) if path.startswith(folder)]
            if folder and not below:
                return self._refuse(request, 404, "EntryNotFound", "Entry not found")
            if "recursive=true" not in request.path.lower():
                below = [path for path in below if "/" not in path.removeprefix(folder)]
            return self._json(request, [_entry(files, path) for path in below])
        if action == "paths-info":
            known, paths = _entries(files), parse_qs(body.decode())["paths"]
            return self._json(request, [_entry(files, path) for path in paths if path in known])
        if action == "preupload":
            named = [item["path"] for item in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            modes = [{"path": name, **mode} for name in named]
            return self._json(request, {"files": modes})
        if action == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            added = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            commit = repository.commit(added)
            url = f"{self.url}/{name}/commit/{commit}"
            return self._json(request, {"commitUrl": url, "commitOid": commit})
        about = {
            "id": match["name"],
            "sha": commit,
            "private": repository.private,
            "siblings": [{"rfilename": name} for name in files],
        }
        self._json(request, about)

    def _file(
        self, request: BaseHTTPRequestHandler, commit: str, files: dict[str, bytes], name: str
    ) -> None:
        if name not in files:
            return self._refuse(request, 404, "EntryNotFound", "Entry not found")
        content = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'}
        if name.endswith((".safetensors", ".bin", ".parquet")):
            sha = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(content))}
            elsewhere = self.url.replace("127.0.0.1", "localhost")
            return self._send(request, 302, b"", headers | {"Location": f"{elsewhere}/large/{sha}"})
        self._send(request, 200, content, headers)

    def _large(self, request: BaseHTTPRequestHandler, sha: str) -> None:
        contents = (
            content
            for repository in self.repositories.values()
            for files in repository.commits.values()
            for content in files.values()
        )
        content = next(c for c in contents if hashlib.sha256(c).hexdigest() == sha)
        part = re.match(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        start, end = 0, len(content)
        headers = {"Accept-Ranges": "bytes"}
        if part:
            start, end = int(part[1]), min(int(part[2] or end) + 1, end)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        status, content = (206 if part else 200), content[start:end]
        if request.command == "GET" and self.breaks:
            self._head(request, status, len(content), headers)
            request.wfile.write(content[: self.breaks.pop(0)])
            request.close_connection = True
            return
        self._send(request, status, content, headers)

    def _refuse(
        self, request: BaseHTTPRequestHandler, status: int, code: str, message: str
    ) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(request, status, json.dumps({"error": message}).encode(), headers)

    def _json(self, request: BaseHTTPRequestHandler, content: Any, status: int = 200) -> None:
        self._send(request, status, json.dumps(content).encode(), {})

    def _head(
        self, request: BaseHTTPRequestHandler, status: int, length: int, headers: dict[str, str]
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            request.send_header(name, value)
        request.end_headers()

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]
    ) -> None:
        self._head(request, status, len(content), headers)
        if request.command != "HEAD":
            request.wfile.write(content)


_OF_API = re.compile(
    r"/api/(?P<kind>models/|datasets/)(?P<name>[^/]+/[^/]+)"
    r"(/(?P<action>[\w-]+)(/(?P<revision>[^/]+)(/(?P<path>.+))?)?)?"
)
_OF_FILE = re.compile(
    r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)"
)


def _entries(files: dict[str, bytes]) -> list[str]:
    """The paths of all files and folders."""
    folders = {str(folder) for path in files for folder in PurePosixPath(path).parents}
    return sorted(folders - {"."}) + list(files)


def _entry(files: dict[str, bytes], path: str) -> dict[str, Any]:
    if path not in files:
        return {"type": "directory", "path": path, "size": 0, "oid": _oid(path.encode())}
    return {"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])}


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
