"""Passwords and signatures in URLs: in nothing that a run, its exports and its workers leave."""

import base64
import functools
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.files import DataFolderError, reason_of, subfolders, without_secrets
from tests.support.cli import ROOT, TINY_MODEL, TINY_RUN, run_program
from tools import convert, report
from training.checkpoints.format import read_saved_run
from training.errors import RunFailed, UsageError
from training.weights.files import metadata_of, run_in_metadata

PASSWORDS = "S3cret", "N3wer"
FLAGS = [*TINY_MODEL, *TINY_RUN, "--num_classes", "2", "--batch_size", "4", "--num_workers", "1"]


class Protected(SimpleHTTPRequestHandler):
    """Serves files to bob, who has two passwords."""

    def do_GET(self) -> None:
        known = [base64.b64encode(f"bob:{word}".encode()).decode() for word in PASSWORDS]
        if self.headers.get("Authorization") in [f"Basic {word}" for word in known]:
            super().do_GET()
        else:
            self.send_error(401)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the images are: of two classes, one of them unreadable."""
    folder = tmp_path_factory.mktemp("images")
    for split in ("train", "val"):
        for number in range(8):
            path = folder / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((16, 16, 3), 30 * number, np.uint8)).save(path)
    (folder / "train" / "class0" / "0.png").write_bytes(b"no image")
    serve = functools.partial(Protected, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def leaks(folder: Path, said: str) -> list[str]:
    """The files that contain a password, as it is or encoded, or whose path does; what was said."""
    words = [word.encode() for word in PASSWORDS]
    words += [base64.b64encode(b"bob:" + word) for word in words]
    texts = {"said": said.encode(), "paths": str([*folder.rglob("*")]).encode()}
    texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [name for name, text in texts.items() if any(word in text for word in words)]


def test_a_password_is_in_nothing_that_is_left(address, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, variables = tmp_path / "run", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = ""

    def train(password: str, *more: str) -> str:
        nonlocal said
        flags = tmp_path / "flags.args"  # not in the command line, which everybody can see
        flags.write_text(f"--data_dir http://bob:{password}@{address}/\n")
        index = ["--index_dir", str(tmp_path / "index")]
        words = ["run_vit_training.py", "--backend", "cuda", f"@{flags}", *FLAGS]
        done = run_program(*words, "--ckpt_dir", str(run), *index, *more, variables=variables)
        flags.unlink()
        said += done.stdout + done.stderr
        assert done.returncode == 0, said
        return done.stdout + done.stderr

    assert "class0/0.png cannot be read" in train(PASSWORDS[0], "--max_steps", "2")
    # Another password is no other folder.
    assert "training completed: step 4" in train(PASSWORDS[1], "--max_steps", "4")
    assert (
        json.loads((run / "run.json").read_text())["arguments"]["data_dir"] == f"http://{address}/"
    )
    assert read_saved_run(run / "step_4").arguments["data_dir"] == f"http://{address}/"

    outputs = ["file.safetensors", "dcp"]
    for name in outputs:
        more = [] if "." in name else ["--to", name]
        assert convert.main([str(run), str(tmp_path / name), *more]) == 0
    assert report.main([str(run), "--output", str(tmp_path / "report.html")]) == 0
    said += "".join(capfd.readouterr())
    assert leaks(tmp_path, said) == []

    # What may be published names no file or folder of this machine either.
    exported = b"".join(
        path.read_bytes()
        for name in outputs
        for path in [tmp_path / name, *(tmp_path / name).glob("*")]
        if path.is_file()
    )
    for local in (address, str(tmp_path), str(ROOT), str(run)):
        assert local.encode() not in exported
    arguments = run_in_metadata(run, metadata_of(tmp_path / "file.safetensors")).arguments
    assert arguments["embed_dim"] == 32  # what describes the model is there
    assert not {"data_dir", "ckpt_dir", "index_dir", "resume", "labels"} & arguments.keys()


def test_an_error_does_not_name_the_password(address, monkeypatch):
    monkeypatch.setattr("data.files.RETRY_WAITS_S", ())
    for url in (f"http://bob:Wr0ng@{address}/train", f"http://{address}/train?sig=Wr0ng"):
        with pytest.raises(DataFolderError) as raised:
            subfolders(url)
        assert str(raised.value).startswith(f"http://{address}/train cannot be listed: 401")
        assert "Wr0ng" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://bob:pw@host:80/a@b.png", "http://host:80/a@b.png"),
        ("https://bob@host", "https://host"),
        ("'s3://key:p/w?#@bucket/x y'", "'s3://bucket/x y'"),
        ("https://h/a?X-Amz-Date=1&X-Amz-Signature=b/c%3D: 403", "https://h/a: 403"),
        ("url=URL('http://h/a?sig=pw'),", "url=URL('http://h/a'),"),
        ("simplecache::http://b:pw@h/x?token=pw and ftp://u:pw@h", "simplecache::http://h/x and ftp://h"),
        ("Illegal header value b'Bearer pw\\n'", "Illegal header value b'Bearer '"),
        ("gs://bucket/x@y/shard-??.tar", "gs://bucket/x@y/shard-??.tar"),
        ("hf://datasets/me/it@main/x", "hf://datasets/me/it@main/x"),
        ("http://[::1]:80/x@y", "http://[::1]:80/x@y"),
        ("/disk/a@b:c?d=e", "/disk/a@b:c?d=e"),
    ],
)  # fmt: skip
def test_texts_without_secrets(text, clean):
    assert without_secrets(text) == clean
    for error in (UsageError(text), RunFailed(text, 1)):
        assert str(error) == clean
    assert reason_of(ValueError(text)) == reason_of(ValueError(clean))
