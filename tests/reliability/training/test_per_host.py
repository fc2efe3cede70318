"""--ckpt_dir_per_host: a --ckpt_dir on each host's own disk, which no file system shares.

The reference is a run that was never interrupted, with a folder that its processes share.
"""

import json
import os
import shutil
import socket
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.fakes.rehearsal.slice_ import Slice
from tests.support.checkpoints import tensors_of, write_checkpoint
from tests.support.cli import (
    Result,
    run_program,
    tiny,
    train_tiny_gpu,
    train_tiny_megatron,
)
from tests.support.rehearsed import all_ended
from tests.support.usage_error import told_in_one_line
from tools import convert
from training.checkpoints.per_host import usable
from training.checkpoints.remote_files import Offered, open_remote
from training.processes import peers

PROGRAM = "tests.fakes.hosts_with_disks"
STEPS = "--max_steps 8 --test_epoch_interval 99 --ckpt_step_interval 4".split()
NAMES = ("loss", "grad_norm", "lr")
PER_HOST = "--ckpt_dir_per_host"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train_tiny_gpu(tmp_path_factory.mktemp("whole") / "run", *STEPS, processes=2)


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Start processes on hosts, each with a disk that has the run's folder: by default two."""

    def start(*flags, on="0 1", killed="", code=0, program=PROGRAM):
        monkeypatch.setenv("HOSTS", on)
        monkeypatch.setenv("DISKS", str(tmp_path))
        monkeypatch.setenv("KILLED", killed or "-1 0")
        words = [*tiny(Path("run")), "--backend", "cuda", PER_HOST, *STEPS, *flags]
        if killed:  # what it has begun to write is complete
            words.append("--no_async_checkpoint")
        done = run_program("-m", program, *words, processes=len(on.split()))
        assert (done.returncode == 0) == (not killed and not code), done.stdout + done.stderr
        return Result(start.disk(on.split()[0]), done.stdout, done.stderr)

    start.disk = lambda host: tmp_path / f"host_{host}" / "run"
    return start


def gathered(hosts, step, folder):
    """Copy the files of a checkpoint from both hosts into one folder, as ``cp`` does."""
    for host in (0, 1):
        shutil.copytree(hosts.disk(host) / step, folder / step, dirs_exist_ok=True)
    return folder / step


def assert_continued(done, whole, step):
    assert f"resuming run/{step} at" in done.stdout, done.stdout
    for name in NAMES:
        assert done.column(name) == whole.column(name)


def assert_same_values(folder, other):
    """All but what is of the process that wrote it: its arguments, and the state of a generator
    that is seeded for each image and each pass."""
    found, expected = tensors_of(folder), tensors_of(other)
    assert found.keys() == expected.keys()
    unlike = {name for name in found if not torch.equal(found[name], expected[name])}
    assert unlike <= {"training.arguments", "training.rng"}


def test_killed_and_restarted_in_another_order(hosts, whole, tmp_path, monkeypatch):
    """Each process then reads all of its values from the other host; the logs go along."""
    monkeypatch.setenv("RUN_JOB_ID", "job-1")
    hosts("--resume", "none", killed="1 7")
    names = {path.name for path in (hosts.disk(1) / "step_4").iterdir()}
    assert names == {".metadata", "manifest.json", "__training_0.distcp", "__1_0.distcp"}
    left = {path.name for path in hosts.disk(1).iterdir()}
    assert left == {".lock", "run.json", "step_4"}
    done = hosts("--resume", "none", on="1 0")  # after a restart: the newest
    assert_continued(done, whole, "step_4")
    assert "note: the logs of this run were copied from process 1 on " in done.stdout
    assert (hosts.disk(1) / "step_8" / "__0_0.distcp").exists()
    assert_same_values(gathered(hosts, "step_8", tmp_path), whole.ckpt_dir / "step_8")


