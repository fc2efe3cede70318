"""launch/meet.py and torch_fsdp/launch_torch.py: nodes and processes that wait, and restarts."""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from launch import meet
from launch.meet import Host, Refused, join, listen
from tests.cli import DIGITS, ROOT, TINY_MODEL, TINY_RUN, environment
from tests.launch.test_launch_gpu import (
    TORCHRUN,
    devices,
    finish,
    free_port,
    losses,
    start,
    succeed,
)
from tests.marks import long
from training.logs.records import read_events

TWO_NODES = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1"}


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(process.wait())


# -- a node that never comes ----------------------------------------------------------


@pytest.mark.long
def test_a_node_that_never_comes(tmp_path):
    """Each tells who is missing; a limit ends one, Ctrl-C and SIGTERM end the others at once."""
    flags = ["--fake_data", "--ckpt_dir", tmp_path / "run"]
    first, second, named = (
        start(TORCHRUN, *flags, **TWO_NODES | {"MASTER_PORT": free_port()} | more)
        for more in (
            {"NODE_RANK": "0", "JOIN_TIMEOUT": "11"},
            {"NODE_RANK": "1"},
            {"RDZV_ID": "job 1", "NNODES": "3"},
        )
    )
    read_until(second, "torchrun.sh: waiting for node 0 at 127.0.0.1:")
    second.send_signal(signal.SIGINT)
    assert finish(second)[0] == 130
    read_until(named, f"torchrun.sh: waiting for 2 of 3 nodes (here: {socket.gethostname()})")
    named.send_signal(signal.SIGTERM)
    assert finish(named)[0] == 143
    code, stdout, stderr = finish(first)
    assert (code, stdout) == (1, "")
    told, limit = stderr.splitlines()
    assert told.startswith("torchrun.sh: waiting for node 1 of 2, ")
    assert limit.startswith("torchrun.sh: error: node 1 of 2 did not come within 11 s")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_torchrun_of_a_node_that_never_comes(tmp_path):
    """The nodes have met, then the first one is gone: torchrun waits in compiled code."""
    port = free_port()
    host = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from launch import meet\n"
            "args = meet.parse(sys.argv[1:]); print(*meet.meet(args, meet.Watch(0)))",
            *f"--nodes 2 --rank 0 --address 127.0.0.1 --port {port} --limit 0 -- x".split(),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    node = start(TORCHRUN, "--fake_data", **TWO_NODES, MASTER_PORT=port, NODE_RANK="1")
    read_until(node, "waiting for torchrun of the other nodes, ")
    node.send_signal(signal.SIGINT)
    assert finish(node)[0] == 130
    assert host.communicate()[0].endswith(" True\n")


# -- who is one of the nodes ----------------------------------------------------------


def arguments(port: str, rank: int, **more: object) -> argparse.Namespace:
    words = f"--nodes 3 --rank {rank} --address 127.0.0.1 --port {port} --limit 0 -- x"
    args = meet.parse(words.split())
    vars(args).update(more)
    return args


@pytest.fixture
def host():
    """Node 0 of three, waiting in a thread; ``found`` is what it ends with."""
    args = arguments(free_port(), 0)
    listener = listen(args)
    assert listener
    waiting = SimpleNamespace(port=str(args.port), watch=SimpleNamespace(waiting_for=""), found=[])
    meeting = Host(listener, args, waiting.watch)
    waiting.thread = threading.Thread(target=lambda: waiting.found.append(meeting.wait()))
    waiting.thread.start()
    yield waiting
    for rank in (1, 2):  # whatever the test did: these let it end
        threading.Thread(target=come, args=(waiting.port, rank), daemon=True).start()
    waiting.thread.join(60)
    assert not waiting.thread.is_alive()


def come(port: str, rank: int, **more: object) -> str | None:
    return join(arguments(port, rank, **more), SimpleNamespace(waiting_for=""))


def speak(port: str, data: bytes) -> bytes:
    connection = socket.create_connection(("127.0.0.1", int(port)), timeout=60)
    with connection, contextlib.suppress(OSError):  # hung up already
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))
    return b""


def test_strangers_do_not_end_a_meeting(host):
    nothing = [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff\n",
        b"[1]\n",
        b"x" * 10**5,
        b"[" * 4000 + b"\n",
    ]
    assert [speak(host.port, data) for data in nothing] == [b""] * len(nothing)
    greeting = {"name": "1", "nodes": 3, "rdzv_id": ""}
    wrong = [
        {},
        greeting | {"name": "3"},
        greeting | {"name": None},
        greeting | {"name": "0"},
        greeting | {"nodes": [3]},
        greeting | {"rdzv_id": "\x1b[2J"},
    ]
    for message in wrong:
        answer = speak(host.port, json.dumps(message).encode() + b"\n")
        assert b'"refused"' in answer
        assert b"\x1b" not in answer
    assert host.found == []


