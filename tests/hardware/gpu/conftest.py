"""Tests on one NVIDIA GPU. Without one all of them are skipped."""

import pytest
import torch

from tests.hardware.gpu.helpers import LEARN, LEARNED_STEPS
from tests.references.plain_training import train_plain
from tests.support import cli
from tests.support.cli import train_tiny_gpu


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="package")
def shown():
    """All other tests run on the CPU, wherever they are."""
    cli.HIDE_GPUS = False
    yield
    cli.HIDE_GPUS = True


@pytest.fixture(scope="session")
def plain():
    """Six steps of timm's model in plain PyTorch on the CPU."""
    return train_plain(1.0)


@pytest.fixture(scope="package")
def learned(tmp_path_factory):
    """A run whose weights matter: with a wrong one, the next loss would jump."""
    flags = [*LEARN, "--fsdp", "fsdp2", "--precision", "bf16"]
    folder = tmp_path_factory.mktemp("learned")
    run = train_tiny_gpu(folder, *flags, "--max_steps", str(LEARNED_STEPS))
    assert run.column("loss")[-1] < 0.5 * run.column("loss")[0]
    return run