@pytest.mark.long
def test_gathered_in_one_folder(hosts, whole, tmp_path):
    """What all hosts have written is an ordinary checkpoint; and such a one is resumed from copies
    on each host."""
    hosts(killed="1 7")
    hosts()
    path = gathered(hosts, "step_8", tmp_path / "together")
    assert_same_values(path, whole.ckpt_dir / "step_8")
    parts = [str(hosts.disk(host) / "step_8") for host in (0, 1)]
    out = [tmp_path / "of_parts.safetensors", tmp_path / "of_whole.safetensors"]
    for sources, file in zip((parts, [str(path)]), out, strict=True):
        assert convert.main([*sources, str(file)]) == 0
    of_parts, of_whole = (safe_open(file, "pt") for file in out)
    assert of_parts.metadata() == of_whole.metadata()
    assert of_parts.keys() == of_whole.keys()
    for name in of_parts.keys():  # noqa: SIM118 - it is no mapping
        assert torch.equal(of_parts.get_tensor(name), of_whole.get_tensor(name))

    # On a folder that all processes share; and such a folder, copied to each host.
    shared = tmp_path / "shared"
    gathered(hosts, "step_4", shared)
    again = train_tiny_gpu(shared, *STEPS, processes=2)
    assert again.column("loss") == whole.column("loss")[4:]
    assert_same_values(shared / "step_8", whole.ckpt_dir / "step_8")
    for host in (0, 1):
        shutil.copytree(shared / "step_8", hosts.disk(host) / "copy", dirs_exist_ok=True)
    more = hosts("--resume", "run/copy", "--max_steps", "9")
    assert "resuming run/copy at step 8" in more.stdout
    assert more.column("loss")[:8] == whole.column("loss")


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_disk_lost(host, hosts):
    """Nothing is resumed, and no new run is begun, also if it was the first host's."""
    hosts("--max_steps", "4")
    shutil.rmtree(hosts.disk(host))
    lost = hosts(code=2)
    (line,) = [each for each in lost.stderr.splitlines() if "error:" in each]
    assert f"run/step_4 is incomplete: the files of process {host} on " in line
    assert f"are missing (__{host}_0.distcp)" in line
    assert "copy their step_4 to a host of this run" in line
    assert (hosts.disk(1 - host) / "step_4" / f"__{1 - host}_0.distcp").exists()


@pytest.mark.long
def test_fewer_hosts_and_more(hosts, whole):
    """All parts on one host: it goes on alone, and a new host with an empty disk joins it."""
    curve = ["--lr", "1e-4", "--eps", "1e-4"]  # rounding stays small
    hosts(*curve, killed="1 7")
    shutil.copytree(hosts.disk(1) / "step_4", hosts.disk(0) / "step_4", dirs_exist_ok=True)
    alone = hosts(*curve, "--max_steps", "6", on="0")
    assert "resuming run/step_4 at" in alone.stdout
    more = hosts(*curve, on="0 2")
    assert "note: step_4 was made known to process 1 on " in more.stdout
    assert "resuming run/step_6 at" in more.stdout
    assert {path.name for path in hosts.disk(2).iterdir()} >= {"step_6", "step_8"}
    assert not list((hosts.disk(2) / "step_6").glob("__0_*"))  # it has been read over the network
    reference = train_tiny_gpu(hosts.disk("whole"), *STEPS, *curve, processes=2)
    for name in NAMES:
        assert more.column(name) == pytest.approx(reference.column(name), rel=1e-5)


@pytest.mark.long
def test_two_processes_a_host(hosts):
    """One of each host locks its folder, writes its manifest, and removes what is old."""
    flags = ["--keep_checkpoints", "1"]
    hosts(*flags, on="0 0 1 1", killed="3 7")
    done = hosts(*flags, on="1 1 0 0")
    assert "resuming run/step_4 at" in done.stdout
    for host in (0, 1):
        assert [path.name for path in hosts.disk(host).glob("step_*")] == ["step_8"]
        assert len(list((hosts.disk(host) / "step_8").glob("__[0-9]*"))) == 2


