import contextlib
import gc
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data.digits import write_digits
from tests.fakes.pod import StandIn, workers_here
from tests.support import shared
from tests.support.cli import ALL_DIGITS, DIGITS, train_tiny, train_tiny_gpu
from tests.support.features import TRAIN, VAL, backbone
from tests.support.rehearsed import Rehearsal
from tests.support.shared import made_once
from tests.support.short_runs import train_ten_steps

# Begun in a shell's background or by nohup, pytest would hand down that these are ignored, and
# a shell script cannot trap what it was born to ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Otherwise each of hundreds of programs would compile the project's modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Flags are resolved as on a machine without a TPU, wherever the tests run.
os.environ["PJRT_DEVICE"] = "CPU"
os.environ.pop("CPU_NUM_DEVICES", None)
# Tests share a few cores: threads that wait for each other there take up to eight times as long for
# the small tensors of a test.
torch.set_num_threads(1)
gc.disable()  # until the tests are collected: nothing of the modules that they import is garbage


def pytest_addoption(parser):
    parser.addoption("--part", default="1/1", help="K/N: the tests K, K + N, K + 2N, ... alone")


def pytest_configure():
    """The embedded data set, also where `make data` was not run: here, before there are workers."""
    shared.begin()
    write_digits(ALL_DIGITS)
    if not DIGITS.exists():
        with tempfile.TemporaryDirectory(dir=DIGITS.parent) as folder:
            copy = shutil.copytree(ALL_DIGITS, Path(folder) / "copy")
            for number, image in enumerate(sorted(copy.glob("val/*/*.png"))):
                if number % 4:
                    image.unlink()
            copy.rename(DIGITS)


def pytest_unconfigure():
    shared.end()
    gc.freeze()  # pytest collects garbage five times, of millions of objects


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    gc.enable()
    # The quick files last: then no worker has long to do when the others are done.
    items.sort(key=lambda item: item.get_closest_marker("fast") is not None)
    part, parts = map(int, config.getoption("--part").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {part}/{parts}: from 1/{parts} to {parts}/{parts}")
    left = items.copy()
    items[:] = left[part - 1 :: parts]
    del left[part - 1 :: parts]
    config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def quick_garbage_collection():
    """The program collects garbage whenever it ends, in some tests in this process: without this,
    it would search the millions of objects of modules and of other tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    """What programs leave in the temporary folder goes with the other folders of the tests."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))
    tempfile.tempdir = None  # it was asked for before, by pytest


@pytest.fixture(autouse=True)
def same_numbers():
    """What a test draws without a seed of its own is the same in each run of the tests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def digits():
    return ALL_DIGITS


@pytest.fixture(params=["pipe", "/dev/zero"])
def endless(request, tmp_path):
    """What links lead to, for files that are not read: neither has an end."""
    if request.param == "pipe":
        os.mkfifo(tmp_path / "pipe")
        return tmp_path / "pipe"
    return request.param


@pytest.fixture
def pod_of(tmp_path):
    """Makes a pod of so many workers; what runs on them must have ended with the test."""
    with contextlib.ExitStack() as here:
        made = []

        def make(workers, *, alone=False):
            here.enter_context(workers_here(alone=alone))
            made.append(StandIn(tmp_path, workers))
            return made[-1]

        yield make
        assert not any(pod.left_running() for pod in made)


@pytest.fixture
def pod(pod_of):
    return pod_of(4)


@pytest.fixture
def slice_of(tmp_path):
    """Makes slices; their servers end with the test."""
    made = []

    def make(what):
        folder = tmp_path / f"slice_{len(made)}"
        folder.mkdir()
        made.append(Rehearsal(what, folder))
        return made[-1]

    yield make
    for rehearsal in made:
        rehearsal.close()


@pytest.fixture(scope="session")
def tiny_on_xla():
    """The run of train_tiny, one device, that those of other forms are compared with."""
    return made_once("tiny_on_xla", train_tiny)


@pytest.fixture(scope="session")
def tiny_on_xla_in_bf16():
    return made_once("tiny_on_xla_in_bf16", lambda at: train_tiny(at, "--precision", "bf16"))


@pytest.fixture(scope="session")
def tiny_on_gpu():
    """The run of train_tiny_gpu, one process."""
    return made_once("tiny_on_gpu", train_tiny_gpu)


@pytest.fixture(scope="session")
def trained():
    """A finished run of a few seconds, with checkpoints of steps 5 and 10."""
    return made_once("trained", train_ten_steps)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run's folder, to be spoiled."""
    return shutil.copytree(trained.ckpt_dir, tmp_path / "run")


@pytest.fixture(scope="module")
def images(digits, tmp_path_factory):
    """A few digits of each split, in an order that is not their number's, and a broken one."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", TRAIN), ("val", VAL)):
        paths = sorted((digits / split).glob("*/*.png"))
        for number, path in enumerate(paths[:: len(paths) // count][:count]):
            target = root / split / path.parent.name / f"{99 - number:02}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (root / "train" / "3" / "broken.png").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "backbone.safetensors"
    save_file({name: each.contiguous() for name, each in backbone().state_dict().items()}, path)
    return path
