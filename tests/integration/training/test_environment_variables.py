"""Variables that PyTorch, torch_xla, torchrun, NCCL and libtpu document: each one leaves the losses
as they are, or ends the run in one line (on XLA: tests/unit/xla_fsdp/test_environment.py).

Listed are those that say which devices compute, how many, or what they compute; of those that only
print more, the ones that tutorials name. A variable of GPUs or TPUs changes nothing without them.
"""

import re

import pytest

from tests.support.cli import Result, need_xla, run_program, tiny
from tests.support.usage_error import told_in_one_line

# Each set is of one run. {tmp} is an empty folder. Found in torch_xla's library and documentation
# (2.9), in those of PyTorch, torchrun, NCCL, libtpu and JAX, and in old tutorials (XRT_TPU_CONFIG).
ON_XLA = [
    """XLA_NO_SPECIAL_SCALARS=1 XLA_DISABLE_FUNCTIONALIZATION=1 XLA_DENSE_GATHER_FACTOR=1
    XLA_EXPERIMENTAL=nonzero:masked_select XLA_DENSE_SCATTER_FACTOR=1 XLA_RESIZE_SPLIT_FACTOR=2
    XLA_MAX_PADDING_FACTOR=2 XLA_ENABLE_PARAM_ALIASING=0 XLA_STABLEHLO_COMPILE=1
    XLA_PARAMETER_WRAPPING_THREADSHOLD=1 XLA_COMPILATION_CACHE_SIZE=1 XLA_IR_SHAPE_CACHE_SIZE=1
    XLA_ALWAYS_ALLREDUCE=1 XLA_SYNC_WAIT=1 XLA_RELEASE_GIL_DURING_TRANSFER=0 XLA_THREAD_POOL_SIZE=1
    XLA_MAX_ASYNC_QUEUE=1 XLA_TENSOR_UPDATE_SYNC=0 XLA_PERSISTENT_CACHE_PATH={tmp}/cache""",
    """PJRT_DEVICE= XLA_USE_SPMD=1 XLA_AUTO_SPMD=1 XLA_AUTO_SPMD_MESH=1,2 CPU_NUM_DEVICES=4
    XLA_AUTO_USE_GROUP_SHARDING=0 PJRT_NPROC=1 PJRT_CPU_ASYNC_CLIENT=0 PJRT_DYNAMIC_PLUGINS=1
    PJRT_SELECT_DEFAULT_DEVICE=0 PJRT_LOCAL_PROCESS_COUNT=2 PJRT_LOCAL_PROCESS_RANK=1
    PJRT_DIST_SERVICE_ADDR=localhost:9999 XLA_REGISTER_INSTALLED_PLUGINS=0 XLA_USE_DUMMY_STORE=1""",
    """XLA_USE_SPMD=0 PT_XLA_DEBUG=1 PT_XLA_DEBUG_LEVEL=2 XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1
    XLA_SAVE_TENSORS_FILE={tmp}/graphs XLA_METRICS_FILE={tmp}/metrics XLA_EMIT_STEPLOG=1
    XLA_DYNAMO_DEBUG=1 LIBTPU_INIT_ARGS=--xla_no_such_flag=1 TPU_LIBRARY_PATH=/no/libtpu.so
    TPU_VISIBLE_CHIPS=0 TPU_PROCESS_BOUNDS=2,2,1 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1
    TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5p-8 TPU_WORKER_ID=1 CLOUD_TPU_TASK_ID=1
    TPU_MEGACORE=megacore_dense MEGASCALE_NUM_SLICES=2 JAX_PLATFORMS=tpu JAX_ENABLE_X64=1
    XRT_TPU_CONFIG=localservice;0;localhost:51011""",
    """LOCAL_RANK=1 MASTER_ADDR=192.0.2.1 PYTORCH_JIT=0 PYTHONOPTIMIZE=2 PYTHONHASHSEED=1""",
]
UNDER_TORCHRUN = [
    """RANK=5 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=192.0.2.1 PET_NPROC_PER_NODE=1 PET_NNODES=1
    PET_MAX_RESTARTS=1 TORCH_DIST_INIT_BARRIER=1 GLOO_SOCKET_IFNAME=lo NCCL_ALGO=Ring
    TORCH_NCCL_BLOCKING_WAIT=1 TORCH_NCCL_ASYNC_ERROR_HANDLING=0 NCCL_SOCKET_IFNAME=no_such
    NCCL_P2P_DISABLE=1 TORCH_DISTRIBUTED_DEBUG=DETAIL""",
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 NVIDIA_TF32_OVERRIDE=1 CUBLAS_WORKSPACE_CONFIG=:16:8
    CUDA_LAUNCH_BLOCKING=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TORCH_LOGS=+dynamo
    TORCH_CPP_LOG_LEVEL=INFO TORCH_SHOW_CPP_STACKTRACES=1 TORCH_COMPILE_DISABLE=1
    TORCH_DEVICE_BACKEND_AUTOLOAD=1 TORCH_FORCE_WEIGHTS_ONLY_LOAD=1 PYTORCH_JIT=0
    PYTHONOPTIMIZE=2 PJRT_DEVICE=CUDA XLA_USE_BF16=1""",
]
ROUNDED = {
    "xla": """OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=default
    XLA_FLAGS=--xla_force_host_platform_device_count=4""",
    "torchrun": "OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 ATEN_CPU_CAPABILITY=default",
}
"""These change the rounding, no more."""
DROPOUT = "--att_dropout 0.1 --mlp_dropout 0.1 --max_steps 3 --eval_batches 2".split()
BACKENDS = {"xla": "--backend xla --cpu_devices 2", "torchrun": "--backend cuda"}


def numbers(folder, backend, variables=""):
    """The losses and norms of the program with variables set before anything is imported."""
    given = dict(each.split("=", 1) for each in variables.format(tmp=folder.parent).split())
    flags = [*tiny(folder), *DROPOUT, *BACKENDS[backend].split()]
    processes = 2 if backend == "torchrun" else 1
    done = run_program(
        "run_vit_training.py", *flags, processes=processes, warm=False, variables=given
    )
    assert done.returncode == 0, done.stderr
    names = ("loss", "grad_norm", "val_loss")
    return [record[name] for record in Result(folder).records for name in names if name in record]


@pytest.fixture(scope="module", params=BACKENDS)
def reference(request, tmp_path_factory):
    if request.param == "xla":
        need_xla()
    return request.param, numbers(tmp_path_factory.mktemp(request.param) / "run", request.param)


@pytest.mark.long
def test_the_same_losses(reference, tmp_path):
    backend, losses = reference
    for number, variables in enumerate(ON_XLA if backend == "xla" else UNDER_TORCHRUN):
        assert numbers(tmp_path / f"{number}", backend, variables) == losses, variables
    rounded = numbers(tmp_path / "rounded", backend, ROUNDED[backend])
    assert rounded == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("variables", ["RANK=0", "WORLD_SIZE=2", "RANK=1 WORLD_SIZE=1"])
def test_a_part_of_what_torchrun_sets(variables, capsys, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for each in variables.split():
        monkeypatch.setenv(*each.split("="))
    line = told_in_one_line(capsys, *tiny(tmp_path / "run"), "--backend", "cuda")
    assert line.endswith("or unset RANK and WORLD_SIZE to run one process")


def test_another_launchers_local_rank(capsys, tmp_path, monkeypatch):
    """No torchrun has numbered this process, so it says what is wrong."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    line = told_in_one_line(capsys, *tiny(tmp_path), "--backend", "cuda", "--image_size", "15")
    assert "--image_size 15" in line


@pytest.mark.parametrize(
    ("program", "variable", "told"),
    [
        ("run_vit_training.py --predict x.png", "TORCH_LOGS_OUT=/proc/nope", "'/proc/nope'"),
        (
            "run_vit_training.py --plan",
            "TORCH_DISTRIBUTED_DEBUG=on",
            "must be OFF, INFO, or DETAIL",
        ),
        ("launch/torchrun.py --nodes 1", "TORCH_LOGS=debug", "Invalid log settings: debug"),
    ],
)
def test_what_pytorch_refuses_on_import(program, variable, told):
    variables = dict([variable.split("=")])
    done = run_program(*program.split(), warm=False, variables=variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.match(r"[\w.]+: error: .*import.*\(", line)
    assert told in line
    assert "correct" in line