@pytest.mark.long
def test_an_earlier_step(hosts):
    """The later one is set aside on each host, under the same name, and can be resumed from there;
    so can the best one."""
    hosts("--test_epoch_interval", "1", "--eval_batches", "1")
    (hosts.disk(1) / "set_aside_1").mkdir()
    back = hosts("--resume", "run/step_4", "--seed", "3", "--restart_epoch")
    assert "moved step_8 to run/set_aside_2" in back.stdout
    for host in (0, 1):
        assert (hosts.disk(host) / "set_aside_2" / "step_8" / "manifest.json").exists()
    again = hosts("--resume", "run/set_aside_2", "--max_steps", "9")
    assert "resuming run/set_aside_2/step_8 at step 8" in again.stdout
    assert "resuming run/step_" in hosts("--resume", "lowest_loss", "--max_steps", "10").stdout


@pytest.mark.long
def test_a_host_that_was_away_while_the_run_went_back(hosts):
    """Its own step 8 is set aside, also if it is the first host now."""
    hosts()
    shutil.copytree(hosts.disk(1) / "step_4", hosts.disk(0) / "step_4", dirs_exist_ok=True)
    other = ["--seed", "3", "--restart_epoch"]
    alone = hosts("--resume", "run/step_4", *other, on="0")
    done = hosts("--max_steps", "9", *other, on="1 0")
    assert "note: step_8 was made known to process 0 on " in done.stdout
    assert "resuming run/step_8 at" in done.stdout
    assert done.column("loss")[:8] == alone.column("loss")
    assert (hosts.disk(1) / "set_aside_1" / "step_8" / "__1_0.distcp").exists()


@pytest.mark.long
def test_damage_and_an_interrupted_save(hosts, whole):
    """A changed byte is found by the host that has it; a host whose manifest is missing was killed
    just before it wrote that, and is told by the other one."""
    hosts()
    file = hosts.disk(1) / "step_8" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (hosts.disk(0) / "step_4" / "manifest.json").unlink()
    done = hosts(on="1 0")
    assert "run/step_8 is damaged (__1_0.distcp has changed since it was written" in done.stdout
    assert "note: step_4 was made known to process 1 on" in done.stdout
    assert_continued(done, whole, "step_4")


@pytest.mark.long
def test_a_full_disk(hosts, monkeypatch):
    """Of one host: its name is in the message, and no host keeps anything of that checkpoint."""
    monkeypatch.setenv("SAVES", "full 8 1 0")
    monkeypatch.setenv("PROGRAM", PROGRAM)
    ended = hosts(program="tests.fakes.disturbed_saves", code=4)
    assert "checkpoint step_8 could not be written to run (process 1 on " in ended.stderr
    for host in (0, 1):
        assert [path.name for path in hosts.disk(host).glob("step_*")] == ["step_4"]


@pytest.mark.long
def test_a_new_host_that_cannot_know_the_model(hosts, tmp_path):
    """The others take a setting from the checkpoint; it is told which, and what to do."""
    hosts("--init_values", "0.1", killed="1 7")
    shutil.copytree(hosts.disk(1) / "step_4", hosts.disk(0) / "step_4", dirs_exist_ok=True)
    refused = hosts(on="0 2", code=2)
    (line,) = [each for each in refused.stderr.splitlines() if "error:" in each]
    assert "differ in --init_values: 0.1 for process 0 on " in line
    assert "process 1 on " in line.partition("; ")[2]
    assert "has no checkpoint in --ckpt_dir to take settings from: give all flags" in line
    assert "resuming run/step_4 at" in hosts("--init_values", "0.1", on="0 2").stdout


@pytest.mark.long
def test_megatron(hosts, tmp_path):
    flags = ["--fsdp", "megatron"]
    reference = train_tiny_megatron(tmp_path / "whole", *STEPS, *flags)
    hosts(*flags, killed="1 7")
    assert_continued(hosts(*flags, on="1 0"), reference, "step_4")


@pytest.mark.long
def test_with_local_checkpoints(hosts, whole, tmp_path):
    """A host and its disk are lost: a copy of its part is on its peer."""
    local = ["--local_ckpt_dir", "local", "--local_ckpt_step_interval", "2"]
    hosts(*local, killed="1 8")
    shutil.rmtree(tmp_path / "host_0")
    done = hosts(*local)
    assert "local/part_0/step_6 at step 6" in done.stdout, done.stdout
    assert done.column("loss") == whole.column("loss")[6:]


