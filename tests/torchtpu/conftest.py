"""The tests of TorchTPU: `make test-torchtpu` runs them, in an environment of their own."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import cli

SHIM = Path(__file__).parent / "pjrt_shim.c"


@pytest.fixture(scope="session", autouse=True)
def tpu(temporary_folder, tmp_path_factory):
    """XLA's plugin for the host's processor, as that of a TPU."""
    plugin = importlib.util.find_spec("lammps_jax_pjrt_cpu")
    if plugin is None or importlib.util.find_spec("torch_tpu") is None:
        pytest.skip(
            "without torch_tpu and a plugin for the processor: `make test-torchtpu` has both"
        )
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) here, which makes the plugin one that torch_tpu takes")
    shim = tmp_path_factory.mktemp("plugin") / "pjrt_shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", shim, SHIM, "-ldl"], check=True)
    folder = plugin.submodule_search_locations[0]
    cli.OF_TORCHTPU.update(
        TPU_LIBRARY_PATH=str(shim),
        PJRT_CPU_PLUGIN=os.path.join(folder, "pjrt_c_api_cpu_plugin.so"),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",  # the stand-in has to come first
    )
    return shim


@pytest.fixture(scope="session")
def tiny_on_tpu(tmp_path_factory):
    """The run of train_tiny_tpu, one process: blocks compiled, as by default."""
    return cli.train_tiny_tpu(tmp_path_factory.mktemp("tiny_on_tpu"))
