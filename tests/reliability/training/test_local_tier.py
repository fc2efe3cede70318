"""Checkpoints on the hosts' own disks: lost hosts, damaged copies, disks that fail.

The reference is a run that was never interrupted, which saves to --ckpt_dir alone.
"""

import contextlib
import filecmp
import shutil
import socket
import struct
import threading
from multiprocessing import AuthenticationError, Pipe

import pytest
import torch
import xxhash

from tests.fakes.rehearsal.slice_ import Slice
from tests.reliability.faults.program import other_records_differ
from tests.support.checkpoints import tensors_of
from tests.support.cli import Result, run_program, tiny, train_tiny_gpu, train_tiny_megatron
from tests.support.rehearsed import all_ended
from training.checkpoints.format import training_tensors, write_manifest
from training.checkpoints.local_tier import LocalTier, _peer_of, _receive_files
from training.checkpoints.state import write_state
from training.processes import peers
from training.schedule import Position

HOSTS = "tests.fakes.hosts_with_disks"
STEPS = "--max_steps 12 --test_epoch_interval 99 --ckpt_step_interval 5".split()
EVERY_TWO = ["--local_ckpt_step_interval", "2"]
KILLED = "1 10"  # steps 6 and 8 are on the disks, 5 in --ckpt_dir
NAMES = ("loss", "grad_norm", "lr")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train_tiny_gpu(tmp_path_factory.mktemp("whole") / "run", *STEPS, processes=4)


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Start four processes, each with a disk of its own."""

    words = [*tiny(tmp_path / "run"), "--backend", "cuda", *STEPS, *EVERY_TWO]

    def start(*flags, killed="", processes=4):
        monkeypatch.setenv("KILLED", killed or "-1 0")
        done = run_program("-m", HOSTS, *words, *flags, processes=processes)
        assert (done.returncode == 0) == (not killed), done.stdout + done.stderr
        return Result(tmp_path / "run", done.stdout, done.stderr)

    start.words = words
    start.disk = lambda host: tmp_path / "disks" / f"host_{host}"
    return start


def part(hosts, host, of, step):
    return hosts.disk(host) / f"part_{of}" / f"step_{step}"


def flip(folder, files="*.distcp"):
    """Change one bit of the tensors of a part, or of one process's in a checkpoint."""
    (file,) = folder.glob(files)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def assert_resumed(done, uninterrupted, step, where="part_0"):
    assert f"{where}/step_{step} at step {step}" in done.stdout, done.stdout
    for name in NAMES:
        assert done.column(name) == uninterrupted.column(name)
    # All but what is of the process that wrote it: its arguments, and the state of a generator that
    # is seeded for each image and each pass.
    found, expected = (tensors_of(run.ckpt_dir / "step_12") for run in (done, uninterrupted))
    assert found.keys() == expected.keys()
    of_the_writer = {"training.arguments", "training.rng"}
    unlike = {name for name in found if not torch.equal(found[name], expected[name])}
    assert unlike <= of_the_writer


@pytest.mark.long
def test_one_host_lost(hosts, uninterrupted, tmp_path):
    first = hosts(killed=KILLED)
    assert "a copy of each part on a peer (for process 0: process 1 on " in first.stdout
    assert "local checkpoint of step 2: " in first.stdout
    assert "MiB, written in " in first.stdout
    held = sorted(str(p.relative_to(hosts.disk(2))) for p in hosts.disk(2).glob("part_*/step_*"))
    assert held == [f"part_{of}/step_{step}" for of in (1, 2) for step in (4, 6, 8)]
    shutil.rmtree(hosts.disk(1))
    done = hosts()
    assert "note: step 8 was copied from peers to process 1 on " in done.stdout
    assert_resumed(done, uninterrupted, 8)
    assert not list((tmp_path / "disks").glob("*/part_*/step_*"))  # it is complete
    assert not list((tmp_path / "run").glob("set_aside_*"))


@pytest.mark.long
def test_host_and_peer_lost(hosts, uninterrupted):
    hosts(killed=KILLED)
    shutil.rmtree(hosts.disk(1))
    shutil.rmtree(hosts.disk(2))
    done = hosts()
    assert done.stdout.count("warning: step 8 in --local_ckpt_dir is incomplete: ") == 1
    assert "the parts of process 1 on " in done.stdout
    assert_resumed(done, uninterrupted, 5, "run")