def test_refused(capsys, tmp_path):
    line = told_in_one_line(capsys, *tiny(tmp_path), PER_HOST, "--eval_only")
    assert "--ckpt_dir_per_host is incompatible with --eval_only" in line
    (tmp_path / "bucket").mkdir()
    line = told_in_one_line(capsys, *tiny(tmp_path), PER_HOST, "--ckpt_dir", "memory://bucket/run")
    assert "--ckpt_dir_per_host is for folders on the hosts' disks" in line


@pytest.mark.rehearse
def test_four_hosts_on_xla(slice_of, tmp_path):
    """Killed and resumed in another order of their addresses; without one of the disks; and on a
    folder that all share."""
    slice_ = slice_of(Slice("v5litepod-4", chips=(2, 2, 1), host=(1, 1, 1)))
    words = [*STEPS, "--no_async_checkpoint"]
    reference = slice_.train(tmp_path / "whole", *words)

    def start(hosts="0 1 2 3", killed="-1 0"):
        how = {"DISKS": str(tmp_path), "HOSTS": hosts, "KILLED": killed}
        run = tiny(Path("run"))
        return slice_.start(*run, *words, PER_HOST, program=("-m", PROGRAM), **how)

    started = start(killed="1 7")
    next(host for host in started if host.wait(timeout=200))
    for each in started:
        each.kill()
        each.communicate()
    folders = [tmp_path / f"host_{host}" / "run" for host in range(4)]
    shared, away = tmp_path / "shared", folders[2].with_name("away")
    for folder in folders:
        shutil.copytree(folder / "step_4", shared / "step_4", dirs_exist_ok=True)
    folders[2].rename(away)
    said = all_ended(start(), code=2)
    ends = {line for _, told in said for line in told.splitlines() if "error: " in line}
    (line,) = ends  # the same on all hosts
    assert "run/step_4 is incomplete: the files of process " in line
    assert "are missing (__" in line
    shutil.rmtree(folders[2])
    away.rename(folders[2])
    said = all_ended(start("3 0 1 2"))
    logs = [Result(folder, *said[0]) for folder in folders if (folder / "metrics.jsonl").exists()]
    (done,) = [log for log in logs if max(log.steps) == 8]
    assert_continued(done, reference, "step_4")
    together = slice_.train(shared, *words)
    assert together.column("loss") == reference.column("loss")[4:]


# -- without a run -----------------------------------------------------------------------------


def test_several_folders_are_converted_as_one(tmp_path, capsys):
    step = write_checkpoint(tmp_path / "whole", 4)
    for host, own in (("a", ".metadata"), ("b", "__0_0.distcp")):
        folder = tmp_path / host / "step_4"
        folder.mkdir(parents=True)
        for name in ("manifest.json", own):
            shutil.copy(step / name, folder / name)
    parts = [tmp_path / host / "step_4" for host in ("a", "b")]

    def converted(*sources):
        code = convert.main([*map(str, sources), str(tmp_path / "out.pt")])
        return code, capsys.readouterr()

    code, output = converted(*parts)
    assert (code, output.err) == (0, "")
    assert output.out.startswith(f"converted {parts[0]}: ")
    (tmp_path / "out.pt").rename(tmp_path / "of_parts.pt")
    assert converted(step)[0] == 0
    loaded = [torch.load(tmp_path / name)["model"] for name in ("of_parts.pt", "out.pt")]
    assert torch.equal(loaded[0]["w"], loaded[1]["w"])
    (tmp_path / "out.pt").unlink()
    for sources, problem in (
        ([parts[0], parts[0]], f"{parts[0]}: __0_0.distcp is missing"),
        ([parts[0], write_checkpoint(tmp_path / "other", 5)], "are not of the same checkpoint"),
        ([parts[0], tmp_path], f"{tmp_path} has no manifest.json: several SRC must be"),
    ):
        code, output = converted(*sources)
        assert code == 2
        assert problem in output.err, output.err
        assert not (tmp_path / "out.pt").exists()


