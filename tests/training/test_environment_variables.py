"""Variables that PyTorch, torch_xla, torchrun, NCCL and libtpu document: each one leaves the losses
as they are, or ends the run in one line.

Listed are those that say which devices compute, how many, or what they compute; of those that only
print more, the ones that tutorials name. A variable of GPUs or TPUs changes nothing without them.
"""

import subprocess

import pytest

from tests.cli import ROOT, Result, command_of, need_xla, tiny
from tests.usage_error import told_in_one_line

# Where each variable is documented, or read.
XLA_SO = "_XLAC.cpython-311-x86_64-linux-gnu.so"
XLA_PY = "torch_xla/__init__.py"
XLA_RUNTIME = "torch_xla/runtime.py"
XLA_NAMES = "torch_xla/core/xla_env_vars.py"
XLA_DOCS = "https://docs.pytorch.org/xla/release/r2.9/learn/troubleshoot.html"
TORCH = "https://docs.pytorch.org/docs/2.9/torch_environment_variables.html"
DISTRIBUTED = "https://docs.pytorch.org/docs/2.9/distributed.html"
TORCHRUN = "https://docs.pytorch.org/docs/2.9/elastic/run.html"
NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
LIBTPU = "https://docs.cloud.google.com/tpu/docs/tpu-vm-env-vars"
JAX = "https://docs.jax.dev/en/latest/config_options.html"
PYTHON = "https://docs.python.org/3.11/using/cmdline.html#environment-variables"

SAME, ROUNDED = "the same losses", "the same but for rounding"
BF16 = "unset it and use --precision bf16"
NO_TPU = "this machine has no TPU chips"

