"""Another user of the machine, at every port of a run of launch/torchrun.sh."""

import os
import pickle
import signal
import subprocess
import sys
from base64 import b64decode, b64encode
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from launch.torchrun import CheckedBackend
from tests.fakes.pod import wait_until
from tests.support.cli import tiny
from tests.support.launching import TORCHRUN, finish, start

ENDLESS = "--num_epochs 9999 --max_steps 99999 --test_epoch_interval 9999"
NOBODY = 65534


class Bomb:
    """Its pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def listeners(pid: int) -> set[tuple[str, int]]:
    """The addresses, in hexadecimal digits, and ports where a process and its children listen."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    sockets = {
        os.readlink(each)
        for each in Path(f"/proc/{pid}/fd").iterdir()
        if each.is_symlink()  # the folder's own may be gone
    }
    found = set[tuple[str, int]]().union(*(listeners(int(child)) for child in children))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:  # TCP_LISTEN
                address, _, port = words[1].partition(":")
                found.add((address, int(port, 16)))
    return found


ATTACK = f"""
import encodings.idna, os, socket, struct, sys  # before it cannot read them

os.setuid({NOBODY})
key, value = b"/torch.rendezvous.none", sys.argv[1].encode()
message = struct.pack("=BI", 0, 0x3C85F7CE)  # TCPStore's greeting
message += struct.pack("=BQ", 1, len(key)) + key + struct.pack("=Q", len(value)) + value  # set
message += bytes([7])  # how many keys are there?
for port in sys.argv[2:]:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as store:
            store.sendall(message)
            answer = store.recv(64)
    except OSError:
        continue
    if len(answer) == 8:
        print(port)
"""
"""Replace the state of torchrun's rendezvous wherever there is a store; print where that was."""


def attack(state: object, *ports: int) -> str:
    planted = b64encode(pickle.dumps(state)).decode()
    words = [sys.executable, "-c", ATTACK, planted, *map(str, ports)]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_reaches_no_store_of_one_node(tmp_path):
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=9), False)
    assert attack("state", store.port) == f"{store.port}\n"
    assert pickle.loads(b64decode(store.get("torch.rendezvous.none"))) == "state"

    run, bomb = tmp_path / "run", tmp_path / "exploded"
    words = [*tiny(run), *ENDLESS.split(), "--local_ckpt_dir", tmp_path / "local"]
    process = start(TORCHRUN, *words, NPROC_PER_NODE="2")
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists() or process.poll() is not None)
        found = listeners(process.pid)
        assert found
        assert {address for address, _ in found} == {"0100007F"}  # 127.0.0.1
        assert attack(Bomb(bomb), *(port for _, port in found)) == ""
    finally:
        process.terminate()
        code, stdout, stderr = finish(process)
    assert code == 128 + signal.SIGTERM, stderr
    assert "training stopped by SIGTERM" in stdout
    assert not bomb.exists()


def test_torchrun_unpickles_no_code(tmp_path):
    """Nor does it on several nodes, where others may reach the store."""
    store, bomb = HashStore(), tmp_path / "exploded"
    backend = CheckedBackend(C10dRendezvousBackend(store, "job-1"))
    node = create_handler(store, backend, RendezvousParameters("c10d", "", "job-1", 1, 1))
    assert node.next_rendezvous().world_size == 1  # reads states of its own
    for planted in (pickle.dumps(Bomb(bomb)), pickle.dumps({Bomb(bomb)}), b"no pickle"):
        store.set("torch.rendezvous.job-1", b64encode(planted).decode())
        with pytest.raises(RendezvousStateError, match="the rendezvous state is not torchrun's: "):
            backend.get_state()
        with pytest.raises(RendezvousStateError):
            backend.set_state(b"", b"an old token")
    assert not bomb.exists()
