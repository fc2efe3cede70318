"""The environment: what torch_xla could not run with, or would compute something else with."""

import os

import pytest

from tests.fakes.rehearsal.slice_ import MetadataServer, Slice
from tests.support.cli import tiny
from tests.support.usage_error import told_in_one_line
from xla_fsdp import environment as of_xla

BF16 = "unset it and use --precision bf16"
NO_TPU = "PJRT_DEVICE=TPU, but this machine has no TPU chips: unset it, or use PJRT_DEVICE=CPU"
NO_SERVER = "metadata server does not answer"


def told(capsys, folder, monkeypatch, variables, *flags):
    for name in ("PJRT_DEVICE", "RANK", "WORLD_SIZE", "TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    for each in variables.split():
        monkeypatch.setenv(*each.split("=", 1))
    line = told_in_one_line(capsys, *tiny(folder / "run"), "--backend", "xla", *flags)
    assert not (folder / "run").exists()
    return line


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("XLA_USE_BF16=1", f"incompatible with XLA_USE_BF16=1: {BF16}"),
        ("XLA_DOWNCAST_BF16=1", BF16),
        ("XLA_USE_FP16=1", f"incompatible with XLA_USE_FP16=1: {BF16}"),
        ("XLA_DOWNCAST_FP16=1", BF16),
        ("XLA_USE_32BIT_LONG=1", "unset it, checkpoints contain 64-bit integers"),
        ("XLA_RNG_BIT_GENERATOR=philox", "unset it, it changes dropout's random numbers"),
        ("XLA_RNG_BIT_GENERATOR=three_fry", "unset it, it changes dropout's random numbers"),
        ("XLA_USE_EAGER_DEBUG_MODE=1", "unset it, eager tensors cannot be sharded"),
        ("PT_XLA_DEBUG=true", "torch_xla parses it as an integer, use 1"),
        ("RANK=1", "start without torchrun, or unset RANK and WORLD_SIZE"),
        ("WORLD_SIZE=2", "start without torchrun"),
        ("RANK=0 WORLD_SIZE=2", "incompatible with WORLD_SIZE=2: start without torchrun"),
        ("PJRT_DEVICE=TPU", NO_TPU),
        ("PJRT_DEVICE=CUDA", "supports TPU and CPU only: unset it, or use --backend cuda for GPUs"),
        ("PJRT_DEVICE=cpu", "PJRT_DEVICE=cpu: --backend xla supports TPU and CPU only: unset it"),
    ],
)
def test_refused(variables, words, capsys, tmp_path, monkeypatch):
    assert words in told(capsys, tmp_path, monkeypatch, variables)


def test_a_vm_of_compute_engine_is_described_by_variables(monkeypatch):
    """As its metadata has them; those that are set stay. The Cloud TPU API's need none."""
    for name in os.environ:
        if name.startswith("TPU_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(of_xla, "_has_tpu_chips", lambda: True)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("TPU_TOPOLOGY_WRAP", "true,true,true")
    for on_compute_engine, expected in (
        (False, {}),
        (
            True,
            {
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_ACCELERATOR_TYPE": "v5p-16",
                "TPU_WORKER_ID": "1",
                "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2",
                "TPU_TOPOLOGY": "2x2x2",
                "TPU_HOST_BOUNDS": "1,1,2",
                "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
            },
        ),
    ):
        slice_ = Slice("v5p-16", (2, 2, 2), on_compute_engine=on_compute_engine)
        server = MetadataServer(slice_.metadata(1))
        url = f"http://127.0.0.1:{server.port}/computeMetadata/v1/instance/attributes/"
        monkeypatch.setattr(of_xla, "METADATA_URL", url)
        monkeypatch.setattr(os, "environ", os.environ.copy())
        of_xla.check_device()
        server.close()
        found = {name: value for name, value in os.environ.items() if name.startswith("TPU_")}
        assert found == {"TPU_TOPOLOGY_WRAP": "true,true,true"} | expected


@pytest.mark.parametrize(
    "mode", ["--compile_only --tpu_topology v5e:2x2", "--plan --tpu_topology v5e:2x2"]
)
def test_refused_where_a_step_is_traced(mode, capsys, tmp_path, monkeypatch):
    assert BF16 in told(capsys, tmp_path, monkeypatch, "XLA_USE_BF16=1", *mode.split())


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("PJRT_DEVICE=TPU", NO_SERVER),
        ("PJRT_DEVICE=", NO_SERVER),  # as if it were not set
        (
            "TPU_SKIP_MDS_QUERY=1",
            "TPU_ACCELERATOR_TYPE= does not name a slice, which TPU_SKIP_MDS_Q",
        ),
        ("TPU_LIBRARY_PATH=/no/libtpu.so", "TPU_LIBRARY_PATH=/no/libtpu.so: file not found"),
    ],
)
def test_of_a_tpu_host(variables, words, capsys, tmp_path, monkeypatch):
    """In a container without the host's network: this machine's, with chips on its bus."""
    monkeypatch.setattr(of_xla, "_has_tpu_chips", lambda: True)
    assert words in told(capsys, tmp_path, monkeypatch, variables)


def test_a_tpu_without_libtpu(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(of_xla, "_has_tpu_chips", lambda: True)
    found = of_xla.importlib.util.find_spec
    monkeypatch.setattr(
        of_xla.importlib.util, "find_spec", lambda name: None if name == "libtpu" else found(name)
    )
    line = told(capsys, tmp_path, monkeypatch, "PJRT_DEVICE=TPU")
    assert "the package libtpu is not installed: python3 -m pip install -r" in line
