"""The tests of TorchTPU: `make test-torchtpu` runs them, in an environment of their own."""

import pytest

from tests.hardware.torchtpu import plugin
from tests.support import cli


@pytest.fixture(scope="session", autouse=True)
def tpu(temporary_folder, tmp_path_factory):
    """XLA's plugin for the host's processor, as that of a TPU."""
    if reason := plugin.why_not():
        pytest.skip(reason)
    cli.OF_TORCHTPU.update(plugin.variables(tmp_path_factory.mktemp("plugin")))


@pytest.fixture(scope="session")
def tiny_on_tpu(tmp_path_factory):
    """The run of train_tiny_tpu, one process: a step is one program, as by default."""
    return cli.train_tiny_tpu(tmp_path_factory.mktemp("tiny_on_tpu"))
