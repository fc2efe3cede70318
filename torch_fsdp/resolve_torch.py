"""Resolves a run with FSDP on the devices that PyTorch finds, before any of them starts.

``resolve`` makes a ``TorchRun`` with every "auto" decided and every check made. Its ``plan`` is
what ``torch_fsdp/fsdp2.py`` does to the model.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from models.config import ModelError
from models.rounding import BYTE_DTYPES
from torch_fsdp import devices, varlen
from torch_fsdp.config import ZERO_FLAGS, Fsdp2Config
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import DTYPES, FsdpImplementation, TimmBlocks, TorchPlan, TorchRun
from tpu_attention.choice import KERNELS, for_teacher, resolve_attention
from training.config import RunConfig, ShardingConfig
from training.elastic import check_elastic
from training.errors import UsageError
from training.mesh import Mesh, make_mesh, on_slices
from training.resolve import (
    check_batch,
    check_heads_and_columns,
    check_rows,
    model_flags,
    resolve_common,
    resolve_domain,
    resolve_model,
    sizes_of_largest,
    with_micro_batches,
)
from training.rules import check_rules
from training.teachers import with_teacher

if TYPE_CHECKING:
    from models.spec import ModelSizes, ModelSpec


def resolve(
    config: RunConfig,
    backend_config: Fsdp2Config,
    implementation: FsdpImplementation,
    blocks: TimmBlocks,
) -> TorchRun:
    """Return the run that the flags describe on the processes that torchrun has started.

    Raises UsageError.
    """
    resolve_on = functools.partial(_resolve, config, backend_config, implementation, blocks)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    slices = devices.choose(config.backend).slices()
    run = resolve_on(processes, slices)
    check_elastic(  # launch/torchrun.sh sets the variable
        "ELASTIC_NODES",
        "nodes",
        "NNODES=",
        lambda nodes: resolve_on(nodes * int(os.environ["LOCAL_WORLD_SIZE"]), slices, run.model),
    )
    check_elastic(  # launch.xla_dist and launch.gke set it
        "ELASTIC_SLICES",
        "slices",
        "--elastic ",
        lambda count: resolve_on(processes // (slices or 1) * count, count, run.model),
    )
    # A teacher runs only forward passes, after which ZeRO-2 would never reshard its weights.
    teacher_config = replace(
        run.backend_config,
        zero_dp_strategy=0 if run.plan.zero == 0 else 3,
        compile=backend_config.compile,
    )

    def resolve_teacher(config: RunConfig) -> TorchRun:
        return _resolve(
            for_teacher(config), teacher_config, implementation, TimmBlocks(), processes, slices
        )

    return with_teacher(run, resolve_teacher)


def _resolve(
    config: RunConfig,
    backend_config: Fsdp2Config,
    implementation: FsdpImplementation,
    blocks: TimmBlocks,
    processes: int,
    slices: int | None,
    model: ModelSpec | None = None,
) -> TorchRun:
    """Return the run on this number of processes, on ``slices`` if these are TPUs, of ``model`` if
    it is already open."""
    config = resolve_common(config)
    backend, sharding = config.backend, config.sharding
    device = devices.choose(backend)
    if slices:
        sharding = on_slices(sharding, slices)
        config = replace(config, sharding=sharding)
    if sharding.grad_ckpt == "offload" and implementation is not SIMPLE:
        raise UsageError(
            "--grad_ckpt offload requires --backend xla or --fsdp simple: use --grad_ckpt full"
        )
    if sharding.grad_ckpt == "auto":
        sharding = replace(sharding, grad_ckpt="full")
        config = replace(config, sharding=sharding)
    if sharding.mesh_tensor > 1 and implementation is not SIMPLE:
        raise UsageError(
            f"--mesh_tensor {sharding.mesh_tensor} requires --fsdp simple or --backend xla"
        )

    # The devices of this host.
    if device.is_host and not dist.is_gloo_available():
        raise UsageError(
            "--backend cuda: no CUDA device found, and this PyTorch lacks gloo, which training on "
            "the CPU requires"
        )
    started, available = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device.count()
    if available is not None and started > available:
        raise UsageError(
            f"torchrun started {started} processes on this node, which has {available} x "
            f"{device.noun}: use --nproc-per-node {available} or fewer, one process per device"
        )

    # What is sharded: --zero_dp_strategy, or an older flag for 0 or 2 (check_rules rejects both).
    zero = backend_config.zero_dp_strategy
    for flag, (field, value, means) in ZERO_FLAGS.items():
        if getattr(sharding, field) == value:
            if backend_config.zero_dp_strategy not in (None, means):
                raise UsageError(f"{flag} means --zero_dp_strategy {means}, not {zero}: drop one")
            zero = means
    for name in ("mesh_dcn", "mesh_fsdp"):
        if zero == 0 and getattr(sharding, name) not in (None, 1):
            raise UsageError(
                f"--{name} is incompatible with --zero_dp_strategy 0, which shards nothing: drop "
                "one of the two"
            )
    zero = 3 if zero is None else zero
    backend_config = replace(backend_config, zero_dp_strategy=zero)
    check_rules(config, backend_config)
    mesh = make_mesh(
        sharding,
        processes,
        "process(es) of this run: change them, or torchrun's --nproc-per-node and --nnodes",
    )
    if zero == 0 and implementation in (FSDP2, SIMPLE):  # all processes are replicas
        mesh = Mesh(dcn=mesh.fsdp, domain=mesh.domain)
    config = with_micro_batches(config, mesh)
    implementation.check(config, backend_config, mesh, device)

    # Precision.
    precision, reduce_dtype = sharding.precision, backend_config.reduce_dtype
    for used in (precision, "bf16" if reduce_dtype == "bf16" else "fp32"):
        if reason := device.lacks(used):
            raise UsageError(reason)
    if backend_config.tf32 and not isinstance(device, devices.Cuda):
        raise UsageError("--tf32 requires CUDA")
    if reduce_dtype == "fp16" and precision != "fp16":
        raise UsageError("--reduce_dtype fp16 requires --precision fp16, which scales the loss")

    if model is None:  # after the cheap checks: timm takes a second
        config, model = resolve_model(config)
    # torch.compile: by default for what was measured on a GPU.
    asked = backend_config.compile
    if asked is None:
        by_default = device.compiles_all or (
            device.compiles_blocks
            and mesh.domain == 1
            and model.segments is None
            and blocks.name == "timm"
        )
        backend_config = replace(backend_config, compile=by_default)
    check_heads_and_columns(mesh, model)
    if mesh.domain > 1:
        sharding = _resolve_domain(sharding, backend_config, mesh, model, implementation)
        config = replace(config, sharding=sharding)
    if backend == "torchtpu":
        sharding = _resolve_attention(sharding, model, sizes_of_largest(config.data, model), device)
        config = replace(config, sharding=sharding)
    compiled: Literal["none", "block", "around attention", "step"] = "none"
    if backend_config.compile:
        compiled = implementation.compiles
        if mesh.domain > 1 and compiled == "block":
            compiled = "around attention"
    if sharding.grad_ckpt == "offload":
        _check_offload(compiled, zero, model)
    products = "tf32" if precision == "fp32" and backend_config.tf32 else precision
    plan = TorchPlan(
        implementation=implementation,
        zero=zero,
        domain_attention=sharding.domain_attention if mesh.domain > 1 else None,
        varlen=(
            model.segments is not None
            and isinstance(device, devices.Cuda)
            and precision != "fp32"
            and not model.sizes.attn_drop_rate
            and varlen.is_available()
        ),
        attention=sharding.attention if backend == "torchtpu" else "sdpa",
        blocks=blocks,
        grad_ckpt=sharding.grad_ckpt,
        compile=compiled,
        compile_required=bool(asked) or device.compiles_all or blocks.fp8 != "none",
        compiler=device.compiler,
        dtype=DTYPES[precision],
        reduce_dtype=DTYPES[reduce_dtype],
        matmul=BYTE_DTYPES.get(sharding.matmul),
        gather_dtype=BYTE_DTYPES.get(sharding.gather_dtype),
        products=products if blocks.fp8 == "none" else "fp8",
    )
    run = TorchRun(config, backend_config, model, mesh, plan)
    check_batch(run)
    blocks.check(run)
    return run


def _resolve_attention(
    sharding: ShardingConfig, model: ModelSpec, of_largest: ModelSizes, device: Device
) -> ShardingConfig:
    """Resolve ``--attention`` on TPUs. Raises UsageError."""
    found = resolve_attention(sharding, model, of_largest, device.kernel_memory, without="plain")
    if found.attention in KERNELS and importlib.util.find_spec("jax") is None:
        raise UsageError(
            f"--attention {found.attention} requires the package jax: python3 -m pip install -r "
            "requirements-torchtpu.txt, or use --attention plain"
        )
    return found


def _resolve_domain(
    sharding: ShardingConfig,
    backend_config: Fsdp2Config,
    mesh: Mesh,
    model: ModelSpec,
    implementation: FsdpImplementation,
) -> ShardingConfig:
    """Resolve ``--domain_attention`` for processes that share images. Raises UsageError."""
    flag = f"--mesh_domain {mesh.domain}"
    check_rows(mesh, model)
    traces_step = implementation.compiles == "step"
    if traces_step and (rows := model.sizes.grid[0]) % mesh.domain:
        # Processes with different numbers of rows would trace different steps.
        raise OnlyFsdp2(f"{flag}, which does not divide {rows} rows of patches")
    if backend_config.compile and sharding.grad_ckpt == "selective" and not traces_step:
        # With PyTorch 2.9, compiled code is not used where a policy intercepts operations.
        raise UsageError(
            f"--compile with {flag} requires --grad_ckpt full or none: with selective nothing "
            "would be compiled"
        )
    reason = model.why_no_token_part()
    for name in ("pos_drop_rate", "proj_drop_rate", "attn_drop_rate"):
        if model.settings[name]:
            reason = f"all processes would drop the same positions of their tokens (<{name}>)"
    if reason:
        reason = ModelError(reason).with_flag_names(model_flags())
        raise UsageError(f"{flag} on GPUs is incompatible with --model {model.name}: {reason}")
    heads = model.sizes.num_heads
    refused = {"gather": "requires --backend xla: use ring or ulysses"}
    if heads % mesh.domain:
        refused["ulysses"] = (
            f"requires a number of heads divisible by {flag}, not {heads}: use ring"
        )
    auto: Literal["ring", "ulysses"] = "ring" if "ulysses" in refused else "ulysses"
    return resolve_domain(sharding, refused, auto=auto)


def _check_fsdp2(
    config: RunConfig, backend_config: Fsdp2Config, mesh: Mesh, device: Device
) -> None:
    if backend_config.zero_dp_strategy == 1:
        raise UsageError(
            "--fsdp fsdp2 does not support --zero_dp_strategy 1: use 2 or 3, or --fsdp megatron"
        )
    if backend_config.cpu_offload and config.optimizer.optimizer == "muon":
        raise UsageError("--optimizer muon is incompatible with --cpu_offload: drop one of the two")
    if backend_config.cpu_offload and device.is_host:
        raise UsageError("--cpu_offload requires CUDA: on the CPU all is in host memory already")


FSDP2 = FsdpImplementation("torch_fsdp.fsdp2:Fsdp2Backend", _check_fsdp2)


class OnlyFsdp2(UsageError):
    """What FSDP2 supports, and SimpleFSDP does not."""

    def __init__(self, what: str) -> None:
        super().__init__(f"--fsdp simple does not support {what}: use --fsdp fsdp2")
        self.what = what


def _check_simple(
    config: RunConfig, backend_config: Fsdp2Config, mesh: Mesh, device: Device
) -> None:
    if backend_config.zero_dp_strategy == 1:
        raise UsageError("--fsdp simple does not support --zero_dp_strategy 1: use 2 or 3")
    if isinstance(device, devices.Cuda):
        raise OnlyFsdp2("CUDA")
    dropout = config.model.attn_drop_rate
    if dropout and config.sharding.attention == "sdpa":
        # A fused kernel draws its own random numbers.
        raise OnlyFsdp2(f"--att_dropout {dropout} with --attention sdpa")
    sharding, zero = config.sharding, backend_config.zero_dp_strategy
    not_together = {
        f"--mesh_domain {sharding.mesh_domain}": sharding.mesh_domain > 1,
        f"--zero_dp_strategy {zero}": zero == 0,
        # Its exchange expects a process's part of a matrix to be whole rows that are adjacent.
        "--optimizer muon": config.optimizer.optimizer == "muon",
    }
    for what, is_on in not_together.items():
        if sharding.mesh_tensor > 1 and is_on:
            raise UsageError(
                f"--mesh_tensor {sharding.mesh_tensor} with --fsdp simple is incompatible with "
                f"{what}: drop one of the two"
            )
    if sharding.gather_dtype != "auto" and zero == 0:
        raise UsageError(
            f"--gather_dtype {sharding.gather_dtype} is incompatible with --zero_dp_strategy 0, "
            "which gathers nothing: drop one of the two"
        )


def _check_offload(compiled: str, zero: int, model: ModelSpec) -> None:
    """Raise UsageError if blocks are not one loop, whose inputs can be in the host's memory."""
    why = model.why_blocks_differ()
    if compiled != "step":
        why = "--no-compile"
    elif zero == 2:
        why = "--zero_dp_strategy 2"
    if why:
        raise UsageError(
            f"--grad_ckpt offload requires blocks as one loop, which this run does not have ({why})"
            ": use --grad_ckpt full"
        )


SIMPLE = FsdpImplementation(
    "torch_fsdp.simple_fsdp:SimpleFsdpBackend", _check_simple, compiles="step"
)