@pytest.mark.long
@pytest.mark.parametrize("each", [1, 2])
def test_fewer_replicas_and_more(each, hosts, tmp_path, monkeypatch):
    """Each replica has all parts: one is lost with its disks, and the other one alone resumes the
    newest step. So do both when it is back, with empty disks."""
    lost, left = range(each), range(each, 2 * each)
    curve = ["--lr", "1e-4", "--eps", "1e-4"]  # rounding stays small
    two, one = [*curve, "--mesh_dcn", "2"], [*curve, "--mesh_dcn", "1"]
    whole = train_tiny_gpu(tmp_path / "whole", *STEPS, *two, processes=2 * each)
    first = hosts(*two, killed="1 7", processes=2 * each)
    assert "each part on 2 hosts" in first.stdout
    assert "copied to peers" not in first.stdout
    for host in (*lost, *left):
        held = [path.name for path in hosts.disk(host).glob("part_*")]
        assert held == [f"part_{host % each}"]
    for host in lost:
        shutil.rmtree(hosts.disk(host))
    monkeypatch.setenv("HOSTS", " ".join(map(str, left)))
    fewer = hosts(*one, killed="0 10", processes=each)
    assert "part_0/step_6 at step 6" in fewer.stdout
    assert "copied from peers" not in fewer.stdout
    monkeypatch.delenv("HOSTS")
    done = hosts(*two, processes=2 * each)
    assert "part_0/step_8 at step 8" in done.stdout
    assert "note: step 8 was copied from peers to process 0 on " in done.stdout
    for name in NAMES:
        assert done.column(name) == pytest.approx(whole.column(name), rel=1e-5)


@pytest.mark.long
def test_a_replica_that_was_away_is_of_the_past(hosts, tmp_path, monkeypatch):
    """The run has gone back meanwhile: what is on a host that comes back is not resumed."""
    hosts("--mesh_dcn", "2", killed=KILLED)
    monkeypatch.setenv("HOSTS", "2 3")
    back = ["--resume", str(tmp_path / "run" / "step_5"), "--mesh_dcn", "1"]
    hosts(*back, killed="1 7", processes=2)
    assert part(hosts, 0, 0, 8).exists()
    monkeypatch.delenv("HOSTS")
    done = hosts("--mesh_dcn", "2")
    assert "part_0/step_6 at step 6" in done.stdout


@pytest.mark.long
def test_damaged_copies(hosts, uninterrupted):
    """A byte of a part: its copy is used. Of both: the step before. A file lost: as a lost part."""
    hosts(killed=KILLED)
    flip(part(hosts, 0, 0, 8))
    next(part(hosts, 3, 3, 8).glob("*.distcp")).unlink()
    flip(part(hosts, 1, 1, 8))
    flip(part(hosts, 2, 1, 8))
    done = hosts()
    assert done.stdout.count(" in --local_ckpt_dir of process ") == 3  # part 0, and 1 twice
    assert "part 1 of step 8 in --local_ckpt_dir of process 2 on" in done.stdout
    assert "has changed since it was written" in done.stdout
    assert_resumed(done, uninterrupted, 6)


@pytest.mark.long
def test_copies_under_other_names(hosts, uninterrupted):
    """Step 8 as step 20 on every host; parts as other parts, one of them in the place of its."""
    hosts(killed=KILLED)
    for folder in list(hosts.disk(0).parent.glob("*/part_*/step_8")):
        shutil.copytree(folder, folder.with_name("step_20"))
    shutil.copytree(hosts.disk(0) / "part_0", hosts.disk(0) / "part_9")
    shutil.rmtree(part(hosts, 1, 1, 8))
    shutil.copytree(part(hosts, 1, 0, 8), part(hosts, 1, 1, 8))
    done = hosts()
    assert "step_20: it contains step 8, not step 20" in done.stdout
    assert "note: step 8 was copied from peers to process 1 on " in done.stdout
    assert_resumed(done, uninterrupted, 8)


