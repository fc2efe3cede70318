"""run_vit_training.py with a kind of URL of its own, bucket://, which behaves as object stores do.

Files have names, and no folders; one is there, and whole, when it was closed; none grows, none is
renamed. They are kept below BUCKET_ROOT, so that several processes see the same. BUCKET_DOWN names
a file there: while it exists, every call fails.
"""

import io
import os
import sys
from pathlib import Path
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem

from run_vit_training import main

_PART = ".part"


class _Upload(io.FileIO):
    """A file that is under its name when it is closed."""

    def __init__(self, path):
        self._path = path
        super().__init__(f"{path}.{os.getpid()}{_PART}", "w")

    def close(self):
        if not self.closed:
            super().close()
            os.replace(self.name, self._path)


class Unavailable(Exception):
    """What a storage's own package raises: no OSError."""


class Bucket(AbstractFileSystem):
    protocol = "bucket"
    bucket = "shelf"

    def _root(self):
        if os.path.exists(os.environ.get("BUCKET_DOWN", "/nowhere")):
            raise Unavailable("503 try again later")
        return Path(os.environ["BUCKET_ROOT"])

    def _file(self, path):
        path = self._strip_protocol(path)
        if path.partition("/")[0] != self.bucket:
            raise FileNotFoundError(path)
        return self._root() / quote(path, safe="")

    def _names(self):
        found = (unquote(each.name) for each in self._root().iterdir())
        return sorted(name for name in found if not name.endswith(_PART))

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        names = self._names()
        if path in names:
            return {"name": path, "size": self._file(path).stat().st_size, "type": "file"}
        if path == self.bucket or any(name.startswith(f"{path}/") for name in names):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        self.info(path)
        below = (n.removeprefix(f"{path}/") for n in self._names() if n.startswith(f"{path}/"))
        names = sorted({f"{path}/{each.partition('/')[0]}" for each in below})
        return [self.info(name) for name in names] if detail else names

    def _open(self, path, mode="rb", **kwargs):
        if mode == "wb":
            return _Upload(self._file(path))
        if mode != "rb":
            raise NotImplementedError(mode)
        return self._file(path).open("rb")

    def cp_file(self, path1, path2, **kwargs):
        with self.open(path2, "wb") as target:
            target.write(self._file(path1).read_bytes())

    def _rm(self, path):
        self._file(path).unlink(missing_ok=True)

    def mv(self, *args, **kwargs):
        raise NotImplementedError("no object store renames")

    def makedirs(self, path, exist_ok=False):
        self._file(path)


fsspec.register_implementation("bucket", Bucket)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