ON_XLA = [
    # torch_xla: what is computed
    ("XLA_USE_BF16=1", XLA_SO, BF16),
    ("XLA_DOWNCAST_BF16=1", XLA_SO, BF16),
    ("XLA_USE_FP16=1", XLA_PY, BF16),
    ("XLA_DOWNCAST_FP16=1", XLA_PY, BF16),
    ("XLA_USE_32BIT_LONG=1", XLA_SO, "unset it, checkpoints have integers of 64 bits"),
    ("XLA_RNG_BIT_GENERATOR=philox", XLA_SO, "dropout would draw other numbers"),
    ("XLA_RNG_BIT_GENERATOR=three_fry", XLA_SO, "dropout would draw other numbers"),
    ("XLA_USE_EAGER_DEBUG_MODE=1", XLA_DOCS, "unset it, eager tensors cannot be sharded"),
    ("XLA_NO_SPECIAL_SCALARS=1", XLA_SO, SAME),
    ("XLA_DISABLE_FUNCTIONALIZATION=1", XLA_SO, SAME),
    ("XLA_EXPERIMENTAL=nonzero:masked_select", XLA_SO, SAME),
    ("XLA_DENSE_GATHER_FACTOR=1", XLA_SO, SAME),
    ("XLA_DENSE_SCATTER_FACTOR=1", XLA_SO, SAME),
    ("XLA_RESIZE_SPLIT_FACTOR=2", XLA_SO, SAME),
    ("XLA_MAX_PADDING_FACTOR=2", XLA_SO, SAME),
    ("XLA_TENSOR_UPDATE_SYNC=0", XLA_SO, SAME),
    ("XLA_ENABLE_PARAM_ALIASING=0", XLA_SO, SAME),
    ("XLA_STABLEHLO_COMPILE=1", XLA_SO, SAME),
    ("XLA_PARAMETER_WRAPPING_THREADSHOLD=1", XLA_SO, SAME),
    ("XLA_COMPILATION_CACHE_SIZE=1", XLA_SO, SAME),
    ("XLA_IR_SHAPE_CACHE_SIZE=1", XLA_SO, SAME),
    ("XLA_PERSISTENT_CACHE_PATH=cache", XLA_RUNTIME, SAME),
    ("XLA_ALWAYS_ALLREDUCE=1", "torch_xla/core/xla_model.py", SAME),
    ("XLA_SYNC_WAIT=1", "torch_xla/core/xla_model.py", SAME),
    ("XLA_RELEASE_GIL_DURING_TRANSFER=0", XLA_SO, SAME),
    ("XLA_THREAD_POOL_SIZE=1", XLA_SO, SAME),
    ("XLA_MAX_ASYNC_QUEUE=1", "torch_xla/utils/closures.py", SAME),
    # torch_xla: on what devices
    ("PJRT_DEVICE=", XLA_NAMES, SAME),
    ("PJRT_DEVICE=TPU", XLA_NAMES, NO_TPU),
    ("PJRT_DEVICE=CUDA", XLA_NAMES, "--backend xla runs on TPU and CPU, unset it"),
    ("XLA_USE_SPMD=1", XLA_RUNTIME, SAME),
    ("XLA_USE_SPMD=0", XLA_RUNTIME, SAME),
    ("XLA_AUTO_SPMD=1", XLA_RUNTIME, SAME),
    ("XLA_AUTO_SPMD_MESH=1,2", XLA_SO, SAME),
    ("XLA_AUTO_USE_GROUP_SHARDING=0", XLA_SO, SAME),
    ("CPU_NUM_DEVICES=4", XLA_NAMES, SAME),  # --cpu_devices is given
    ("PJRT_NPROC=1", XLA_SO, SAME),
    ("PJRT_CPU_ASYNC_CLIENT=0", XLA_NAMES, SAME),
    ("PJRT_DYNAMIC_PLUGINS=1", XLA_NAMES, SAME),
    ("PJRT_SELECT_DEFAULT_DEVICE=0", XLA_NAMES, SAME),
    ("PJRT_LOCAL_PROCESS_COUNT=2", XLA_NAMES, SAME),
    ("PJRT_LOCAL_PROCESS_RANK=1", XLA_NAMES, SAME),
    ("PJRT_DIST_SERVICE_ADDR=localhost:9999", XLA_NAMES, SAME),
    ("XLA_REGISTER_INSTALLED_PLUGINS=0", XLA_PY, SAME),
    ("XLA_USE_DUMMY_STORE=1", "torch_xla/distributed/xla_backend.py", SAME),
    ("XLA_FLAGS=--xla_force_host_platform_device_count=4", JAX, ROUNDED),  # other optimization
    ("XLA_FLAGS=--xla_cpu_enable_fast_math=true", XLA_PY, ROUNDED),
    # torch_xla: what is printed
    ("PT_XLA_DEBUG=1", XLA_DOCS, SAME),
    ("PT_XLA_DEBUG=true", XLA_DOCS, "torch_xla reads it as a number, use 1"),
    ("PT_XLA_DEBUG_LEVEL=2", XLA_DOCS, SAME),
    ("XLA_IR_DEBUG=1", XLA_DOCS, SAME),
    ("XLA_HLO_DEBUG=1", XLA_DOCS, SAME),
    ("XLA_SAVE_TENSORS_FILE=graphs", XLA_DOCS, SAME),
    ("XLA_METRICS_FILE=metrics", XLA_DOCS, SAME),
    ("XLA_EMIT_STEPLOG=1", "torch_xla/core/xla_model.py", SAME),
    ("XLA_DYNAMO_DEBUG=1", "torch_xla/_dynamo/dynamo_bridge.py", SAME),
    # libtpu, and what TPU VMs and old tutorials set
    ("LIBTPU_INIT_ARGS=--xla_no_such_flag=1", XLA_PY, SAME),
    ("TPU_LIBRARY_PATH=/no/libtpu.so", XLA_NAMES, SAME),
    ("TPU_VISIBLE_CHIPS=0", LIBTPU, SAME),
    ("TPU_PROCESS_BOUNDS=2,2,1", LIBTPU, SAME),
    ("TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1", LIBTPU, SAME),
    ("TPU_SKIP_MDS_QUERY=1", XLA_NAMES, SAME),
    ("TPU_ACCELERATOR_TYPE=v5p-8", LIBTPU, SAME),
    ("TPU_WORKER_ID=1", LIBTPU, SAME),
    ("CLOUD_TPU_TASK_ID=1", XLA_NAMES, SAME),
    ("TPU_MEGACORE=megacore_dense", XLA_NAMES, SAME),
    ("MEGASCALE_NUM_SLICES=2", LIBTPU, SAME),
    ("XRT_TPU_CONFIG=localservice;0;localhost:51011", "torch_xla before 2.0", SAME),
    # others
    ("JAX_PLATFORMS=tpu", JAX, SAME),
    ("JAX_ENABLE_X64=1", JAX, SAME),
    ("RANK=1", TORCHRUN, "XLA needs no torchrun"),
    ("WORLD_SIZE=2", TORCHRUN, "XLA needs no torchrun"),
    ("LOCAL_RANK=1", TORCHRUN, SAME),
    ("MASTER_ADDR=192.0.2.1", DISTRIBUTED, SAME),
    ("OMP_NUM_THREADS=2", TORCH, ROUNDED),
    ("ATEN_CPU_CAPABILITY=default", TORCH, ROUNDED),
    ("PYTORCH_JIT=0", TORCH, SAME),
    ("PYTHONOPTIMIZE=2", PYTHON, SAME),
    ("PYTHONHASHSEED=1", PYTHON, SAME),
]
UNDER_TORCHRUN = [
    ("RANK=5", TORCHRUN, SAME),
    ("WORLD_SIZE=4", TORCHRUN, SAME),
    ("LOCAL_RANK=1", TORCHRUN, SAME),
    ("MASTER_ADDR=192.0.2.1", TORCHRUN, SAME),
    ("PET_NPROC_PER_NODE=1", TORCHRUN, SAME),
    ("PET_NNODES=1", TORCHRUN, SAME),
    ("PET_MAX_RESTARTS=1", TORCHRUN, SAME),
    ("TORCH_DISTRIBUTED_DEBUG=DETAIL", DISTRIBUTED, SAME),
    ("TORCH_DIST_INIT_BARRIER=1", DISTRIBUTED, SAME),
    ("GLOO_SOCKET_IFNAME=lo", DISTRIBUTED, SAME),
    ("TORCH_NCCL_BLOCKING_WAIT=1", DISTRIBUTED, SAME),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0", DISTRIBUTED, SAME),
    ("NCCL_ALGO=Ring", NCCL, SAME),
    ("NCCL_SOCKET_IFNAME=no_such", NCCL, SAME),
    ("NCCL_P2P_DISABLE=1", NCCL, SAME),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1", TORCH, SAME),
    ("NVIDIA_TF32_OVERRIDE=1", TORCH, SAME),
    ("CUBLAS_WORKSPACE_CONFIG=:16:8", TORCH, SAME),
    ("CUDA_LAUNCH_BLOCKING=1", TORCH, SAME),
    ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", TORCH, SAME),
    ("OMP_NUM_THREADS=2", TORCH, ROUNDED),
    ("MKL_NUM_THREADS=2", TORCH, ROUNDED),
    ("ATEN_CPU_CAPABILITY=default", TORCH, ROUNDED),
    ("TORCH_CPP_LOG_LEVEL=INFO", TORCH, SAME),
    ("TORCH_SHOW_CPP_STACKTRACES=1", TORCH, SAME),
    ("TORCH_LOGS=+dynamo", TORCH, SAME),
    ("TORCH_COMPILE_DISABLE=1", TORCH, SAME),
    ("TORCH_DEVICE_BACKEND_AUTOLOAD=1", TORCH, SAME),
    ("TORCH_FORCE_WEIGHTS_ONLY_LOAD=1", TORCH, SAME),
    ("PYTORCH_JIT=0", TORCH, SAME),
    ("PYTHONOPTIMIZE=2", PYTHON, SAME),
    ("PJRT_DEVICE=CUDA", XLA_NAMES, SAME),
    ("XLA_USE_BF16=1", XLA_SO, SAME),
]
DROPOUT = "--att_dropout 0.1 --mlp_dropout 0.1 --max_steps 3 --eval_batches 2".split()


