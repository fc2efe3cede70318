"""Which form of FSDP, which mesh, which device a run on GPUs has; decided before any starts."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gpu_fsdp import devices, te_block
from gpu_fsdp.config import GpuConfig
from models.config import ModelError
from training.config import RunConfig
from training.errors import UsageError
from training.flags import check_needs
from training.mesh import Mesh, make_mesh
from training.resolve import (
    MODEL_FLAG,
    Run,
    check_batch,
    check_rows,
    resolve_common,
    resolve_model,
    with_teacher,
)

if TYPE_CHECKING:
    from models.spec import ModelSpec


# ------------------------------------------------------------------------------------------------
# Whether a run's images can be sharded over processes, and by which form of attention.


_DROPOUTS = ("pos_drop_rate", "proj_drop_rate", "attn_drop_rate")


def resolve_domain(config: RunConfig, own: GpuConfig, mesh: Mesh, model: ModelSpec) -> RunConfig:
    """Return the configuration with ``--domain_attention`` decided. Raises UsageError.

    Nothing is decided where images are not sharded.
    """
    if mesh.domain == 1:
        return config
    given = f"--mesh_domain {mesh.domain}"
    check_rows(mesh, model)
    if own.fsdp == "megatron":
        raise UsageError(f"{given} requires --fsdp fsdp2: Megatron-FSDP shards no images here")
    if own.block == "te":
        raise UsageError(f"{given} is incompatible with --block te: use --block timm")
    if own.compile and config.sharding.grad_ckpt == "selective":
        # Seen with PyTorch 2.9: what is compiled is not run where a policy looks at operations.
        raise UsageError(
            f"--compile with {given} requires --grad_ckpt full or none: selective would leave "
            "nothing compiled"
        )
    reason = model.why_no_token_part()
    for name in _DROPOUTS:
        if model.settings[name]:
            reason = f"processes would drop the same places of their tokens (<{name}>)"
    if reason:
        reason = ModelError(reason).told(MODEL_FLAG)
        raise UsageError(f"{given} on GPUs is incompatible with --model {model.name}: {reason}")
    form, heads = config.sharding.domain_attention, model.sizes.num_heads
    if form == "gather":
        raise UsageError("--domain_attention gather requires --backend xla: use ring or ulysses")
    if form == "ulysses" and heads % mesh.domain:
        raise UsageError(
            f"--domain_attention ulysses requires heads that {given} divides, not {heads}: use ring"
        )
    if form == "auto":
        form = "ring" if heads % mesh.domain else "ulysses"
    return replace(config, sharding=replace(config.sharding, domain_attention=form))


# ------------------------------------------------------------------------------------------------


ZERO_NAMES = ("no sharding", "ZeRO-1", "ZeRO-2", "ZeRO-3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GpuRun = Run[GpuConfig]


def world_size() -> int:
    """Processes of the run, as torchrun tells."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def resolve(config: RunConfig, own: GpuConfig) -> GpuRun:
    """Return the run that the flags ask for on the processes that torchrun has started.

    Raises UsageError.
    """
    run = _resolve(config, own)
    strategy = 0 if run.own.zero_dp_strategy == 0 else 3  # of 2, it would never be sharded again
    beside = replace(run.own, block="timm", fp8="none", zero_dp_strategy=strategy)
    return with_teacher(run, lambda config: _resolve(config, beside))


def _resolve(config: RunConfig, own: GpuConfig) -> GpuRun:
    config = _resolve_policy(resolve_common(replace(config, backend="cuda")))
    _check_devices()
    own = _resolve_form(config, own)
    own = replace(own, zero_dp_strategy=_zero_dp_strategy(config, own))
    check_needs(config, own)
    _check_strategy(config, own)
    _check_form(config, own)
    mesh = _mesh(config, own)
    _check_precision(config, own, mesh)
    config, model = resolve_model(config)  # after what is known at once: timm takes a second
    run = GpuRun(resolve_domain(config, own, mesh, model), own, model, mesh)
    te_block.check(run)
    check_batch(run)
    te_block.check_batch(run)
    return run


def _resolve_policy(config: RunConfig) -> RunConfig:
    """Decide ``--grad_ckpt``. Raises UsageError."""
    if config.sharding.grad_ckpt == "offload":
        raise UsageError("--grad_ckpt offload requires --backend xla, this is cuda: use full")
    if config.sharding.grad_ckpt == "auto":
        return replace(config, sharding=replace(config.sharding, grad_ckpt="full"))
    return config


def _resolve_form(config: RunConfig, own: GpuConfig) -> GpuConfig:
    if own.fsdp != "auto":
        return own
    needs_fsdp2 = (
        config.sharding.mesh_domain > 1
        or config.optimizer.linear_probe
        or config.loss.teacher is not None
    )
    megatron = devices.choose().runs_megatron and not needs_fsdp2
    return replace(own, fsdp="megatron" if megatron else "fsdp2")


