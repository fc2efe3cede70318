"""--profile on a GPU: the kernels, the table of operators, the memory snapshot."""

import gzip
import json
import pickle

import pytest

from tests.hardware.gpu.helpers import need_form
from tests.support.cli import train_tiny_gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["fsdp2", "megatron"])
def test_profile_of_two_steps(form, tmp_path):
    need_form(form)
    result = train_tiny_gpu(tmp_path, "--fsdp", form, "--profile", "2:3")
    assert "profile of steps 2 to 3" in result.stdout
    folder = tmp_path / "profile"
    with gzip.open(folder / "trace_0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert any("nccl" not in name for name in kernels)
    table = (folder / "operators_0.txt").read_text()
    assert "Self CUDA" in table
    assert "aten::" in table
    with (folder / "memory_0.pickle").open("rb") as snapshot:
        content = pickle.load(snapshot)
    assert content["segments"]
    assert any(event["action"] == "alloc" for trace in content["device_traces"] for event in trace)