def test_refusals_say_what_to_change(host):
    with pytest.raises(Refused, match="NNODES is '2' there and '3' here"):
        come(host.port, 1, nodes=2)
    with pytest.raises(Refused, match="RDZV_ID is 'a' there and '' here"):
        come(host.port, 1, rdzv_id="a")
    with pytest.raises(Refused, match="NODE_RANK=0 is here already; another run on this"):
        come(host.port, 0)
    with pytest.raises(Refused, match=f"port {host.port} is in use on this machine"):
        listen(arguments(host.port, 0))


def test_a_node_that_left_may_come_again(host):
    """It is waited for anew; all get one name for the job, and the port is free at once."""
    message = json.dumps({"name": "1", "nodes": 3, "rdzv_id": ""}).encode() + b"\n"
    assert json.loads(speak(host.port, message).splitlines()[0])["missing"] == "node 2 of 3"
    while host.watch.waiting_for != "nodes 1, 2 of 3":
        time.sleep(0.05)
    jobs: list[str | None] = []
    nodes = [
        threading.Thread(target=lambda rank=rank: jobs.append(come(host.port, rank)))
        for rank in (2, 1)
    ]
    for node in nodes:
        node.start()
    for node in (*nodes, host.thread):
        node.join(60)
    assert jobs == host.found * 2
    with socket.create_server(("127.0.0.1", int(host.port))):
        pass


def test_a_node_comes_back_to_torchrun():
    """By RDZV_ID nodes may be started again one by one: torchrun, at work there, greets nobody."""
    with socket.create_server(("127.0.0.1", 0)) as torchrun:
        port = str(torchrun.getsockname()[1])
        threading.Thread(target=lambda: torchrun.accept()[0].close(), daemon=True).start()
        assert come(port, 1, rdzv_id="job 1", name="another") is None


