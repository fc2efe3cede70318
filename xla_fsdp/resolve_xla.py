"""Which form of FSDP, mesh and attention a run on XLA has; decided before any device starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from training.config import RunConfig
from training.errors import UsageError
from training.files import check_own
from training.flags import by_field, check_needs
from training.mesh import Mesh, make_mesh
from training.resolve import (
    Run,
    check_batch,
    check_rows,
    resolve_common,
    resolve_model,
    sizes_of_largest,
    with_teacher,
)
from xla_fsdp import torch_xla_private, tpu
from xla_fsdp.attention.whole import Whole
from xla_fsdp.config import XlaConfig
from xla_fsdp.estimates import resolve_policy
from xla_fsdp.tpu import Topology, this_chip

if TYPE_CHECKING:
    from models.spec import ModelSizes, ModelSpec


# ------------------------------------------------------------------------------------------------
# Which form the product of attention takes: ``--attention``, with auto resolved.


FLASH_FROM = 1025
"""Tokens from which auto takes flash attention."""
GATHER_UP_TO = 16_384
"""Tokens up to which auto gathers keys over "domain": there the TPU compiler expects a step that is
shorter than a ring's, and memory is the same (docs/domain_parallelism.md)."""
_NAMES = {"flash": "flash", "sdpa": "PyTorch's", "whole": "whole sequences'"}
WIDEST_HEAD = 256
"""The kernels hold rows this wide in a TPU core's vector memory."""


def resolve_attention(
    config: RunConfig, own: XlaConfig, model: ModelSpec, generation: int | None
) -> tuple[XlaConfig, str]:
    """Decide ``--attention``; returns how the line that describes a run tells of it, too.

    ``generation`` is that of the TPU, None where there is none. Nothing is told where there is
    nothing to choose. Raises UsageError for kernels that cannot be used.
    """
    sizes, form = sizes_of_largest(config, model), own.attention
    of_kernels = _hinders_kernels(config, sizes, generation)
    of_whole = of_kernels or _hinders_whole(config, sizes, generation or 0)
    if form != "auto":
        reason = {"flash": of_kernels, "whole": of_whole}.get(form)
        if reason:
            raise UsageError(f"--attention {form} {reason}: use --attention sdpa")
        return own, "" if form == "sdpa" else f", {_NAMES[form]} attention"
    if of_kernels:
        return replace(own, attention="sdpa"), ""
    form = "flash" if sizes.num_tokens >= FLASH_FROM else "sdpa" if of_whole else "whole"
    text = f", {_NAMES[form]} attention ({sizes.num_tokens:,} tokens; flash from {FLASH_FROM:,})"
    return replace(own, attention=form), text


def resolve_domain(config: RunConfig, mesh: Mesh, model: ModelSpec) -> RunConfig:
    """Return the configuration with ``--domain_attention`` decided. Raises UsageError.

    Nothing is decided where tokens are not sharded.
    """
    if mesh.domain == 1:
        return config
    form, hindered = config.sharding.domain_attention, None
    if model.sizes.attn_drop_rate:
        hindered = f"has no dropout, here --att_dropout {model.sizes.attn_drop_rate}"
    if mesh.tensor > 1:
        hindered = f"is incompatible with --mesh_tensor {mesh.tensor}"
    if form == "ulysses":
        raise UsageError("--domain_attention ulysses requires --backend cuda: use ring or gather")
    if form == "ring" and hindered:
        raise UsageError(f"--domain_attention ring {hindered}: use gather")
    if form == "auto":
        few = model.sizes.num_tokens <= GATHER_UP_TO
        form = "gather" if hindered or few else "ring"
    return replace(config, sharding=replace(config.sharding, domain_attention=form))


def _hinders_whole(config: RunConfig, sizes: ModelSizes, generation: int) -> str | None:
    if sizes.num_tokens >= FLASH_FROM:
        return f"takes up to {FLASH_FROM - 1:,} tokens, this model has {sizes.num_tokens:,}"
    if config.sharding.mesh_domain > 1:
        return f"is incompatible with --mesh_domain {config.sharding.mesh_domain}"
    tokens, dtype = sizes.num_tokens, torch.float32
    if config.sharding.precision == "bf16":
        dtype = torch.bfloat16
    heads = sizes.num_heads // config.sharding.mesh_tensor
    if not Whole(1, tokens, heads, sizes.head_dim, dtype).fits(generation):
        return f"has no room in vector memory for {heads} heads of {sizes.head_dim}"
    return None


def _hinders_kernels(config: RunConfig, sizes: ModelSizes, generation: int | None) -> str | None:
    if generation is None:
        return "requires a TPU: its kernels run nowhere else"
    if sizes.attn_drop_rate:
        return f"has no dropout, here --att_dropout {sizes.attn_drop_rate}"
    tensor, domain = config.sharding.mesh_tensor, config.sharding.mesh_domain
    if tensor > 1 and domain > 1:
        return f"is incompatible with --mesh_domain {domain} and --mesh_tensor {tensor} at once"
    if sizes.head_dim > WIDEST_HEAD:
        return f"takes heads up to {WIDEST_HEAD} wide, this model's are {sizes.head_dim}"
    if sizes.value_dim != sizes.head_dim:
        return f"takes values as wide as keys, this model's are {sizes.value_dim}"
    return None


