"""launch/torchrun.py, torch_fsdp/launch_torch.py: nodes and processes that wait, and restarts."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from launch import UsageError, torchrun
from launch.torchrun import wait_for_nodes
from tests.fakes.pod import wait_until
from tests.support.cli import DIGITS, TINY_MODEL, TINY_RUN, tiny
from tests.support.launching import (
    KILL_ONE,
    TORCHRUN,
    devices,
    finish,
    free_port,
    losses,
    refused,
    start,
    succeed,
)
from tests.support.marks import long
from training.logs.records import read_events
from training.processes.rendezvous import TimedOut, listen

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
    # torch_tpu, where it is installed, warns at the import of PyTorch.
    told, limit = [line for line in stderr.splitlines() if line.startswith("torchrun.sh: ")]
    assert told.startswith("torchrun.sh: waiting for node 1 of 2, ")
    assert limit.startswith(
        "torchrun.sh: error: timed out after 11 s (JOIN_TIMEOUT) waiting for node 1 of 2"
    )
    assert not (tmp_path / "run").exists()


# -- who is one of the nodes ----------------------------------------------------------


def arguments(port: str, rank: int, **more: object) -> argparse.Namespace:
    words = f"--nodes 3 --rank {rank} --address 127.0.0.1 --port {port} --limit 240 -- x"
    args = torchrun.parse(words.split())
    vars(args).update(more)
    return args


def wait_in_thread(executor: ThreadPoolExecutor, port: str, rank: int, **more: object) -> Future:
    return executor.submit(wait_for_nodes, arguments(port, rank, **more))


def wait_for_node(rank: int, port: str) -> None:
    store = TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    wait_until(lambda: store.check([f"node/{rank}"]))


@pytest.fixture
def executor():
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_refusals_say_what_to_change(executor):
    port = free_port()
    nodes = [wait_in_thread(executor, port, rank) for rank in (0, 1)]
    wait_for_node(1, port)  # else the first of those below could settle what run it is
    with pytest.raises(
        UsageError, match="NNODES is '2' on this node, but '3' on the other nodes at 127"
    ):
        wait_for_nodes(arguments(port, 1, nodes=2))
    with pytest.raises(
        UsageError, match=r"RDZV_ID is 'SHA-256 .*' on this node, but '' on the other"
    ):
        wait_for_nodes(arguments(port, 1, rdzv_id="a"))
    with pytest.raises(UsageError, match=f"cannot listen on port {port} on this machine"):
        wait_for_nodes(arguments(port, 0))
    nodes.append(wait_in_thread(executor, port, 2))
    assert [node.result()[1] for node in nodes] == [True, False, False]


@pytest.mark.parametrize("run", [{}, {"rdzv_id": "a secret"}])
def test_the_store_is_at_one_address_and_keeps_the_secret(run, executor):
    """127.0.0.2 is this machine, too: by default a TCPStore listens there as well."""
    port = free_port()
    nodes = [wait_in_thread(executor, port, rank, **run) for rank in range(3)]
    store = nodes[0].result()[0]
    assert sum(node.result()[1] for node in nodes) == 1
    assert b"secret" not in store.get("run")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)))


def test_the_store_of_processes_is_at_one_address():
    own_name, port = socket.gethostname(), int(free_port())
    with listen("127.0.0.1", port) as listening:
        assert listening.getsockname() == ("127.0.0.1", port)
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port)
    found = {place[0] for *_, place in socket.getaddrinfo(own_name, port)}
    if any(address.startswith("127.") for address in found):  # as in Debian's /etc/hosts
        with listen(own_name, port):
            for address in ("127.0.0.1", "127.0.0.2"):
                socket.create_connection((address, port)).close()


def test_two_nodes_with_one_number(executor, monkeypatch):
    """The one that came first notices it."""
    monkeypatch.setattr("launch.torchrun.os.getpid", threading.get_ident)  # a thread is a node
    port = free_port()
    nodes = [wait_in_thread(executor, port, 0)]
    first = wait_in_thread(executor, port, 1)
    wait_for_node(1, port)
    nodes.append(wait_in_thread(executor, port, 1))
    with pytest.raises(
        UsageError, match=r"NODE_RANK=1 is used both by this node and by .* \(process "
    ):
        first.result()
    nodes.append(wait_in_thread(executor, port, 2))
    assert [node.result()[1] for node in nodes] == [True, False, False]


def test_a_node_that_was_started_again_counts_once(executor):
    """Nodes that come later find the same run there."""
    port = free_port()
    host = wait_in_thread(executor, port, 0)
    wait_for_node(0, port)
    for _ in range(2):
        with pytest.raises(TimedOut, match=r"^node 2 of 3$"):
            wait_for_nodes(arguments(port, 1, limit=2))
    nodes = [host, wait_in_thread(executor, port, 2), wait_in_thread(executor, port, 1)]
    stores = [node.result()[0] for node in nodes]
    stores.append(wait_for_nodes(arguments(port, 1))[0])
    assert len({store.get("job") for store in stores}) == 1


# -- a process that never comes -------------------------------------------------------


@pytest.mark.long
def test_a_process_that_never_comes(tmp_path):
    """The first of two, and the second of two others: each tells, and ends by the limit."""
    waited_for = {}
    for rank, who in (("1", "rank 0 at 127.0.0.1:{} (Connection refused)"), ("0", "rank 1 of 2")):
        port = free_port()
        variables = {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "JOIN_TIMEOUT": "11",
        }
        words = ["run_vit_training.py", *tiny(tmp_path / rank), "--backend", "cuda"]
        process = start(sys.executable, *words, **variables)
        waited_for[process] = f"run_vit_training.py: rank {rank}: ", who.format(port)
    for process, (beginning, who) in waited_for.items():
        code, _, stderr = finish(process)
        assert code == 1
        told = [line for line in stderr.splitlines() if line.startswith(beginning)]
        assert len(told) == 2, stderr
        assert told[0].startswith(f"{beginning}waiting for {who}, ")
        assert told[1].startswith(f"{beginning}{who} did not join within 11 s (JOIN_TIMEOUT)")
        assert "Traceback" not in stderr


# -- restarts -------------------------------------------------------------------------


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
    """All processes find each other once more, and know that this is the same job."""
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
    assert len({job for _, job in starts}) == 1
    assert sorted(rank for rank, _ in starts) == ["0", "0", "1", "1"]


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
    assert "a node has joined: saving a checkpoint and restarting with it" in said
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
        ({"NNODES": "3:2"}, "NNODES=3:2 must be MIN:MAX, whole numbers"),
        ({"NODE_RANK": "0", "RDZV_ID": ""}, "NNODES=2:3 requires RDZV_ID instead of NODE_RANK"),
        ({"ELASTIC_WAIT": "600"}, "ELASTIC_WAIT=600 must be less than JOIN_TIMEOUT=600"),
    ],
)
def test_elastic_nodes_refused(variables, told):
    elastic = {"NNODES": "2:3", "RDZV_ID": "a", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    assert told in refused(start(TORCHRUN, "--fake_data", **elastic | variables))


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
        "from xla_fsdp import launch_xla as xla; xla.FIRST_SECONDS = xla.EVERY_SECONDS = 1.0\n"
        "from xla_fsdp import environment; environment._has_tpu_chips = lambda: True\n"
        "tpu.num_available_chips = lambda: 4; sys.exit(program.main(sys.argv[1:]))"
    )
    flags = ["--fake_data", "--batch_size", "8", "--ckpt_dir", tmp_path / "run"]
    run = start(sys.executable, "-c", program, *flags, **slice_of_two)
    told = "all 2 hosts of the slice; this is host 1 (0: a, ... 1: b)"
    read_until(run, told)
    read_until(run, told)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == -signal.SIGINT
    run.communicate()  # until the one that told has ended, too
