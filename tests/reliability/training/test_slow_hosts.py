"""A process that the others wait for is named, with the reason, on real processes."""

import re
import socket

import pytest

from tests.fakes.rehearsal.slice_ import Slice
from tests.support.cli import Result, tiny, train_tiny_gpu
from tests.support.rehearsed import all_ended

SLOW_HOST = "tests.fakes.slow_host"
NAMED = re.compile(
    r"warning: process (\d) on (\S+) is slow: over the last 20 steps, its own time is ([\d.]+) s "
    r"per step, the median of all processes ([\d.]+) s; it (reads|computes) slowly, "
    r"([\d.]+) s per step"
)
STEPS = "--max_steps 80 --log_step_interval 20 --num_epochs 9 --test_epoch_interval 99".split()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "flags"), [("read", []), ("compute", []), ("compute", ["--fsdp", "megatron"])]
)
def test_one_of_two_processes(kind, flags, tmp_path, monkeypatch):
    """It is named while it is slow, not before or after; seconds are what it was slowed by.

    Once in two times at least: a busy machine may slow down the others as much.
    """
    a_step = 0.2
    passes = 1 if kind == "read" else 2 * 2  # of two blocks; in the backward pass, once more
    monkeypatch.setenv("SLOW", f"{kind} 1 {a_step / passes} 21 60")
    done = train_tiny_gpu(tmp_path / "run", *STEPS, *flags, processes=2, program=SLOW_HOST)
    found = NAMED.findall(done.stdout)
    assert 1 <= len(found) <= 2, done.stdout
    for process, host, own, median, reason, seconds in found:
        assert (process, host, reason) == ("1", socket.gethostname(), f"{kind}s")
        assert a_step <= float(seconds) <= float(own)
        assert float(median) < float(own)
    assert "note: process 1 on" in done.stdout.partition("epoch 4 step 80")[0]
    assert "is no longer slow" in done.stdout
    slow = [done.steps[step] for step in (40, 60)]
    assert any(each["slowest_process"] == 1 and each["slowest_ratio"] > 1.5 for each in slow)
    slow = [each for each in slow if each["slowest_process"] == 1]
    assert all((each["slowest_read_s"] >= a_step) == (kind == "read") for each in slow)


@pytest.mark.rehearse
@pytest.mark.parametrize("kind", ["read", "compute"])
def test_one_of_two_hosts(kind, slice_of, tmp_path):
    hosts, flags = slice_of(Slice("v5p-16", (2, 2, 2))), [*STEPS, "--no-scan_blocks"]
    program, slow = ("-m", SLOW_HOST), f"{kind} 1 {0.5 if kind == 'read' else 0.25} 21 60"
    said = all_ended(hosts.start(*tiny(tmp_path), *flags, program=program, SLOW=slow))
    found = NAMED.findall(said[0][0])
    assert 1 <= len(found) <= 2, said[0][0]
    assert {(process, reason) for process, _, _, _, reason, _ in found} == {("1", f"{kind}s")}
    assert said[0][0].count("process 1 on") == len(found) + 1  # and once that it is no longer
    assert Result(tmp_path).steps[60]["slowest_process"] == 1
