"""Standard streams that nobody reads: closed ones, pipes whose reader left, a full disk."""

import contextlib
import os
import subprocess
import sys

import pytest

from tests.support.cli import ROOT, Result, command_of, environment, need_xla, tiny
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
