"""Standard streams that nobody reads: closed ones, pipes whose reader left, a full disk; and those
in another encoding than that of names."""

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest
from PIL import Image

from launch import write_line
from tests.support.cli import (
    DIGITS,
    ROOT,
    Result,
    command_of,
    environment,
    need_xla,
    run_program,
    tiny,
)
from tests.support.marks import long

CUDA = "--backend cuda --num_workers 1".split()


@contextlib.contextmanager
def unread(kind):
    """A file to write to that takes nothing."""
    if kind == "full":
        with open("/dev/full", "w") as full:
            yield full
    else:
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as pipe:
            yield pipe


def run_into(words, variables, stdout, stderr):
    """Run a program with such files in place of standard streams; "": one that is read."""
    with contextlib.ExitStack() as files:
        streams = [
            files.enter_context(unread(kind)) if kind else subprocess.PIPE
            for kind in (stdout, stderr)
        ]
        how = {"cwd": ROOT, "env": variables, "text": True, "timeout": 300, "check": False}
        return subprocess.run(words, stdout=streams[0], stderr=streams[1], **how)


def assert_trained(ckpt_dir):
    assert list(Result(ckpt_dir).steps) == list(range(1, 7))
    assert (ckpt_dir / "step_6" / "manifest.json").exists()
    assert (ckpt_dir / "curves.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("backend", "stdout", "stderr"),
    [
        ("cuda", "pipe", ""),
        ("cuda", "full", ""),
        long("xla", "pipe", "pipe"),
    ],
)
def test_training_goes_on(backend, stdout, stderr, tmp_path):
    """It has all that it trains for, and must not be restarted for what nobody reads."""
    if backend == "xla":
        need_xla()
    words, variables = command_of(
        "run_vit_training.py", *tiny(tmp_path), *CUDA, "--backend", backend
    )
    done = run_into(words, variables | {"RENDER_FIGURES": "1"}, stdout, stderr)
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path)
    if not stderr:
        reason = {"pipe": "Broken pipe", "full": "No space left on device"}[stdout]
        assert done.stderr.count(f"warning: stdout cannot be written ({reason})") == 1


@pytest.mark.long
def test_training_with_closed_streams(tmp_path):
    """No file of the run gets their numbers, or gloo would print its greeting into it."""
    words, variables = command_of("run_vit_training.py", *tiny(tmp_path), *CUDA, warm=False)
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *words]
    assert subprocess.run(closed, cwd=ROOT, env=variables, check=False).returncode == 0
    assert_trained(tmp_path)


@pytest.mark.parametrize(
    ("command", "stdout", "stderr", "code", "told"),
    [
        ("run_vit_training.py --help", "full", "", 2, "error: stdout: No space left on device\n"),
        ("-m tools.goodput --help", "pipe", "", 141, ""),
    ],
)
def test_what_is_printed_alone_ends_quietly(command, stdout, stderr, code, told):
    done = run_into([sys.executable, *command.split()], environment(), stdout, stderr)
    assert (done.returncode, done.stderr.removeprefix("run_vit_training.py: ")) == (code, told)


@pytest.mark.parametrize("stream", [">&-", "2>&-"])
def test_printing_into_a_closed_stream(stream):
    words = ["bash", "-c", f'exec "$@" {stream}', "bash", sys.executable, "run_vit_training.py"]
    done = subprocess.run([*words, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


ODD = "caf\xe9 \u6587 \udcff"
"""A name of letters that Latin-1 has, and has not, and of a byte that is no UTF-8."""


def test_training_with_names_that_stdout_cannot_encode(tmp_path):
    (tmp_path / ODD).symlink_to(DIGITS)
    flags = [*tiny(tmp_path / "run"), *CUDA, "--max_steps", "1", "--data_dir", str(tmp_path / ODD)]
    variables = {"PYTHONIOENCODING": "latin-1"}
    words, usual = command_of("run_vit_training.py", *flags, warm=False)
    done = subprocess.run(
        words, cwd=ROOT, env=usual | variables, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"data: " + os.fsencode(tmp_path) + b"/caf\xe9 \\u6587 \\udcff: " in done.stdout


def test_names_are_the_same_in_every_locale(tmp_path):
    """They are UTF-8, in shards too; stdout is in the locale's encoding."""
    for split in ("train", "val"):
        (tmp_path / "images" / split / ODD).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / split / ODD / "0.png")
    command = ["-m", "data.pack", str(tmp_path / "images"), str(tmp_path / ODD), "--workers", "1"]
    done = run_program(*command, warm=False, variables={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"2 shards: {tmp_path}/caf\\xe9 \\u6587 \\udcff\n"
    assert json.loads((tmp_path / ODD / "classes.json").read_bytes()) == [ODD]


def test_what_workers_print_is_shown_in_every_encoding():
    """Else the thread that reads it would end, and the worker block as soon as its pipe is full."""
    stream = io.TextIOWrapper(shown := io.BytesIO(), "latin-1")
    write_line(ODD, stream)
    assert shown.getvalue() == b"caf\xe9 \\u6587 \\udcff\n"
