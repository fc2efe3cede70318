"""Resolves which of NVIDIA's libraries replace PyTorch's parts, and checks their requirements.

``--fsdp megatron`` replaces FSDP2, ``--block te`` timm's blocks, ``--fp8`` their matrix products.
Everything else is in ``torch_fsdp``.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace
from typing import Literal, get_args

from gpu_fsdp import megatron_private
from gpu_fsdp.blocks import Float8Blocks, TeBlocks, prefer_cudnn_of_pytorch
from gpu_fsdp.config import TorchConfig
from torch_fsdp import devices, resolve_torch
from torch_fsdp.config import Fsdp2Config
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import FsdpImplementation, TimmBlocks, TorchRun
from torch_fsdp.resolve_torch import FSDP2, SIMPLE, OnlyFsdp2
from training.config import RunConfig
from training.errors import UsageError
from training.flags import by_field
from training.mesh import Mesh
from training.objectives.distillation_config import DistillationConfig

_Fsdp = Literal["megatron", "fsdp2", "simple"]


def resolve(config: RunConfig, backend_config: TorchConfig) -> TorchRun:
    """Return the run that the flags describe on the processes that torchrun has started.

    Raises UsageError.
    """
    if backend_config.fsdp != "auto":
        return _resolve(config, backend_config)
    device = devices.choose(config.backend)

    def resolved(fsdp: _Fsdp, why: str = "") -> TorchRun:
        run = _resolve(config, replace(backend_config, fsdp=fsdp))
        return replace(run, why={**run.why, "fsdp": why}) if why else run

    if required := _required_fsdp(config, backend_config, device):
        return resolved(required)
    if device.compiles_all:  # where a step of one program is the fastest
        if backend_config.compile is False:
            return resolved("fsdp2", " (not SimpleFSDP: --no-compile)")
        try:
            return resolved("simple")
        except OnlyFsdp2 as error:
            return resolved("fsdp2", f" (not SimpleFSDP: {error.what})")
    run = resolved("fsdp2")
    if why := _why_megatron(run, device):
        return resolved("megatron", why)
    return run


def _required_fsdp(config: RunConfig, backend_config: TorchConfig, device: Device) -> _Fsdp | None:
    """Return the ``--fsdp`` that the device or a flag requires; None if several can run."""
    # The first two require FSDP2. With a teacher, Megatron-FSDP was tested only on the CPU.
    if not device.compiles_all:
        if (
            config.sharding.mesh_domain > 1
            or config.optimizer.linear_probe
            or config.of(DistillationConfig).teacher is not None
            or config.objective.has_teacher
            or config.sharding.precision == "fp16"
            or not isinstance(device, devices.Cuda)
        ):
            return "fsdp2"
        if backend_config.zero_dp_strategy == 1 or backend_config.meta_init is False:
            return "megatron"
    for option in by_field(TorchConfig).values():
        if getattr(backend_config, option.field.name) != option.field.default:
            for fsdp in get_args(_Fsdp):
                if f"fsdp={fsdp}" in option.flag.requires:
                    return fsdp
    return None


_HOST_SECONDS = 3.3e-3
"""The host's time to issue a pass of a block with Megatron-FSDP; FSDP2's is 1.9e-3
(docs/evidence/benchmarks.md)."""
_SHARE_OF_PEAK = 0.45
"""The share of its peak FLOP/s that a GPU reaches on ViT-L (docs/evidence/benchmarks.md)."""


def _why_megatron(run: TorchRun, device: Device) -> str:
    """Return why Megatron-FSDP is as fast as FSDP2 or faster: a pass takes the GPU more than twice
    as long as the host, by the FLOPs. "" if it does not, or the GPU's speed is unknown."""
    if not (peak := device.peak_flops(run.plan.products)):
        return ""
    images = run.config.data.global_micro_batch_size / run.mesh.batch_shards
    device_s = images * run.train_flops_per_image / (_SHARE_OF_PEAK * peak)
    host_s = run.model.sizes.depth * _HOST_SECONDS
    if device_s <= 2 * host_s:
        return ""
    return f" (by FLOPs a pass takes {device_s * 1e3:,.0f} ms, the host {host_s * 1e3:,.0f})"


