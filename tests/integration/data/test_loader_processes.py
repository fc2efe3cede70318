"""Loader processes that are forked from a server, as where a TPU's runtime has threads."""

import multiprocessing
import os
import secrets
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from data.config import OPENED_BY
from data.files import DataFolderError
from data.open import open_data
from data.pack import pack
from data.source import DatasetRequest, View
from tests.fakes.pod import wait_until
from tests.support.cli import Result, run_program, tiny
from tests.support.loading import EVERYTHING, arguments, check_same
from tests.support.marks import long
from tests.support.own_view import DetailAndOverview
from tests.support.running import running_with
from tests.support.table_files import write_tables


@pytest.fixture
def from_a_server():
    """As a device that has such threads asks for it."""
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method("fork", force=True)


@pytest.fixture(scope="module")
def folders(digits, tmp_path_factory):
    """Where the images of each source are, with what else it is asked for."""
    made = tmp_path_factory.mktemp("made")
    tables = write_tables(digits, made)
    pack(str(digits), str(made / "shards"), 100_000, 1)
    for split in ("train", "val"):
        folder = made / "volumes" / split / "a"
        folder.mkdir(parents=True)
        for number in range(8):
            generator = np.random.default_rng(number)
            np.save(folder / f"{number}.npy", generator.integers(0, 9, (11, 14, 21), np.uint16))
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    return {
        "folder": {"data_dir": digits},
        "webdataset": {"data_dir": made / "shards"},
        "digits": {"data_dir": ""},
        "mnist": {"data_dir": ""},
        "mosaics": {"data_dir": "", **plain},
        "volumes": {"data_dir": made / "volumes", "batch_size": 4, **plain},
        "parquet": {"data_dir": tables / "parquet"},
        "huggingface": {"data_dir": tables / "saved"},
    }


WHOLE_IMAGES = View()


def open_source(folders, source, workers, view=WHOLE_IMAGES):
    values = {"batch_size": 50, **folders[source], "data_source": source, "num_workers": workers}
    size = (8, 8, 16) if source == "volumes" else (16, 16)
    channels = 1 if source in ("volumes", "mosaics") else 3
    config = arguments(values.pop("data_dir"), **values)
    return open_data(DatasetRequest(config, channels, size, 10, 3, view=view))


def first_of(loader):
    batches = loader.epoch(1)
    first = next(batches)
    batches.close()
    return first


@pytest.mark.parametrize(
    "source", ["folder", *map(long, sorted({*OPENED_BY} - {"folder", "fake"}))]
)
def test_the_same_images(source, folders, from_a_server):
    here, there = (open_source(folders, source, workers) for workers in (0, 1))
    for open_loader in ("train_loader", "val_loader"):
        found = [first_of(getattr(each, open_loader)(4, EVERYTHING)) for each in (here, there)]
        check_same(*reversed(found))


def test_a_view_of_a_users_own(folders, from_a_server):
    """It is sent to the processes, with the transforms that it has made."""
    here, there = (open_source(folders, "folder", n, DetailAndOverview()) for n in (0, 1))
    for split in ("train", "val"):
        found, expected = (
            first_of(each.splits[split].batches(4, EVERYTHING)) for each in (there, here)
        )
        assert found.keys() > {"detail", "overview"}
        check_same(found, expected)


def test_they_end_with_their_loader_not_by_a_signal(folders, from_a_server):
    loader = open_source(folders, "digits", 1).train_loader(50, EVERYTHING)
    first_of(loader)
    (worker,) = loader._loader._iterator._workers
    stat = Path(f"/proc/{worker.pid}/stat").read_text()
    server = int(stat.rpartition(")")[2].split()[1])
    assert server not in (os.getpid(), os.getppid())
    for pid in (server, worker.pid):  # as from a terminal or torchrun, to the whole group
        os.kill(pid, signal.SIGINT)
    os.kill(server, signal.SIGTERM)
    assert worker.is_alive()
    assert len([*loader.epoch(2)]) == len(loader)
    del loader
    worker.join(10)
    assert not worker.is_alive()
    os.kill(server, 0)


KILLED = """
import multiprocessing, os, signal
from tests.integration.data.test_loader_processes import EVERYTHING, first_of, open_source

multiprocessing.set_start_method("forkserver")
loader = open_source({"digits": {"data_dir": ""}}, "digits", 2).train_loader(50, EVERYTHING)
first_of(loader)
os.kill(os.getpid(), signal.SIGKILL)
"""
FOLDER_OF_SOCKETS = """
import multiprocessing, os
from multiprocessing.util import get_temp_dir
from tests.integration.data.test_loader_processes import EVERYTHING, first_of, open_source

multiprocessing.set_start_method("forkserver")
first_of(open_source({"digits": {"data_dir": ""}}, "digits", 1).train_loader(50, EVERYTHING))
print(get_temp_dir(), oct(os.stat(get_temp_dir()).st_mode & 0o777))
"""
NO_FOLDER = """
import os
from multiprocessing.util import get_temp_dir
from tests.integration.data.test_loader_processes import EVERYTHING, first_of, open_source

loader = open_source({"digits": {"data_dir": ""}}, "digits", 1).train_loader(50, EVERYTHING)
os.rmdir(get_temp_dir())
first_of(loader)
"""


def test_sockets_are_in_a_folder_of_this_user_that_is_removed(tmp_path, monkeypatch):
    """Those of the server that loader processes are forked from, too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ended = run_program("-c", FOLDER_OF_SOCKETS)
    assert ended.returncode == 0, ended.stderr
    folder, mode = ended.stdout.split()
    assert mode == "0o700"
    assert not Path(folder).exists()
    assert not [*tmp_path.glob("pymp-*")]


def test_no_sockets_in_a_folder_of_a_long_path(tmp_path, monkeypatch):
    monkeypatch.setattr("data.loader.get_temp_dir", lambda: str(tmp_path / ("long" * 25)))
    with pytest.raises(DataFolderError, match=r"socket \(AF_UNIX path too long\): set TMPDIR"):
        open_source({"digits": {"data_dir": ""}}, "digits", 1)


def test_images_that_cannot_be_handed_over_end_the_run():
    """As where someone has removed old files from /tmp: the parent does not wait for them."""
    ended = run_program("-c", NO_FOLDER)
    told = "loader processes cannot send images to the training process (No such file or directory)"
    assert told in ended.stderr


@pytest.mark.parametrize(("kib", "steps"), [(64, 2), long(16, 0)])
def test_shared_memory_as_small_as_some_containers_have(kib, steps, tmp_path):
    """Images are not there, but locks are: too many for a second loader, or for one."""
    inside = f'mount -t tmpfs -o size={kib}k tmpfs /dev/shm && exec "$@"'
    alone = ["unshare", "-Urm", "sh", "-c", inside, "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount anything, not even in a namespace")
    flags = ["--backend", "cuda", "--num_workers", "1", "--max_steps", "2"]
    ended = run_program("run_vit_training.py", *tiny(tmp_path), *flags, warm=False, by=alone)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "cannot send images to the training process (No space left on device)" in last
    if steps:
        assert [*Result(tmp_path).steps] == [1, 2]


@pytest.mark.long
def test_they_end_with_a_killed_process(monkeypatch):
    mark = secrets.token_hex(8)
    monkeypatch.setenv("LOADED_BY", mark)
    ended = run_program("-c", KILLED, warm=False)
    assert ended.returncode == -signal.SIGKILL
    wait_until(lambda: not [*running_with(f"LOADED_BY={mark}")])
