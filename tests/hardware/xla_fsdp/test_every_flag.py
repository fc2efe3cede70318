"""Two steps with every value of every flag: on a rehearsed TPU, by FSDP2, Megatron-FSDP and
SimpleFSDP; compiled, too.

The values come from the flags' fields (``tests/support/every_flag.py``): a new flag needs nothing
here. What is refused must be named here, with the reason.
"""

import json
from dataclasses import replace

import pytest

from gpu_fsdp import resolve_gpu
from run_vit_training import BACKEND_CONFIGS, check_mode_flags, read_flags
from tests.fakes.rehearsal.slice_ import Slice
from tests.support.cli import Result, run_program, train_tiny
from tests.support.flag_values import (
    BASE,
    NOT_IN_FORM,
    NOT_ON_GPUS,
    assert_trained,
    lines_of,
    write_sources,
)
from tests.support.rehearsed import all_ended
from training.config import RunConfig
from training.flags import by_field
from training.mesh import replicas
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import parse_topology

pytestmark = pytest.mark.rehearse

HOST = Slice("v5p-8", (2, 2, 1))
ONE_CHIP = Slice("v6e-1", (1, 1, 1), (1, 1, 1))
TOPOLOGY = "v5e:2x2"


NO_KERNELS = "a Pallas kernel runs on a TPU alone; compiled below"
NOT_ON_THE_HOST = {
    "--attention flash": NO_KERNELS,
    "--attention whole": NO_KERNELS,
    "--attention plain": "TorchTPU only",
    "--matmul fp8": "TorchTPU only",
    "--grad_ckpt offload": "XLA's partitioner for the CPU knows no memory of a host; see below",
    "--backend cuda": "another backend",
    "--backend torchtpu": "another backend: tests/hardware/torchtpu",
    "--precision fp16": "GPUs only",
    "--domain_attention ulysses": "GPUs only",
    "--mesh_fsdp 2": "four devices: tests/integration/training/test_mesh.py has it with other axes",
}


@pytest.fixture(scope="module")
def data(digits, tmp_path_factory):
    """A folder with the data and weights that ``tests/support/every_flag.py`` names."""
    folder = tmp_path_factory.mktemp("sweep")
    write_sources(digits, folder)
    train_tiny(folder / "teacher")
    return folder


@pytest.fixture(autouse=True)
def without_a_login(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")  # here, where flags are resolved, and below


def on_slice(words):
    flags = read_flags(words)
    check_mode_flags(flags)
    run, asked = flags.run, flags.xla.tpu_topology
    if run.sharding.mesh_dcn == "slices":  # the rehearsed host is one
        run = replace(run, sharding=replace(run.sharding, mesh_dcn=1))
    slices = replicas(run.sharding)
    topology = parse_topology(asked, slices) if asked else parse_topology("v5p:2x2x1")
    return resolve_for_slice(run, flags.xla, topology)


def test_on_a_rehearsed_tpu(data, slice_of, tmp_path):
    said = []
    for number, line in enumerate(lines_of("xla", data, on_slice, NOT_ON_THE_HOST)):
        form = on_slice(line).backend_config.xla_fsdp
        host = slice_of(ONE_CHIP if form == "nested" else HOST)
        run = tmp_path / f"run_{number}"
        started = host.start(*line, "--ckpt_dir", run)
        try:
            all_ended(started)
            assert_trained(Result(run), line)
        except AssertionError as error:
            said.append(f"{' '.join(line)}\n{error}")
    assert not said, "\n\n".join(said)


OF_TEACHERS = {
    *("teacher", "teacher_weights", "distillation_type", "distillation_alpha", "distillation_tau")
}
"""Fields of flags that --compile_only refuses."""


@pytest.mark.parametrize("form", ["fsdp2", "megatron", "simple"])
def test_on_gpus(form, data, tmp_path, monkeypatch):
    monkeypatch.setattr(resolve_gpu, "check_megatron_runs_here", lambda: None)

    def resolve(words):
        with monkeypatch.context() as patched:
            patched.setenv("WORLD_SIZE", "2")
            flags = read_flags(words)
            check_mode_flags(flags)
            return resolve_gpu.resolve(flags.run, flags.torch)

    base = BASE | {"backend": "--backend cuda", "fsdp": f"--fsdp {form}"}
    chosen = ("backend", "fsdp")
    if form == "simple":
        base["compile"], chosen = "--compile", (*chosen, "compile")
    refused = NOT_ON_GPUS | NOT_IN_FORM[form]
    lines = lines_of("torch", data, resolve, refused, base=base, form=chosen)
    said = []
    for number, line in enumerate(lines):
        run = tmp_path / f"run_{number}"
        done = run_program("run_vit_training.py", *line, "--ckpt_dir", str(run), processes=2)
        if done.returncode:
            said.append(f"{' '.join(line)}\n{done.stderr}")
        else:
            assert_trained(Result(run), line)
    assert not said, "\n\n".join(said)


IN_THE_STEP = ("model (", "optimization", "sharding", "XLA")
"""Groups of flags that change the step."""
NOT_COMPILED = {
    "--attention plain": "TorchTPU only",
    "--matmul fp8": "TorchTPU only",
    "--mesh_dcn slices": "there are none that could be counted",
    "--mesh_fsdp 2": "four devices: tests/integration/training/test_mesh.py has it with other axes",
    "--precision fp16": "GPUs only",
    "--domain_attention ulysses": "GPUs only",
}


def test_compiled_for_a_tpu(data):
    known = by_field(RunConfig, BACKEND_CONFIGS["xla"])
    fields = {"grad_accum_steps"} | {
        name for name, each in known.items() if each.group.startswith(IN_THE_STEP)
    }
    base = BASE | {"compile_only": f"--compile_only --tpu_topology {TOPOLOGY}"}
    lines = lines_of("xla", data, on_slice, NOT_COMPILED, fields - OF_TEACHERS, base)
    said = []
    for line in lines:
        done = run_program("run_vit_training.py", "--json", *line)
        if done.returncode:
            said.append(f"{' '.join(line)}\n{done.stderr}")
        else:
            found = json.loads(done.stdout)
            assert found["fits"], line
            # Of one graph: the state again, and nothing as large as the model.
            assert found["graphs"] > 1 or found["output_bytes"] < found["argument_bytes"], line
    assert not said, "\n\n".join(said)
