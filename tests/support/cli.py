"""Run the real command line and read what it wrote."""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.shared import made_once

ROOT = Path(__file__).resolve().parents[2]
ALL_DIGITS = ROOT / "datasets" / "digits"
DIGITS = ROOT / "datasets" / "digits_of_tests"
"""Of these a quarter of the validation images: to evaluate all takes a fifth of a tiny run."""
VAL_IMAGES = 90
"""So many these are."""

TINY_MODEL = (
    "--image_size 16 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 2 --num_classes 10"
).split()
TINY_SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
"""Those of ``TINY_MODEL`` by timm's names, for any number of classes."""
TINY_RUN = (
    "--batch_size 16 --num_epochs 2 --warmup_steps 4 --lr 1e-2 --num_workers 0 "
    "--log_step_interval 1 --max_steps 6"
).split()


@dataclass
class Result:
    """A finished run: what it printed, what it left in --ckpt_dir."""

    ckpt_dir: Path
    stdout: str = ""
    stderr: str = ""

    @property
    def records(self) -> list[dict]:
        lines = (self.ckpt_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def steps(self) -> dict[int, dict]:
        return {r["step"]: r for r in self.records if "loss" in r}

    @property
    def evaluations(self) -> list[dict]:
        return [r for r in self.records if "val_loss" in r]

    @property
    def run_file(self) -> dict:
        return json.loads((self.ckpt_dir / "run.json").read_text())

    def column(self, name: str) -> list[float]:
        return [record[name] for _, record in sorted(self.steps.items())]


WARM_PYTHON = "tests/support/warm_python.py"
WARM_SERVER = "tests/support/warm_server.py"
WARM_MODULES = (
    "torchvision.transforms.v2 timm.models.vision_transformer timm.loss timm.optim tensorboardX "
    "torch.distributed.run torch.distributed.fsdp torch.distributed.checkpoint "
    "matplotlib.pyplot matplotlib.backends.backend_agg fsspec safetensors.torch simplejpeg "
    "PIL.PngImagePlugin torch.utils.flop_counter run_vit_training training.prepare "
    "data.classes data.image_folder training.objectives.classify torch_fsdp.launch_torch "
    "torch_fsdp.torch_backend torch_fsdp.fsdp2 gpu_fsdp.resolve_gpu"
).split()
WARM_XLA = (
    "torch_xla torch_xla.distributed.fsdp torch_xla.utils.checkpoint xla_fsdp.launch_xla "
    "xla_fsdp.xla_backend xla_fsdp.parallelize xla_fsdp.spmd xla_fsdp.profiler "
    "xla_fsdp.resolve_xla xla_fsdp.estimates training.step_sizes"
).split()
HAS_XLA = importlib.util.find_spec("torch_xla") is not None
"""False in the environment of PyTorch's newest version, for which there is no torch_xla."""
WARM_TORCHTPU = "torch_tpu torch._dynamo torch._functorch.aot_autograd".split()

HIDE_GPUS = True
"""Tests run on the CPU, in as many processes as they like; tests/hardware/gpu sets this."""
TORCHTPU = "tests.fakes.torchtpu_on_cpu"
OF_TORCHTPU: dict[str, str] = {}
"""The variables of programs in TorchTPU's environment; tests/hardware/torchtpu sets this."""


def environment() -> dict[str, str]:
    """XLA on the CPU, and quick compilation: the tests' programs run a few steps only."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if HIDE_GPUS else {}
    # JAX sets the last one when a test imports it.
    unset = {"CPU_NUM_DEVICES", "PJRT_DEVICE", "XLA_FLAGS", "TPU_SKIP_MDS_QUERY"}
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    return kept | {
        **hidden,
        "PJRT_DEVICE": "CPU",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=2",
        "OMP_NUM_THREADS": "1",  # as torchrun sets it: the tests share a few cores
        **OF_TORCHTPU,
    }


@functools.cache
def warm_python(*backend: str) -> str:
    """The socket of tests/support/warm_server.py, which ends when all tests have ended.

    ``backend``: the modules that it imports besides those of all programs.
    """

    def serve(folder: Path) -> str:
        path = f"{folder}/socket"
        modules = [*WARM_MODULES, *backend]
        until = os.environ["SHARED_UNTIL_END_OF"]
        command = [sys.executable, WARM_SERVER, path, until, *modules]
        # It outlives this worker: what it held open of its pipes would be waited for.
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        while not os.path.exists(path):
            assert server.poll() is None, f"{WARM_SERVER} has ended"
            time.sleep(0.05)
        return path

    return made_once("_".join(["warm_python", *backend[:1]]), serve)


def command_of(
    *command: str, processes: int = 1, warm: bool = True
) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of a Python program; by torchrun if in several processes.

    ``warm`` saves the importing of PyTorch, and figures are blank; not used on GPUs. A program that
    is started so and killed ends by SIGTERM, and its process is not the one that was started.
    Megatron-FSDP, which needs CUDA, runs on the CPU by a stand-in for that.
    """
    variables, python = environment(), []
    if command[0] == "run_vit_training.py" and "megatron" in command and HIDE_GPUS:
        command = ("-m", "tests.fakes.megatron_on_cpu", *command[1:])
    if warm and HIDE_GPUS:
        backend = (
            WARM_TORCHTPU if OF_TORCHTPU else WARM_XLA if HAS_XLA and "cuda" not in command else []
        )
        variables["WARM_PYTHON"] = warm_python(*backend)
        python = [WARM_PYTHON]
    if processes > 1:
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
        command = (*torchrun, *python, *command)
    return [sys.executable, *python, *command], variables


def run_program(
    *command: str,
    processes: int = 1,
    warm: bool = True,
    by: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """A Python program, to its end.

    ``by``: the words of a command that starts it; ``variables``: in place of those of all programs.
    """
    words, usual = command_of(*command, processes=processes, warm=warm)
    return subprocess.run(
        [*by, *words],
        cwd=ROOT,
        env={**usual, **variables},
        text=True,
        capture_output=True,
        timeout=900,  # a busy machine compiles for minutes
        check=False,
    )


def need_xla() -> None:
    """Skip a test where there is no torch_xla."""
    if not HAS_XLA:
        pytest.skip("no torch_xla for this version of PyTorch")


def copy_launcher(folder: Path) -> None:
    """Copy ``launch/``, and what it imports, into a folder."""
    for part in ("launch", "training/processes"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "training" / "__init__.py", folder / "training")


def tiny(ckpt_dir: Path) -> list[str]:
    """The flags of six steps of a two-block model on digits."""
    source = ["--data_dir", str(DIGITS), "--hflip", "0", "--ckpt_dir", str(ckpt_dir)]
    return [*source, *TINY_MODEL, *TINY_RUN]


def train_tiny(
    ckpt_dir: Path, *flags: str, devices: int = 1, program: str = "", warm: bool = True
) -> Result:
    """Six steps of a two-block model on digits on XLA; must succeed. Later flags win.

    ``program`` is a module to run in place of run_vit_training.py.
    """
    need_xla()
    return _train(ckpt_dir, "--cpu_devices", str(devices), *flags, program=program, warm=warm)


def train_tiny_gpu(
    ckpt_dir: Path, *flags: str, processes: int = 1, program: str = "", warm: bool = True
) -> Result:
    """The same on the GPU backend: under torchrun, with gloo where there is no GPU."""
    flags = ("--backend", "cuda", *flags)
    return _train(ckpt_dir, *flags, processes=processes, program=program, warm=warm)


def train_tiny_megatron(ckpt_dir: Path, *flags: str, processes: int = 2) -> Result:
    """The same by Megatron-FSDP on the CPU."""
    return train_tiny_gpu(ckpt_dir, "--fsdp", "megatron", *flags, processes=processes)


def train_tiny_tpu(
    ckpt_dir: Path, *flags: str, processes: int = 1, program: str = TORCHTPU
) -> Result:
    """The same by TorchTPU on the CPU: in the environment of tests/hardware/torchtpu."""
    return _train(ckpt_dir, *flags, processes=processes, program=program)


def _train(ckpt_dir: Path, *flags: str, program: str = "", **how: Any) -> Result:
    start = ["-m", program] if program else ["run_vit_training.py"]
    done = run_program(*start, *tiny(ckpt_dir), *flags, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return Result(ckpt_dir, done.stdout, done.stderr)
