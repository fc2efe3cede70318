"""Resolves a run on XLA before any device starts: form of FSDP, mesh, attention, what is saved."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from tpu_attention.choice import for_teacher, resolve_attention
from tpu_attention.kernels import DEFAULT_VECTOR_MEMORY, LARGEST_VECTOR_MEMORY
from training.config import RunConfig, ShardingConfig
from training.elastic import check_elastic
from training.errors import UsageError
from training.flags import by_field
from training.mesh import make_mesh, on_slices
from training.resolve import (
    check_batch,
    check_heads_and_columns,
    check_rows,
    resolve_common,
    resolve_domain,
    resolve_model,
    sizes_of_largest,
    with_micro_batches,
)
from training.rules import check_rules
from training.teachers import with_teacher
from xla_fsdp import torch_xla_private, tpu
from xla_fsdp.config import XlaConfig
from xla_fsdp.environment import check_device, check_variables, device_type
from xla_fsdp.estimates import resolve_policy
from xla_fsdp.parallel_plan import XlaPlan, XlaRun
from xla_fsdp.torch_xla_private import host_tpu
from xla_fsdp.tpu import Topology

if TYPE_CHECKING:
    from models.spec import ModelSpec


def resolve(config: RunConfig, xla: XlaConfig) -> XlaRun:
    """Return the run that these flags describe on this machine or its slices. Raises UsageError."""
    check_variables()
    check_device()
    run = resolve_for_slice(config, xla, None)
    check_elastic(  # launch.xla_dist and launch.gke set the variable
        "ELASTIC_SLICES",
        "slices",
        "--elastic ",
        lambda slices: resolve_for_slice(config, xla, None, run.model, slices),
    )
    # Scan and attention may resolve differently for the teacher, also if --print_config has filled
    # in the student's: flags only turn them off.
    teacher_xla = replace(
        xla,
        xla_fsdp=run.backend_config.xla_fsdp,
        mark_step_every_n_blocks=0,
        scan_blocks=None if xla.scan_blocks else xla.scan_blocks,
    )
    return with_teacher(
        run, lambda config: resolve_for_slice(for_teacher(config), teacher_xla, None)
    )


def resolve_for_slice(
    config: RunConfig,
    xla: XlaConfig,
    topology: Topology | None,
    model: ModelSpec | None = None,
    slices: int | None = None,
) -> XlaRun:
    """Return the run on the slice ``topology``, which need not exist here, or on this machine.

    ``slices``: the number of slices (default: those of this machine's job). ``model``: the model if
    it is already open. Raises UsageError.
    """
    torch_xla_private.prepare_import()
    device = "TPU" if topology else device_type()
    config = resolve_common(replace(config, backend="xla"))
    if config.sharding.precision == "fp16":
        raise UsageError("--precision fp16 requires --backend cuda: with xla use bf16")
    xla = _resolve_form(config.sharding, xla)
    check_rules(config, xla)
    _check_form(config.sharding, config.optimizer.optimizer, xla, device)
    if topology:
        mesh = make_mesh(config.sharding, topology.devices)
    else:
        if slices is None:
            slices = slice_count() if device == "TPU" else 1
        config = replace(config, sharding=on_slices(config.sharding, slices))
        if device == "CPU":
            mesh = make_mesh(config.sharding, xla.cpu_devices)
        else:  # torch_xla counts the devices of this slice only
            devices = host_tpu().num_expected_global_devices() * slices
            mesh = make_mesh(config.sharding, devices)
            here = host_tpu().num_available_devices()
            if mesh.devices > here and here % mesh.tensor:
                raise UsageError(
                    f"--mesh_tensor {mesh.tensor} must divide {here}, the number of devices per "
                    "host"
                )
    config = with_micro_batches(config, mesh)
    if model is None:  # after the cheap checks: timm takes a second
        config, model = resolve_model(config)
    xla = _resolve_scan(config.sharding, xla, model)

    # Check that the mesh can shard the model.
    check_rows(mesh, model)
    check_heads_and_columns(mesh, model)
    sizes, tensor = model.sizes, f"--mesh_tensor {mesh.tensor}"

    # --domain_attention.
    hindered = None
    if sizes.attn_drop_rate:
        hindered = f"does not support --att_dropout {sizes.attn_drop_rate}: use gather"
    if mesh.tensor > 1:
        hindered = f"is incompatible with {tensor}: use gather"
    refused = {"ring": hindered, "ulysses": "requires --backend cuda: use ring or gather"}
    gathers = hindered or sizes.num_tokens <= GATHER_UP_TO
    sharding = config.sharding
    if mesh.domain > 1:
        sharding = resolve_domain(sharding, refused, auto="gather" if gathers else "ring")
        config = replace(config, sharding=sharding)

    # Choices that depend on the TPU generation.
    generation, chip = None, None
    if device == "TPU":
        generation = topology.generation if topology else host_tpu().version()
    largest = sizes_of_largest(config.data, model)
    memory = None
    if generation is not None:
        memory = LARGEST_VECTOR_MEMORY if generation > 4 else DEFAULT_VECTOR_MEMORY
    sharding = resolve_attention(sharding, model, largest, memory)
    config = replace(config, sharding=sharding)
    if device == "TPU" and sharding.grad_ckpt == "auto":
        chip = topology.chip if topology else tpu.CHIPS_BY_KIND.get(tpu.kind_here())
    config, why_policy = resolve_policy(config, xla, model, mesh, device, chip)
    sharding = config.sharding
    # The partitioner chooses the communication of attention with "tensor", or with dropout in it.
    exchanges = mesh.domain > 1 and mesh.tensor == 1 and not sizes.attn_drop_rate
    plan = XlaPlan(
        fsdp=not sharding.run_without_fsdp,
        scan=bool(xla.scan_blocks),
        attention=sharding.attention,
        domain_attention=sharding.domain_attention if exchanges else None,
        grad_ckpt=sharding.grad_ckpt,
        bf16=sharding.precision == "bf16",
        residual_bf16=xla.residual_dtype == "bf16",
        int8=sharding.matmul == "int8",
        gather_fp8=sharding.gather_dtype == "fp8",
    )
    run = XlaRun(config, xla, model, mesh, plan, {"grad_ckpt": why_policy})
    check_batch(run)
    return run


def _resolve_form(sharding: ShardingConfig, xla: XlaConfig) -> XlaConfig:
    """Resolve ``--xla_fsdp``."""
    if xla.xla_fsdp != "auto":
        return xla
    keeps_whole = not sharding.reshard_after_forward
    is_nested = keeps_whole or xla.flatten_parameters or xla.shard_on_cpu
    return replace(xla, xla_fsdp="nested" if is_nested else "spmd")


def _check_form(sharding: ShardingConfig, optimizer: str, xla: XlaConfig, device: str) -> None:
    """Raise UsageError for flags that are incompatible with ``--xla_fsdp``."""
    if sharding.matmul == "fp8":
        raise UsageError("--matmul fp8 requires --backend torchtpu: with xla use int8")
    if xla.xla_fsdp == "nested":
        known = by_field(RunConfig)
        for name in ("mesh_dcn", "mesh_fsdp", "mesh_domain", "mesh_tensor"):
            if getattr(sharding, name) != known[name].field.default:
                raise UsageError(
                    f"{known[name].names[0]} requires --xla_fsdp spmd: nested FSDP always shards "
                    "over all devices"
                )
    elif not sharding.reshard_after_forward:
        raise UsageError("--no_reshard_after_forward requires --xla_fsdp nested, not spmd")
    if device == "CPU" and xla.xla_fsdp == "nested" and xla.cpu_devices > 1:
        raise UsageError(
            f"--xla_fsdp nested is incompatible with --cpu_devices {xla.cpu_devices} (XLA's CPU "
            "collectives hang between processes): use --cpu_devices 1 or --xla_fsdp spmd"
        )
    if optimizer == "muon" and xla.xla_fsdp == "nested":
        raise UsageError("--optimizer muon requires --xla_fsdp spmd, as it updates whole matrices")


def _resolve_scan(sharding: ShardingConfig, xla: XlaConfig, model: ModelSpec) -> XlaConfig:
    """Resolve ``--scan_blocks``. Raises UsageError for flags that require or exclude it."""
    policy = sharding.grad_ckpt
    breaks = "--mark_step_every_n_blocks" if xla.mark_step_every_n_blocks else None
    hindered_by = "--xla_fsdp nested" if xla.xla_fsdp == "nested" else breaks
    differ = None if hindered_by else model.why_blocks_differ()
    scan = not (hindered_by or differ) if xla.scan_blocks is None else xla.scan_blocks
    if not scan:
        reason = hindered_by or differ or "--no-scan_blocks"
        needs = f"requires scanned blocks, which this run does not have ({reason})"
        if policy in ("selective", "offload"):
            raise UsageError(f"--grad_ckpt {policy} {needs}: use --grad_ckpt full")
        if sharding.matmul == "int8":
            raise UsageError(f"--matmul int8 {needs}: drop it")
        if sharding.gather_dtype != "auto":
            raise UsageError(f"--gather_dtype {sharding.gather_dtype} {needs}: drop it")
    if policy == "offload" and xla.mark_step_after_forward:  # the host's memory is the graph's own
        raise UsageError(
            "--grad_ckpt offload is incompatible with --mark_step_after_forward: drop one of the "
            "two"
        )
    if xla.scan_blocks and hindered_by:
        raise UsageError(f"--scan_blocks is incompatible with {hindered_by}: drop one of the two")
    if xla.scan_blocks and differ:
        raise UsageError(f"--scan_blocks requires blocks of the same structure: {differ}")
    return replace(xla, scan_blocks=scan)


GATHER_UP_TO = 16_384
"""The number of tokens up to which "auto" gathers keys over "domain": by the TPU compiler's
estimate the step is shorter than with a ring, and memory is the same
(docs/evidence/domain_parallelism.md)."""


def slice_count() -> int:
    """Return the number of TPU slices from the environment or the VM's metadata, like libtpu."""
    name = "MEGASCALE_NUM_SLICES"
    return int(os.environ.get(name) or host_tpu().get_tpu_env().get(name) or 1)


def check_installed() -> None:
    """Raise UsageError if torch_xla is not installed."""
    if importlib.util.find_spec("torch_xla") is None:
        raise UsageError(
            "--backend xla requires the package torch_xla: "
            "python3 -m pip install -r requirements-tpu.txt"
        )