@pytest.mark.long
def test_disk_that_cannot_be_written(hosts, uninterrupted):
    for host, of in ((1, 1), (0, 3)):  # its own part; a copy of another's
        hosts.disk(host).mkdir(parents=True)
        (hosts.disk(host) / f"part_{of}").write_text("no folder")
    first = hosts(killed=KILLED)
    assert "process 1 on" in first.stdout
    assert "it could not be written to" in first.stdout
    assert "no copy on process 0 on" in first.stdout
    assert "training continues" in first.stdout
    done = hosts()
    assert "step 8 in --local_ckpt_dir is incomplete: the parts of process 1 on" in done.stdout
    assert_resumed(done, uninterrupted, 5, "run")


@pytest.mark.long
def test_another_run_and_another_form(hosts, uninterrupted, tmp_path):
    hosts(killed=KILLED)
    words = [*tiny(tmp_path / "other"), "--backend", "cuda", *STEPS, *EVERY_TWO]
    refused = run_program("-m", HOSTS, *words, processes=4)
    (line,) = [each for each in refused.stderr.splitlines() if "error:" in each]
    assert f"contains a checkpoint of another run, of --ckpt_dir {tmp_path / 'run'}" in line
    assert not list((tmp_path / "other").glob("step_*"))
    fewer = hosts("--max_steps", "7", processes=2)
    assert "another mesh, sharding or number of processes per replica" in fewer.stdout
    assert f"{tmp_path}/run/step_5 at step 5" in fewer.stdout


def test_one_process_and_no_peer(hosts, tmp_path, monkeypatch):
    """Killed while the loss of step 8 is still on the device; step 8 is resumed, and its loss is in
    the log."""
    reference = train_tiny_gpu(tmp_path / "whole", *STEPS)
    monkeypatch.setenv("LATE_S", "1")
    first = hosts(killed="0 9", processes=1)
    assert "without copies (one process)" in first.stdout
    done = hosts(processes=1)
    assert_resumed(done, reference, 8)
    assert other_records_differ(done.ckpt_dir) is None


@pytest.mark.long
def test_the_first_host_lost(hosts, uninterrupted, monkeypatch):
    """It writes the log: what its peer has of step 8 does not count before the loss is written."""
    monkeypatch.setenv("LATE_S", "1")
    hosts(killed="0 9")
    shutil.rmtree(hosts.disk(0))
    done = hosts()
    assert_resumed(done, uninterrupted, 8)
    assert other_records_differ(done.ckpt_dir) is None


@pytest.mark.long
def test_megatron(hosts, tmp_path):
    flags = ["--fsdp", "megatron"]
    reference = train_tiny_megatron(tmp_path / "whole", *STEPS, *flags)
    hosts(*flags, killed=KILLED, processes=2)
    shutil.rmtree(hosts.disk(1))
    assert_resumed(hosts(*flags, processes=2), reference, 8)


@pytest.mark.rehearse
def test_two_hosts_on_xla(slice_of, tmp_path):
    slice_, run = slice_of(Slice("v5p-16", (2, 2, 2))), tmp_path / "run"
    words, program = [*STEPS, *EVERY_TWO], ("-m", HOSTS)
    reference = slice_.train(tmp_path / "whole", *STEPS)
    started = slice_.start(*tiny(run), *words, program=program, KILLED=KILLED)
    started[0].wait(timeout=200)
    for each in started:
        each.kill()
        each.communicate()
    shutil.rmtree(tmp_path / "disks" / "host_0")
    said = all_ended(slice_.start(*tiny(run), *words, program=program))
    # The runtime counts hosts the other way round: process 0 has the second half of the shards.
    assert_resumed(Result(run, *said[0]), reference, 8, "part_1")


# -- without a run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([b"weights"], None),
        ([b"wei", b"ghts"], None),
        ([b"weighty"], "the checksum of file differs"),
    ],
)
def test_what_arrives_is_compared(sent, problem, tmp_path):
    here, there = Pipe()
    for chunk in sent:
        there.send_bytes(chunk)
    files = {"file": (7, xxhash.xxh3_128(b"weights").hexdigest())}
    assert _receive_files(here, tmp_path / "part", files) == problem


def test_half_a_copy(tmp_path):
    here, there = Pipe()
    there.send_bytes(b"wei")
    there.close()
    with pytest.raises(EOFError):
        _receive_files(here, tmp_path / "part", {"file": (7, "0" * 32)})


KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@pytest.fixture
def open_tier(tmp_path):
    """Opens the tiers of two processes without a run, each with a disk and a key; they listen."""
    tiers, addresses = [], []

    def open_(key):
        tier, rank = LocalTier.__new__(LocalTier), len(tiers)
        tier.folder, tier._rank, tier._count, tier._key = tmp_path / str(rank), rank, 2, key
        tier._lock, tier._have, tier._hosts = threading.Lock(), set(), ["here", "there"]
        tier._parts, tier._keepers = 2, {("a", 0): 0, ("b", 1): 1}
        listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        peers.serve(listening, key, tier._receive)
        tiers.append(tier)
        addresses.append(listening.getsockname())
        for each in tiers:
            each._addresses = addresses
        return tier

    return open_


def part_of(tier, part):
    """Write a part of step 8 there; return its folder."""
    folder = tier.folder / f"part_{part}" / "step_8"
    folder.mkdir(parents=True)
    training = training_tensors(Position(8, 0, 8), {}, None)
    content = {"model": {"weight": torch.ones(8)}, "training": training}
    write_manifest(folder, write_state(content, folder, no_dist=True))
    return folder


def test_a_peer_with_a_wrong_key(open_tier):
    knows, other = open_tier(KEY), open_tier(OTHER_KEY)
    for sender, receiver in ((knows, other), (other, knows)):
        folder = part_of(sender, receiver._rank)
        with pytest.raises(AuthenticationError):
            sender._send(folder, receiver._rank, (8, "start"), receiver._rank)
        assert not receiver.folder.joinpath(f"part_{receiver._rank}").exists()
    rejected = set()
    (problem,) = knows._bring((8, "start"), {0: [1], 1: [0]}, rejected, verify=True)
    assert problem.startswith("ignoring part 1 of step 8 in --local_ckpt_dir of process 0 on here")
    assert problem.endswith(": the other process has another key")
    assert rejected == {(1, (8, "start"))}


def test_strangers_at_the_port(open_tier):
    sender, receiver = open_tier(KEY), open_tier(KEY)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, struct.pack("!i", -1)):
        with socket.create_connection(receiver._addresses[1], timeout=30) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(OSError):  # not connected: it has turned away already
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    sent, arrived = part_of(sender, 1), receiver.folder / "part_1" / "step_8"
    sender._send(sent, 1, (8, "start"), 1)
    names = sorted(path.name for path in sent.iterdir())
    assert names == sorted(path.name for path in arrived.iterdir())
    assert filecmp.cmpfiles(sent, arrived, names, shallow=False)[0] == names


def test_a_crowd_of_silent_strangers(open_tier):
    """They use up neither file descriptors nor threads, and a peer is served among them."""
    sender, receiver = open_tier(KEY), open_tier(KEY)
    threads = threading.active_count()
    with contextlib.ExitStack() as connections:
        crowd = []
        for _ in range(200):
            stranger = socket.create_connection(receiver._addresses[1], timeout=30)
            crowd.append(connections.enter_context(stranger))
            stranger.sendall(b"h")  # more than nothing, less than an answer
        for stranger in crowd[: -peers._STRANGERS]:
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(64):
                    pass
        assert threading.active_count() == threads
        sender._send(part_of(sender, 1), 1, (8, "start"), 1)
    assert receiver._have == {(1, (8, "start"))}


def test_a_stranger_has_little_time(open_tier, monkeypatch):
    monkeypatch.setattr(peers, "_PROVES_WITHIN_S", 0.2)
    receiver = open_tier(KEY)
    with socket.create_connection(receiver._addresses[0], timeout=30) as stranger:
        assert len(stranger.recv(64)) == 32
        assert stranger.recv(64) == b""


def test_peers():
    four = ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert [_peer_of(rank, four, 1) for rank in range(8)] == [2, 3, 4, 5, 6, 7, 0, 1]
    assert [_peer_of(rank, four, 2) for rank in range(8)] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert [_peer_of(rank, ["a", "a", "b"], 1) for rank in range(3)] == [2, 2, 0]
    assert _peer_of(1, ["a", "a"], 1) is None