def _zero_dp_strategy(config: RunConfig, own: GpuConfig) -> int:
    """Return 0 to 3, by ``--zero_dp_strategy`` or the two older flags for 0 and 2.

    Raises UsageError where they contradict each other.
    """
    shortcuts = {
        "--run_without_fsdp": (config.sharding.run_without_fsdp, 0),
        "--no_reshard_after_forward": (not config.sharding.reshard_after_forward, 2),
    }
    strategy = own.zero_dp_strategy
    for flag, (given, means) in shortcuts.items():
        if given and own.zero_dp_strategy not in (None, means):
            raise UsageError(
                f"{flag} means --zero_dp_strategy {means}, not {own.zero_dp_strategy}: drop one"
            )
        if given and strategy is None:
            strategy = means
    return 3 if strategy is None else strategy


def _mesh(config: RunConfig, own: GpuConfig) -> Mesh:
    """Return the mesh of a run; without sharding FSDP2 has copies, and all-reduces gradients."""
    size = world_size()
    mesh = make_mesh(
        config.sharding,
        size,
        "process(es) of this run: change them, or torchrun's --nproc-per-node and --nnodes",
    )
    if own.zero_dp_strategy == 0 and own.fsdp == "fsdp2":
        return Mesh(dcn=mesh.fsdp, domain=mesh.domain)
    return mesh


def _check_devices() -> None:
    device = devices.choose()
    if device.is_host and not dist.is_gloo_available():
        raise UsageError("--backend cuda: no CUDA device here, nor PyTorch with gloo for the CPU")
    here, there_are = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device.count()
    if there_are is not None and here > there_are:
        raise UsageError(
            f"torchrun started {here} processes on this node, which has {there_are} x "
            f"{device.noun}: a process each, --nproc-per-node {there_are} or fewer"
        )


def _check_strategy(config: RunConfig, own: GpuConfig) -> None:
    strategy = own.zero_dp_strategy
    if config.sharding.mesh_tensor > 1:
        raise UsageError(
            f"--mesh_tensor {config.sharding.mesh_tensor} requires --backend xla, this is cuda"
        )
    if strategy == 1 and own.fsdp == "fsdp2":
        raise UsageError("--fsdp fsdp2 has no --zero_dp_strategy 1: use 2 or 3, or --fsdp megatron")
    for name in ("mesh_dcn", "mesh_fsdp"):
        if strategy == 0 and getattr(config.sharding, name) not in (None, 1):
            raise UsageError(f"--{name} shapes sharding, --zero_dp_strategy 0 has none: drop one")


def _check_form(config: RunConfig, own: GpuConfig) -> None:
    """Raises UsageError for what the form of FSDP cannot do, here or at all."""
    if own.cpu_offload and config.optimizer.optimizer == "muon":
        raise UsageError("--optimizer muon is incompatible with --cpu_offload: drop one of the two")
    if own.fsdp == "megatron" and config.optimizer.linear_probe:
        raise UsageError("--linear_probe requires --fsdp fsdp2, this is megatron")
    if own.fsdp == "megatron" and config.loss.teacher is not None:
        raise UsageError("--teacher requires --fsdp fsdp2, this is megatron")
    if own.fsdp == "fsdp2":
        if own.meta_init is False:
            raise UsageError("--no-meta_init requires --fsdp megatron, this is fsdp2")
        if own.cpu_offload and devices.choose().is_host:
            raise UsageError("--cpu_offload requires CUDA: here all is in host memory anyway")
        return
    check_megatron_runs_here()
    if own.zero_dp_strategy == 0 and own.meta_init:
        raise UsageError(
            "--meta_init requires --zero_dp_strategy 1, 2 or 3: Megatron-FSDP refuses 0"
        )


def check_megatron_runs_here() -> None:
    """Raises UsageError where Megatron-FSDP cannot run."""
    if not devices.choose().runs_megatron:
        raise UsageError("--fsdp megatron requires CUDA: on the CPU use --fsdp fsdp2")
    try:
        with warnings.catch_warnings():  # that it does without TransformerEngine and Apex
            warnings.simplefilter("ignore")
            import megatron_fsdp  # noqa: F401
    except ImportError:
        raise UsageError(
            "--fsdp megatron requires the package megatron-fsdp: python3 -m pip install "
            "-r requirements-gpu.txt, or use --fsdp fsdp2"
        ) from None
    except (OSError, RuntimeError, AssertionError) as error:  # it imports TransformerEngine
        reason = str(error).splitlines()[0]
        raise UsageError(
            "--fsdp megatron: TransformerEngine is installed but broken "
            f"({reason}): repair or uninstall it"
        ) from None


def _check_precision(config: RunConfig, own: GpuConfig, mesh: Mesh) -> None:
    device, precision = devices.choose(), config.sharding.precision
    for used in (precision, "bf16" if own.reduce_dtype == "bf16" else "fp32"):
        if reason := device.lacks(used):
            raise UsageError(reason)
    if precision == "fp16" and own.fsdp == "megatron":
        raise UsageError("--precision fp16 requires --fsdp fsdp2: with megatron use bf16")
    if own.fsdp == "megatron" and own.reduce_dtype != "fp32" and mesh.fsdp == 1:
        raise UsageError(
            f"--reduce_dtype {own.reduce_dtype} requires --mesh_fsdp of 2 or more with --fsdp "
            "megatron"
        )
    if own.tf32 and not device.has_tf32:
        raise UsageError("--tf32 requires CUDA")
    if own.reduce_dtype == "fp16" and precision != "fp16":
        raise UsageError("--reduce_dtype fp16 requires --precision fp16, whose loss is scaled")