FILES = {"a": (3, ""), "b": (4, "")}


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        ([("x", {"a": 3}), ("x", {"b": 4})], "x"),
        ([("x", {"a": 3}), ("x", {"a": 3})], None),
        ([("x", {"a": 3}), ("x", {"b": 5})], None),
        ([("x", {"a": 3}), (None, {"b": 4})], "x"),  # killed before its manifest was written
        ([("x", {"a": 3}), (None, {})], None),
        ([("x", {"a": 3}), ("y", {"b": 4})], None),  # it was away while the run went back
        ([("y", {"a": 3}), ("x", {"a": 3, "b": 4})], "x"),
        ([("x", {"a": 3, "b": 4}), (None, {})], "x"),
    ],
)
def test_which_step_is_usable(seen, chosen):
    digests = dict.fromkeys(digest for digest, _ in seen if digest)
    assert usable(dict.fromkeys(digests, FILES), seen) == chosen


KEY = b"k" * 32
REFUSED = "no such file|symbolic link|not a regular file|No such file"


@pytest.fixture
def offers(tmp_path):
    """A process that offers the file ``weights``; returns the address of its port."""
    offered, folder = Offered(), tmp_path / "run" / "step_4"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 10_000)
    (folder / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(folder / "secret")
    (tmp_path / "run" / "outside").write_bytes(b"secret")
    os.mkfifo(folder / "pipe")
    offered.offer("step_4", folder, ["weights", "link", "pipe", "../outside", "..", "missing"])
    listening = socket.create_server(("127.0.0.1", 0))
    peers.serve(listening, KEY, offered.answer)
    return listening.getsockname()


def test_a_remote_file_is_read_as_a_local_one(offers, tmp_path):
    size = 2_560_000
    with (
        open_remote(offers, KEY, "step_4", "weights", size) as remote,
        open(tmp_path / "run" / "step_4" / "weights", "rb") as local,
    ):
        for where in (0, 255, 1 << 20, size - 1, size, size + 5):
            for length in (0, 1, 700, 2 << 20, -1):
                assert remote.seek(where) == local.seek(where)
                assert remote.read(length) == local.read(length)
        assert remote.seek(-7, os.SEEK_END) == local.seek(-7, os.SEEK_END)
        assert remote.read() == local.read()


@pytest.mark.parametrize(
    "name", ["secret", "link", "pipe", "../outside", "..", "", "missing", "/etc/passwd"]
)
def test_only_offered_regular_files_are_opened(name, offers):
    with (
        open_remote(offers, KEY, "step_4", name, 6) as remote,
        pytest.raises(OSError, match=REFUSED),
    ):
        remote.read()
    with (
        open_remote(offers, KEY, "elsewhere", "weights", 6) as remote,
        pytest.raises(OSError, match=REFUSED),
    ):
        remote.read()


def test_a_wrong_key(offers):
    with pytest.raises((AuthenticationError, OSError)):
        open_remote(offers, b"o" * 32, "step_4", "weights", 6).__enter__()


def test_a_file_that_became_shorter(offers):
    with open_remote(offers, KEY, "step_4", "weights", 3_000_000) as remote:
        remote.seek(2_559_999)
        with pytest.raises(OSError, match="shorter"):
            remote.read(10)


@pytest.mark.parametrize(
    "request_",
    [
        {"offset": 0, "length": 1 << 40},
        {"offset": 0, "length": -1},
        {"offset": -1, "length": 1},
        {"offset": 1 << 80, "length": 1},
        {"offset": "0", "length": [1]},
        {"folder": ["step_4"]},
        {"name": {"a": 1}},
        {"name": None},
    ],
)
def test_requests_that_ask_for_too_much(request_, offers):
    """They are answered in words, and the next one is answered with bytes."""
    usual = {"folder": "step_4", "name": "weights", "offset": 5, "length": 2}
    with peers.connect(offers, KEY) as connection:

        def ask(text):
            connection.send_bytes(text)
            return connection.recv_bytes()

        for request, answer in ((usual | request_, b"\1"), (usual, b"\0\5\6")):
            assert ask(json.dumps(request).encode()).startswith(answer)
        with pytest.raises((EOFError, OSError)):  # it hangs up
            ask(b" " * (1 << 17))