def run(folder, backend, variables):
    """The program with variables that are set before anything is imported."""
    flags = [*tiny(folder), *DROPOUT, *backend.split()]
    processes = 2 if "cuda" in backend else 1
    words, usual = command_of("run_vit_training.py", *flags, processes=processes, warm=False)
    return subprocess.run(
        words,
        cwd=ROOT,
        env=usual | variables,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


def numbers(folder):
    names = ("loss", "grad_norm", "val_loss")
    return [record[name] for record in Result(folder).records for name in names if name in record]


BACKENDS = {"xla": "--backend xla --cpu_devices 2", "torchrun": "--backend cuda"}


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory):
    if request.param == "xla":
        need_xla()
    folder = tmp_path_factory.mktemp(request.param) / "run"
    done = run(folder, BACKENDS[request.param], {})
    assert done.returncode == 0, done.stderr
    return request.param, numbers(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("reference", "variable", "source", "expected"),
    [
        *(("xla", *row) for row in ON_XLA),
        *(("torchrun", *row) for row in UNDER_TORCHRUN),
    ],
    indirect=["reference"],
)
def test_each(reference, variable, source, expected, tmp_path):
    backend, losses = reference
    name, _, value = variable.partition("=")
    if value in ("cache", "graphs", "metrics"):
        value = str(tmp_path / value)
    done = run(tmp_path / "run", BACKENDS[backend], {name: value})
    if expected not in (SAME, ROUNDED):
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert expected in line
        assert not (tmp_path / "run").exists()
        return
    assert done.returncode == 0, done.stderr
    found = numbers(tmp_path / "run")
    assert found == (losses if expected == SAME else pytest.approx(losses, rel=1e-6))


@pytest.mark.parametrize(
    "variables", ["RANK=0", "WORLD_SIZE=2", "RANK=x WORLD_SIZE=1", "RANK=1 WORLD_SIZE=1"]
)
def test_a_part_of_what_torchrun_sets(variables, capsys, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for each in variables.split():
        monkeypatch.setenv(*each.split("="))
    line = told_in_one_line(capsys, *tiny(tmp_path / "run"), "--backend", "cuda")
    assert line.endswith("torchrun sets all four; for one process unset RANK and WORLD_SIZE")
    assert not (tmp_path / "run").exists()


def test_another_launchers_local_rank(capsys, tmp_path, monkeypatch):
    """No torchrun has numbered this process, so it says what is wrong."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    line = told_in_one_line(capsys, *tiny(tmp_path), "--backend", "cuda", "--image_size", "15")
    assert "--image_size 15" in line