# ------------------------------------------------------------------------------------------------


XlaRun = Run[XlaConfig]

_GOOGLE = "0x1ae0"


def device_type() -> str:
    """ "TPU" or "CPU": what PJRT_DEVICE says, else TPU where chips are attached."""
    chosen = os.environ.get("PJRT_DEVICE")
    if chosen:
        return chosen
    return "TPU" if tpu_is_attached() else "CPU"


def tpu_is_attached() -> bool:
    """Tell whether this host has TPU chips (a look at PCI, starts nothing)."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if all(vendor.read_text().strip() != _GOOGLE for vendor in vendors):
        return False  # without the seconds that importing torch_xla takes
    # Imported, torch_xla would choose the device by itself, and warn of it.
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")
    return torch_xla_private.available_chips() > 0


def resolve(config: RunConfig, own: XlaConfig) -> XlaRun:
    """Return the run that the flags ask for on the devices of this machine, or on its slice's.

    Raises UsageError.
    """
    run = _resolve(config, own, device_type(), None)
    # Asked, not resolved: another model may be scanned, or have its attention computed, otherwise.
    beside = replace(own, xla_fsdp=run.own.xla_fsdp, mark_step_every_n_blocks=0)
    return with_teacher(run, lambda config: _resolve(config, beside, device_type(), None))


def resolve_for_slice(
    config: RunConfig, own: XlaConfig, topology: Topology, model: ModelSpec | None = None
) -> XlaRun:
    """Return the run as it would be on slices that are not here. Raises UsageError.

    ``model``: the one that the configuration names, if it is open already.
    """
    return _resolve(config, own, "TPU", topology, model)


def _resolve(
    config: RunConfig,
    own: XlaConfig,
    device: str,
    topology: Topology | None,
    model: ModelSpec | None = None,
) -> XlaRun:
    config = resolve_common(replace(config, backend="xla"))
    _check_precision(config)
    own, why_form = _resolve_form(config, own)
    check_needs(config, own)
    _check_form(config, own, device)
    mesh = make_mesh(config.sharding, topology.devices if topology else device_count(own))
    if device == "TPU" and topology is None:
        _check_slices(mesh)
    if model is None:  # after what is known at once: timm takes a second
        config, model = resolve_model(config)
    own = _resolve_scan(config, own, model)
    _check_gather(config, own)
    check_mesh(mesh, model)
    config = resolve_domain(config, mesh, model)
    generation = None
    if device == "TPU":
        generation = topology.generation if topology else torch_xla_private.tpu_generation()
    own, why_attention = resolve_attention(config, own, model, generation)
    chip = None
    if device == "TPU" and config.sharding.grad_ckpt == "auto":
        chip = topology.chip if topology else this_chip()
    config, why_policy = resolve_policy(config, own, model, mesh, device, chip)
    why = {"xla_fsdp": why_form, "attention": why_attention, "grad_ckpt": why_policy}
    run = XlaRun(config, own, model, mesh, why)
    check_batch(run)
    return run


# -- the form of FSDP -----------------------------------------------------------------


def _asks_for_nested(config: RunConfig, own: XlaConfig) -> str | None:
    """Return the flag that only nested FSDP has, if one is given."""
    given = {
        "--no_reshard_after_forward": not config.sharding.reshard_after_forward,
        "--flatten_parameters": own.flatten_parameters,
        "--shard_on_cpu": own.shard_on_cpu,
    }
    return next((name for name, is_given in given.items() if is_given), None)


def _resolve_form(config: RunConfig, own: XlaConfig) -> tuple[XlaConfig, str]:
    """Decide ``--xla_fsdp``; returns what has decided it, too."""
    if own.xla_fsdp != "auto":
        return own, ""
    flag = _asks_for_nested(config, own)
    reason = f"{flag} asks for it" if flag else "by the TPU compiler lighter than nested"
    return replace(own, xla_fsdp="nested" if flag else "spmd"), f" (--xla_fsdp auto: {reason})"


def _resolve_scan(config: RunConfig, own: XlaConfig, model: ModelSpec) -> XlaConfig:
    hindered_by = _hinders_scan(config, own)
    differ = None if hindered_by else model.why_blocks_differ()
    scan = not (hindered_by or differ) if own.scan_blocks is None else own.scan_blocks
    policy = config.sharding.grad_ckpt
    if policy in ("selective", "offload") and not scan:
        reason = hindered_by or differ or "--no-scan_blocks"
        raise UsageError(
            f"--grad_ckpt {policy} requires scanned blocks, here is {reason}: use --grad_ckpt full"
        )
    if own.matmul == "int8" and not scan:
        reason = hindered_by or differ or "--no-scan_blocks"
        raise UsageError(f"--matmul int8 requires scanned blocks, here is {reason}: drop one")
    if policy == "offload" and own.mark_step_after_forward:  # the host's memory is the graph's own
        raise UsageError(
            "--grad_ckpt offload is incompatible with --mark_step_after_forward: drop one"
        )
    if own.scan_blocks is None:
        return replace(own, scan_blocks=scan)
    if own.scan_blocks and hindered_by:
        raise UsageError(f"--scan_blocks is incompatible with {hindered_by}: drop one of the two")
    if own.scan_blocks and differ:
        raise UsageError(f"--scan_blocks requires blocks that are alike: {differ}")
    return own


def _check_gather(config: RunConfig, own: XlaConfig) -> None:
    if own.gather_dtype != "auto" and not own.scan_blocks:
        hindered_by = _hinders_scan(config, own) or "--no-scan_blocks"
        raise UsageError(
            f"--gather_dtype {own.gather_dtype} requires scanned blocks, here is {hindered_by}"
        )


def _hinders_scan(config: RunConfig, own: XlaConfig) -> str | None:
    if own.xla_fsdp == "nested":
        return "--xla_fsdp nested"
    if own.mark_step_every_n_blocks:
        return "--mark_step_every_n_blocks"
    return None


def _check_precision(config: RunConfig) -> None:
    if config.sharding.precision == "fp16":
        raise UsageError("--precision fp16 requires --backend cuda: on XLA use bf16")


def _check_form(config: RunConfig, own: XlaConfig, device: str) -> None:
    sharding, known = config.sharding, by_field(RunConfig)
    if own.xla_fsdp == "nested":
        for name in ("mesh_dcn", "mesh_fsdp", "mesh_domain", "mesh_tensor"):
            if getattr(sharding, name) != known[name].field.default:
                raise UsageError(
                    f"{known[name].names[0]} requires --xla_fsdp spmd: nested FSDP shards over all "
                    "devices"
                )
    elif not sharding.reshard_after_forward:
        raise UsageError("--no_reshard_after_forward requires --xla_fsdp nested, not spmd")
    if device == "CPU" and own.xla_fsdp == "nested" and own.cpu_devices > 1:
        raise UsageError(
            f"nested FSDP runs on 1 CPU device, not {own.cpu_devices} (XLA's CPU collectives "
            "hang between processes): use --cpu_devices 1 or --xla_fsdp spmd"
        )
    if config.optimizer.optimizer == "muon" and own.flatten_parameters:
        raise UsageError(
            "--optimizer muon is incompatible with --flatten_parameters: drop one of the two"
        )
    if own.compile_cache_dir and (cache := Path(own.compile_cache_dir)).exists():
        if not cache.is_dir():
            raise UsageError(f"--compile_cache_dir {cache} is a file, not a folder")
        try:
            check_own(cache, "--compile_cache_dir")  # what is in it is run
        except OSError as error:
            raise UsageError(f"--compile_cache_dir {cache}: {error.strerror}") from None


# -- devices --------------------------------------------------------------------------


def device_count(own: XlaConfig) -> int:
    """Devices the run will use, all hosts together, told without starting them."""
    if device_type() == "CPU":
        return own.cpu_devices
    return torch_xla_private.expected_devices() * slice_count()  # it counts this slice's


def slice_count() -> int:
    """TPU slices of this run, as libtpu is told: by the environment or the TPU VM's metadata."""
    name = "MEGASCALE_NUM_SLICES"
    return int(os.environ.get(name) or torch_xla_private.tpu_variables().get(name) or 1)