def _resolve(config: RunConfig, backend_config: TorchConfig) -> TorchRun:
    """Resolve a run whose ``--fsdp`` is chosen. Raises UsageError."""
    if backend_config.fsdp == "megatron" and config.backend == "torchtpu":
        raise UsageError("--fsdp megatron requires --backend cuda, not torchtpu")
    if backend_config.fsdp != "megatron" and backend_config.meta_init is False:
        raise UsageError(f"--no-meta_init requires --fsdp megatron, not {backend_config.fsdp}")
    implementation = {"megatron": MEGATRON, "simple": SIMPLE}.get(backend_config.fsdp, FSDP2)
    blocks = TimmBlocks()
    if backend_config.block == "te":
        blocks = TeBlocks(backend_config.fp8)
    elif backend_config.fp8 != "none":
        blocks = Float8Blocks(backend_config.fp8)
    return resolve_torch.resolve(config, backend_config, implementation, blocks)


def _check_megatron(
    config: RunConfig, backend_config: Fsdp2Config, mesh: Mesh, device: Device
) -> None:
    assert isinstance(backend_config, TorchConfig)
    if config.optimizer.linear_probe:
        raise UsageError("--linear_probe requires --fsdp fsdp2, not megatron")
    check_megatron_runs_here()
    if backend_config.zero_dp_strategy == 0 and backend_config.meta_init:
        raise UsageError(
            "--meta_init requires --zero_dp_strategy 1, 2 or 3, not 0, with --fsdp megatron"
        )
    if mesh.domain > 1:
        raise UsageError(f"--mesh_domain {mesh.domain} requires --fsdp fsdp2, not megatron")
    if config.objective.has_teacher and not backend_config.preserve_fp32_weights:
        raise UsageError(
            "--no_preserve_fp32_weights is incompatible with --objective "
            f"{config.objective.objective}, whose teacher is an fp32 average of the weights: drop "
            "one of the two"
        )
    if config.sharding.precision == "fp16":
        raise UsageError("--precision fp16 requires --fsdp fsdp2: with megatron use bf16")
    if backend_config.reduce_dtype != "fp32" and mesh.fsdp == 1:
        raise UsageError(
            f"--reduce_dtype {backend_config.reduce_dtype} requires --mesh_fsdp 2 or more with "
            "--fsdp megatron"
        )


def check_megatron_runs_here() -> None:
    """Raise UsageError if Megatron-FSDP cannot run here."""
    if not isinstance(devices.choose("cuda"), devices.Cuda):
        raise UsageError("--fsdp megatron requires CUDA: on the CPU use --fsdp fsdp2")
    try:
        if importlib.util.find_spec("transformer_engine"):  # imported by Megatron-FSDP
            prefer_cudnn_of_pytorch()
        with warnings.catch_warnings():  # about missing TransformerEngine and Apex
            warnings.simplefilter("ignore")
            import megatron_fsdp  # noqa: F401
    except ImportError:
        raise UsageError(
            "--fsdp megatron requires the package megatron-fsdp: python3 -m pip install "
            "-r requirements-gpu.txt, or use --fsdp fsdp2"
        ) from None
    except (OSError, RuntimeError, AssertionError) as error:  # from TransformerEngine
        reason = str(error).splitlines()[0]
        raise UsageError(
            "--fsdp megatron: TransformerEngine is installed but cannot be imported "
            f"({reason}): reinstall or uninstall it"
        ) from None


MEGATRON = FsdpImplementation(
    "gpu_fsdp.megatron:MegatronBackend", _check_megatron, megatron_private.WRITTEN_FOR
)
