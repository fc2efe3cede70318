"""--backend torchtpu: what a TPU cannot do, and a host without one, in one line."""

import importlib.util
import shutil

import pytest

import run_vit_training
from tests.support.cli import DIGITS, TINY_MODEL
from tests.support.usage_error import told_in_one_line
from tools.compile_only import torchtpu
from torch_fsdp import devices, torch_tpu_private
from torch_fsdp.devices import Cuda, Tpu
from training.errors import UsageError

pytestmark = pytest.mark.fast


@pytest.fixture
def tpu_host(monkeypatch):
    """A host with four TPU devices and torch_tpu, as far as is asked before one starts."""
    monkeypatch.setattr(torch_tpu_private, "tpus_of_host", lambda: 4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fsdp megatron", "--fsdp megatron requires --backend cuda, not torchtpu"),
        ("--precision fp16", "--precision fp16 requires --backend cuda: on a TPU use bf16"),
        ("--compile_only", "--compile_only requires --tpu_topology, such as v5e:4x4; shapes by"),
        (
            "--compile_only --tpu_topology v5e:2x2,v5e:4x4",
            "--compile_only accepts one slice, not v5e:2x2,v5e:4x4",
        ),
        (
            "--compile_only --tpu_topology v5e:2x2 --tpu_compiler 0.0.52",
            "--tpu_compiler requires --backend xla, not torchtpu",
        ),
        ("--plan --fsdp fsdp2", "--plan with --backend torchtpu requires --fsdp simple, not fsdp2"),
        (
            "--plan --tpu_topology v5e:2x2 --tpu_compiler 0.0.52",
            "--tpu_compiler requires --backend xla, not torchtpu",
        ),
    ],
)
def test_refused(flags, words, tpu_host, capsys, tmp_path):
    source = ["--data_dir", DIGITS, *TINY_MODEL, "--batch_size", "16", "--ckpt_dir", tmp_path]
    line = told_in_one_line(capsys, "--backend", "torchtpu", *source, *flags.split())
    assert line.startswith(words)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("torch_tpu", "--compile_only with --backend torchtpu requires the package torch_tpu: "),
        ("libtpu", "--compile_only with --backend torchtpu requires the package libtpu: python3"),
        ("cc", "--compile_only with --backend torchtpu requires a C compiler, cc"),
    ],
)
def test_compilation_without_what_it_needs(missing, words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else 1)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else name)
    with pytest.raises(UsageError, match=f"^{words}"):
        torchtpu.check_installed("--compile_only")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tpu_topology v4:2x2x1", "--backend torchtpu does not support --tpu_topology v4:2x2x1"),
        ("--tpu_topology v5e:3x3 --json", "--tpu_topology v5e:3x3 does not exist"),
        (
            "--tpu_topology v5e:2x2 --teacher vit_10b --teacher_weights none",
            "--teacher is incompatible with --compile_only",
        ),
        (
            "--tpu_topology v5e:2x2 --explain --fsdp fsdp2",
            "--explain with --backend torchtpu requires --fsdp simple, without --no-compile",
        ),
        (
            "--tpu_topology v5e:2x2 --explain --no-compile",
            "--explain with --backend torchtpu requires --fsdp simple, without --no-compile",
        ),
        (
            "--tpu_topology v5e:2x2 --explain --fsdp simple --no-compile",
            "--explain with --backend torchtpu requires --fsdp simple, without --no-compile",
        ),
        (
            "--tpu_topology v5e:2x2 --mesh_tensor 2 --fsdp fsdp2",
            "--mesh_tensor 2 requires --fsdp simple or",
        ),
        (
            "--tpu_topology v5e:2x2 --run_without_fsdp",
            "--compile_only with --backend torchtpu compiles FSDP over all devices of a slice "
            "only, not mesh dcn 4: drop --run_without_fsdp",
        ),
        (
            "--tpu_topology v5e:2x2 --mesh_domain 2 --fsdp fsdp2",
            "--compile_only with --backend torchtpu and --mesh_domain 2 requires --fsdp simple, "
            "without --no-compile",
        ),
        ("--tpu_topology v5e:2x2 --mesh_fsdp 3", "--mesh_dcn 1 x --mesh_fsdp 3 x --mesh_tensor 1"),
    ],
)
def test_not_compiled(flags, words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torchtpu, "check_installed", lambda mode: None)
    monkeypatch.setattr(torchtpu, "warn_of_others", lambda *versions: None)
    asked = ["--backend", "torchtpu", "--compile_only", "--hlo_dir", tmp_path / "hlo"]
    line = told_in_one_line(capsys, *asked, *TINY_MODEL, *flags.split())
    assert line.startswith(words)
    assert not any(tmp_path.iterdir())


def test_not_compiled_for_gpus(capsys):
    asked = "--backend cuda --compile_only --tpu_topology v5e:2x2".split()
    line = told_in_one_line(capsys, *asked, *TINY_MODEL)
    assert line.startswith("--compile_only requires --backend xla or torchtpu, not cuda")


def test_more_processes_than_devices(tpu_host, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    line = told_in_one_line(capsys, "--backend", "torchtpu", "--fake_data", *TINY_MODEL)
    assert line.startswith("torchrun started 5 processes on this node, which has 4 x TPU")


def test_processes_that_no_launcher_of_tpus_has_started(tpu_host, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCH_TPU_TOPOLOGY", "1,2,1")
    line = told_in_one_line(capsys, "--backend", "torchtpu", "--fake_data", *TINY_MODEL)
    told = (
        "--backend torchtpu in several processes requires TORCH_TPU_SLICEBUILDER_ADDRESSES in the "
    )
    assert line.startswith(told)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (False, "--backend torchtpu requires the package torch_tpu, in a separate environment"),
        (True, "--backend torchtpu: torch_tpu finds no TPU on this host: check the output of tpu"),
    ],
)
def test_without_a_tpu(installed, words, capsys, monkeypatch):
    monkeypatch.setattr(torch_tpu_private, "tpus_of_host", lambda: 0 if installed else None)
    line = told_in_one_line(capsys, "--backend", "torchtpu", "--fake_data", *TINY_MODEL)
    assert line.startswith(words)


@pytest.mark.parametrize(
    ("packages", "devices_here", "chosen"),
    [
        ("torch_xla torch_tpu", "TPU", "xla"),
        ("torch_tpu", "TPU", "torchtpu"),
        ("torch_tpu", "", "cuda"),
        ("torch_xla", "GPU", "cuda"),
        ("", "GPU", "cuda"),
        ("torch_xla", "", "xla"),
        ("", "", "cuda"),
    ],
)
def test_auto(packages, devices_here, chosen, capsys, monkeypatch):
    """A TPU by what is installed, which is told; else CUDA; else the CPU by what is installed."""
    on_tpu = devices_here == "TPU"
    found = run_vit_training.importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: (name in packages or None) if name.startswith("torch_") else found(name),
    )
    monkeypatch.setattr("xla_fsdp.environment.device_type", lambda: "TPU" if on_tpu else "CPU")
    monkeypatch.setattr(torch_tpu_private, "tpus_of_host", lambda: 4 * on_tpu)
    monkeypatch.setattr(Cuda, "count", lambda self: int(devices_here == "GPU"))
    assert run_vit_training.choose_backend("auto") == chosen
    told = capsys.readouterr().err
    assert told.startswith(f"run_vit_training.py: --backend auto: using {chosen} (") == on_tpu
    assert Tpu in devices.KINDS["torchtpu"]