def check_mesh(mesh: Mesh, model: ModelSpec) -> None:
    """Raises UsageError for a model that cannot be sharded so."""
    check_rows(mesh, model)
    if mesh.tensor == 1:
        return
    if reason := model.why_no_tensor_parallel():
        raise UsageError(
            f"--mesh_tensor {mesh.tensor} is incompatible with --model {model.name}: {reason}"
        )
    heads, hidden = model.sizes.num_heads, model.sizes.hidden
    if heads % mesh.tensor:
        raise UsageError(f"--mesh_tensor {mesh.tensor} does not divide --num_heads {heads}")
    if hidden % mesh.tensor:
        raise UsageError(f"--mesh_tensor {mesh.tensor} does not divide the MLP's width, {hidden}")


def _check_slices(mesh: Mesh) -> None:
    """Raises UsageError for a mesh that does not fit the slices and hosts of this run."""
    slices = slice_count()
    if mesh.dcn % slices:
        raise UsageError(
            f"--mesh_dcn {mesh.dcn} is no multiple of the {slices} slices of this run "
            "(MEGASCALE_NUM_SLICES)"
        )
    here = torch_xla_private.available_devices()
    if mesh.devices > here and here % mesh.tensor:
        raise UsageError(f"--mesh_tensor {mesh.tensor} must divide the {here} devices of a host")


def check_libtpu() -> None:
    """Raises UsageError on a TPU if libtpu would end the run for what LIBTPU_INIT_ARGS says."""
    if device_type() == "TPU":
        tpu.set_for_this_tpu()
        tpu.check()
