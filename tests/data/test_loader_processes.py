"""Loader processes that are forked from a server, as where a TPU's runtime has threads."""

import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import OPENED_BY
from data.pack import pack
from data.source import DatasetRequest, open_data
from tests.cli import ROOT, environment
from tests.data.test_data import EVERYTHING, arguments
from tests.data.test_tables import write_tables
from tests.marks import long
from tests.running import running_with
from tests.stand_ins.pod_stand_in import wait_until


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
    pack(str(digits), made / "shards", 100_000, 1)
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


def open_source(folders, source, workers):
    values = {"batch_size": 50, **folders[source], "data_source": source, "num_workers": workers}
    size = (8, 8, 16) if source == "volumes" else (16, 16)
    channels = 1 if source in ("volumes", "mosaics") else 3
    config = arguments(values.pop("data_dir"), **values)
    return open_data(DatasetRequest(config, channels, size, 10, 3))


def first_of(loader):
    batches = loader.epoch(1)
    first = next(batches)
    batches.close()
    return first


def test_every_source_is_here(folders):
    assert {*folders, "fake"} == {*OPENED_BY}


@pytest.mark.parametrize(
    "source",
    ["folder", *map(long, sorted({*OPENED_BY} - {"folder", "fake"}))],
)
def test_the_same_images(source, folders, from_a_server):
    """All that a process needs of a source is sent to it, and it draws the same."""
    here, there = (open_source(folders, source, workers) for workers in (0, 1))
    for open_loader in ("train_loader", "val_loader"):
        found = [first_of(getattr(each, open_loader)(4, EVERYTHING)) for each in (here, there)]
        assert all(map(torch.equal, *found))


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
from tests.data.test_loader_processes import EVERYTHING, first_of, open_source

multiprocessing.set_start_method("forkserver")
loader = open_source({"digits": {"data_dir": ""}}, "digits", 2).train_loader(50, EVERYTHING)
first_of(loader)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_they_end_with_a_killed_process():
    mark = secrets.token_hex(8)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=ROOT, env=environment() | {"LOADED_BY": mark}
    )
    assert ended.returncode == -signal.SIGKILL
    wait_until(lambda: not [*running_with(f"LOADED_BY={mark}")])