def test_torchruns_store_keeps_silent(monkeypatch):
    """Nobody waits for its answer until a stranger's greeting would have come."""
    monkeypatch.setattr(meet, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(meet, "GREETING_SECONDS", 10_000)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert come(str(store.port), 1, rdzv_id="job 1", name="another") is None


# -- a process that never comes -------------------------------------------------------


@pytest.mark.long
def test_a_process_that_never_comes(tmp_path):
    """The first of two, and the second of two others: each tells, and ends by the limit."""
    waited_for = {}
    for rank, who in (("1", "rank 0 at 127.0.0.1:{} (Connection refused)"), ("0", "rank 1 of 2")):
        port = free_port()
        variables = environment() | {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "JOIN_TIMEOUT": "11",
        }
        process = subprocess.Popen(
            [
                sys.executable,
                "run_vit_training.py",
                "--backend",
                "cuda",
                "--data_dir",
                DIGITS,
                *TINY_MODEL,
                *TINY_RUN,
                "--ckpt_dir",
                tmp_path / rank,
            ],
            cwd=ROOT,
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        waited_for[process] = f"run_vit_training.py: rank {rank}: ", who.format(port)
    for process, (beginning, who) in waited_for.items():
        code, _, stderr = finish(process)
        assert code == 1
        told = [line for line in stderr.splitlines() if line.startswith(beginning)]
        assert len(told) == 2, stderr
        assert told[0].startswith(f"{beginning}waiting for {who}, ")
        assert told[1].startswith(f"{beginning}{who} did not come within 11 s (JOIN_TIMEOUT)")
        assert "Traceback" not in stderr


# -- restarts -------------------------------------------------------------------------

KILL_ONE = """
import os, signal, threading, time

def kill():
    while not os.path.exists(os.environ["KILL_WHEN"]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("RUN_ATTEMPT") == "0"
if os.environ.get("RANK") == "1" and first:
    threading.Thread(target=kill, daemon=True).start()
if "RANK" in os.environ:
    with open(os.environ["NOTES"], "a") as notes:
        print(*map(os.environ.get, ("RANK", "RUN_JOB_ID", "RUN_ATTEMPT",
                                    "TORCHELASTIC_RESTART_COUNT")), file=notes)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "nodes",
    [
        [{"NPROC_PER_NODE": "2"}],
        long([{"NODE_RANK": "0"}, {"NODE_RANK": "1"}]),
        long([{"RDZV_ID": "job-1"}] * 2),
    ],
    ids=["one node", "NODE_RANK", "RDZV_ID"],
)
def test_torchrun_starts_a_killed_process_again(nodes, tmp_path):
    """All processes find each other once more, and know that this is a restart."""
    (tmp_path / "sitecustomize.py").write_text(KILL_ONE)
    run, notes = tmp_path / "run", tmp_path / "notes"
    flags = ["--data_dir", DIGITS, *TINY_MODEL, *TINY_RUN, "--max_steps", "24"]
    flags += ["--ckpt_step_interval", "4", "--ckpt_dir", run]
    variables = {
        "MAX_RESTARTS": "1",
        "PYTHONPATH": str(tmp_path),
        "KILL_WHEN": str(run / "step_8"),
        "NOTES": str(notes),
        "MASTER_PORT": free_port(),
    }
    if len(nodes) > 1:
        variables |= TWO_NODES
    started = [start(TORCHRUN, *flags, **variables | node) for node in nodes]
    ended = [finish(node) for node in started]
    assert [code for code, _, _ in ended] == [0] * len(nodes), ended
    said = "".join(stdout for _, stdout, _ in ended)
    assert f"resuming {run}/step_" in said
    assert "training completed: step 24" in said
    assert devices(run) == 2
    assert len(losses(run)) == 24
    starts = [line.split() for line in notes.read_text().splitlines()]
    assert len({job for _, job, _, _ in starts}) == 1
    by_rank = {
        rank: [int(attempt) + int(count) > 0 for who, _, attempt, count in starts if who == rank]
        for rank in ("0", "1")
    }
    assert by_rank == {"0": [False, True], "1": [False, True]}


@pytest.mark.long
def test_a_lost_node_is_started_again(tmp_path):
    """By RDZV_ID, alone: the other one's processes start again with it, from a checkpoint."""
    run, (first, second) = tmp_path / "run", [tmp_path / "first.pids", tmp_path / "second.pids"]
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ:\n"
        "    open(os.environ['PIDS'], 'a').write(f'{os.getpid()} {os.environ[\"RUN_ATTEMPT\"]} '\n"
        "                                       f'{os.environ[\"RUN_JOB_ID\"]}\\n')"
    )
    flags = ["--data_dir", DIGITS, *TINY_MODEL, *TINY_RUN, "--num_epochs", "9", "--ckpt_dir", run]
    flags += ["--max_steps", "200", "--ckpt_step_interval", "20"]
    variables = TWO_NODES | {
        "RDZV_ID": "job-1",
        "MAX_RESTARTS": "2",
        "PYTHONPATH": str(tmp_path),
        "MASTER_PORT": free_port(),
    }
    stays = start(TORCHRUN, *flags, PIDS=str(first), **variables)
    read_until(stays, "waiting for 1 of 2 nodes")
    lost = start(TORCHRUN, *flags, PIDS=str(second), **variables)
    while not (run / "step_40").exists():
        assert stays.poll() is lost.poll() is None
        time.sleep(0.1)
    lost.kill()
    os.kill(int(second.read_text().split()[0]), signal.SIGKILL)
    finish(lost)
    again = start(TORCHRUN, *flags, PIDS=str(second), **variables)
    (code, stdout, stderr), (other, more, _) = finish(stays), finish(again)
    assert (code, other) == (0, 0), stderr
    assert f"resuming {run}/step_" in stdout + more  # whichever has rank 0
    assert "training completed: step 200" in stdout + more
    starts = [path.read_text().split() for path in (first, second)]
    assert [words[1::3] for words in starts] == [["0", "1"]] * 2
    assert len({job for words in starts for job in words[2::3]}) == 1


# -- fewer nodes, and more ------------------------------------------------------------


@pytest.mark.long
def test_elastic_nodes(tmp_path):
    """Three nodes, two after one was lost, three when it is back: the curve is that of one process.

    The one that comes waits for a checkpoint of the others, so that no step is lost then.
    """
    run, pids = tmp_path / "run", tmp_path / "third.pids"
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ:\n"
        "    open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n')"
    )
    batch = ["--batch_size", "24", "--optimizer", "adamw", "--eps", "1e-4", "--lr", "1e-4"]
    flags = ["--data_dir", DIGITS, *TINY_MODEL, *TINY_RUN, *batch, "--num_epochs", "9"]
    flags += ["--max_steps", "400", "--ckpt_step_interval", "20"]
    variables = {
        "NNODES": "2:3",
        "NPROC_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "RDZV_ID": "job-1",
        "ELASTIC_WAIT": "15",
        "MAX_RESTARTS": "3",
        "PYTHONPATH": str(tmp_path),
        "MASTER_PORT": free_port(),
    }

    def begin(name):
        given = [*flags, "--ckpt_dir", run, "--micro_batch_size", "8"]
        return start(TORCHRUN, *given, **variables, PIDS=str(tmp_path / f"{name}.pids"))

    def at_step(step):
        while not (run / f"step_{step}").exists():
            assert all(node.poll() is None for node in nodes)
            time.sleep(0.1)

    nodes = [begin("first")]
    read_until(nodes[0], "waiting for 1 of 2 nodes")  # it has the port, and must stay
    nodes += [begin("second"), begin("third")]
    at_step(40)
    nodes[2].kill()
    os.kill(int(pids.read_text()), signal.SIGKILL)
    finish(nodes.pop())
    at_step(120)
    nodes.append(begin("third"))
    ended = [finish(node) for node in nodes]
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    said = "".join(err for _, _, err in ended)
    assert "a node has come: all write a checkpoint and start again with it" in said
    assert "starting on 2 of up to 3 nodes" in said
    events = read_events(run)
    starts = [event for event in events if event["event"] == "start"]
    assert [event["devices"] for event in starts] == [3, 2, 3]
    stopped = [event["step"] for event in events if event.get("how") == "stopped"]
    assert stopped == [starts[2]["step"]]  # a checkpoint was written for the node that came
    plain = start(TORCHRUN, *flags, "--ckpt_dir", tmp_path / "plain", NPROC_PER_NODE="1")
    succeed(plain)
    assert losses(run) == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"NNODES": "3:2"}, "NNODES=3:2 is not MIN:MAX, whole numbers"),
        ({"NNODES": "0:2"}, "NNODES=0:2 is not MIN:MAX"),
        ({"NNODES": ":"}, "NNODES=: is not MIN:MAX"),
        ({"NODE_RANK": "0", "RDZV_ID": ""}, "NNODES=2:3 needs RDZV_ID in place of NODE_RANK"),
        ({"ELASTIC_WAIT": "600"}, "ELASTIC_WAIT=600 must be less than JOIN_TIMEOUT=600"),
        ({"ELASTIC_WAIT": "x"}, "ELASTIC_WAIT=x is not a whole number"),
    ],
)
def test_elastic_nodes_refused(variables, told):
    elastic = {"NNODES": "2:3", "RDZV_ID": "a", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    code, _, stderr = finish(start(TORCHRUN, "--fake_data", **elastic | variables))
    assert code == 2
    assert told in stderr
    assert len(stderr.splitlines()) == 1


# -- the TPU runtime ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(not Path("/usr/bin/cc").exists(), reason="no C compiler")
def test_a_host_that_never_starts_the_tpu_runtime(tmp_path):
    """A stand-in for libtpu that waits as the real one does, in compiled code."""
    (tmp_path / "waits.c").write_text(
        "#include <unistd.h>\nconst void *GetPjrtApi(void) { for (;;) sleep(1000); }\n"
    )
    library = tmp_path / "libtpu.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "waits.c"], check=True)
    slice_of_two = {
        "PJRT_DEVICE": "TPU",
        "TPU_LIBRARY_PATH": str(library),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v4-16",
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "a,b",
        "TPU_PROCESS_BOUNDS": "1,1,2",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
    }
    program = (
        "import sys; from torch_xla._internal import tpu; import run_vit_training as program\n"
        "from xla_fsdp import starting; starting.FIRST_SECONDS = starting.EVERY_SECONDS = 1.0\n"
        "from xla_fsdp import environment; environment._has_tpu_chips = lambda: True\n"
        "tpu.num_available_chips = lambda: 4; sys.exit(program.main(sys.argv[1:]))"
    )
    run = subprocess.Popen(
        [
            sys.executable,
            "-c",
            program,
            "--fake_data",
            "--batch_size",
            "8",
            "--ckpt_dir",
            tmp_path / "run",
        ],
        cwd=ROOT,
        env=environment() | slice_of_two,
        text=True,
        stderr=subprocess.PIPE,
    )
    told = "all 2 hosts of the slice, of which this is 1 (0: a, ... 1: b)"
    read_until(run, told)
    read_until(run, told)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == -signal.SIGINT
    assert run.stderr
    run.stderr.read()  # until the one that told has ended, too
