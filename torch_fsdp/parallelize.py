"""How a plain Vision Transformer becomes a parallel one with FSDP2: ``parallelize``, step by step.

(Megatron-FSDP's is ``gpu_fsdp/parallelize.py``.)
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from models.blocks import attentions
from models.initialize import cast_buffers
from models.positions import PartOfPositions, TokenPart
from torch_fsdp.devices import Device
from torch_fsdp.domain import DomainGroup, attend_over_processes
from torch_fsdp.recipe import TorchRun, parallelize_block
from training.backend import InitializeModule

OUTER, SHARD, DOMAIN = "dcn", "fsdp", "domain"
"""The axes: of replicas, of the shards of a replica, and of the rows of an image."""


def make_device_meshes(run: TorchRun, device: Device) -> tuple[DeviceMesh, DeviceMesh]:
    """Make the run's mesh as PyTorch's; all processes must call it.

    Returns (dcn, fsdp), over which parameters are sharded: processes that share an image shard them
    like all others. And (dcn, fsdp, domain), the same one where no processes share an image.
    """
    mesh = run.mesh
    shape: tuple[int, ...] = (mesh.dcn, mesh.fsdp * mesh.domain)
    if run.recipe.zero == 0:
        shape = (mesh.devices, 1)
    # Which process has which part of the batch is of no account, but those that share an image have
    # consecutive ranks.
    ranks = device.arrange(shape) if mesh.domain == 1 else torch.arange(mesh.devices).view(shape)
    parameters = DeviceMesh(device.where.type, ranks, mesh_dim_names=(OUTER, SHARD))
    if mesh.domain == 1:
        return parameters, parameters
    ranks = ranks.view(mesh.dcn, mesh.fsdp, mesh.domain)
    return parameters, DeviceMesh(device.where.type, ranks, mesh_dim_names=(OUTER, SHARD, DOMAIN))


def parallelize(
    model: nn.Module,
    units: list[tuple[str, nn.Module]],
    initialize: InitializeModule,
    run: TorchRun,
    meshes: tuple[DeviceMesh, DeviceMesh],
    device: Device,
) -> dict[str, PartOfPositions]:
    """Fill, change and shard ``model``, which is on the meta device, in place.

    ``units``: each block with its name, then the model around them. The host and the device hold
    one of them at a time: it is filled on the CPU, and of its copy on the device only this
    process's part stays.
    ``meshes`` are of ``make_device_meshes``. Returns the position embeddings that were divided over
    the processes that share an image, by their names.
    """
    recipe, (mesh, image_mesh) = run.recipe, meshes

    # Attention sees the tokens of all processes that share an image.
    if recipe.domain_attention:
        index = image_mesh.get_local_rank(DOMAIN)
        rows, across = run.model.sizes.grid[0], run.model.sizes.row_patches
        patches = [len(run.mesh.rows_of(rows, place)) * across for place in range(run.mesh.domain)]
        group = DomainGroup(image_mesh.get_group(DOMAIN), index, tuple(patches))
        fused = device.fused_attention
        attend_over_processes(model, recipe.domain_attention, group, fused=fused)
    elif not device.fused_attention:
        for attention in attentions(model):
            attention.fused_attn = False  # type: ignore[assignment]

    # Each block: its weights; TransformerEngine's or timm's block, recomputation, torch.compile;
    # and then its shards.
    blocks = []
    for name, block in units[:-1]:
        initialize(block, name)
        block = parallelize_block(model, name, block, recipe, device.where)
        cast_buffers(block, recipe.dtype)
        _move(block, device)
        blocks.append(_shard(block, run, mesh))

    # What is around the blocks. Processes that share an image have the positions of their tokens.
    initialize(model, "")
    _move(model, device)
    positions: dict[str, PartOfPositions] = {}
    if recipe.domain_attention:
        first, here = sum(patches[:index]), patches[index]
        part = TokenPart(first, here, sum(patches), group.sum, group.largest)
        positions = run.model.compute_on_part(model, part)
    for module in positions.values():
        # Processes along "domain" have other positions: those along "dcn" and "fsdp" alone hold,
        # and reduce, the same ones.
        fully_shard(module, **_options(run, image_mesh))
        # A mean is taken over those; all others' gradients are of a mean over "domain", too.
        module.register_forward_hook(
            lambda _, __, values: _ScaleGradient.apply(values, 1 / group.size)
        )
    _shard(model, run, mesh, is_root=True)

    # How many blocks are unsharded ahead of the one that computes.
    for i, sharded in enumerate(blocks):
        if run.own.forward_prefetch:
            after = blocks[i + 1 : i + 1 + run.own.forward_prefetch]
            sharded.set_modules_to_forward_prefetch(after)
        before = blocks[max(0, i - run.own.backward_prefetch) : i][::-1]
        # An empty list means PyTorch's own order, one ahead. The block itself, which is unsharded
        # already, means none.
        sharded.set_modules_to_backward_prefetch(before or [sharded])
    recipe.blocks.wrap_model(model)
    return positions


def _move(unit: nn.Module, device: Device) -> None:
    """Move what is not on the device yet, nor sharded, there.

    ``fully_shard`` would do so by setting a parameter's data, which PyTorch refuses for a TPU.
    """
    for module in unit.modules():
        for name, values in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if isinstance(values, DTensor) or values.device.type == device.where.type:
                continue
            moved = values.detach().to(device.where)
            if isinstance(values, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=values.requires_grad)
            setattr(module, name, moved)


def _shard(
    unit: nn.Module, run: TorchRun, mesh: DeviceMesh, *, is_root: bool = False
) -> FSDPModule:
    fully_shard(unit, **_options(run, mesh, is_root=is_root))
    assert isinstance(unit, FSDPModule)
    # Uneven parts get their final, padded storage only when first unsharded; the optimizer must
    # not hold the one before.
    unit.unshard()
    unit.reshard()
    return unit


def _options(run: TorchRun, mesh: DeviceMesh, *, is_root: bool = False) -> dict[str, Any]:
    recipe = run.recipe
    shard = mesh[SHARD]  # of the mesh with all axes: PyTorch warns of a slice of a slice
    lower = {recipe.dtype, recipe.reduce_dtype} != {torch.float32}
    return {
        "mesh": mesh[OUTER, SHARD] if mesh.size(0) > 1 else shard,
        "shard_placement_fn": functools.partial(_placement, parts=shard.size()),
        # The root's weights would be unsharded again at once by the backward pass.
        "reshard_after_forward": recipe.zero == 3 and not is_root,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=recipe.dtype if lower else None,
            reduce_dtype=recipe.reduce_dtype if lower else None,
            output_dtype=torch.float32 if is_root else None,
        ),
        "offload_policy": CPUOffloadPolicy() if run.own.cpu_offload else OffloadPolicy(),
    }


def _placement(parameter: nn.Parameter, parts: int) -> Shard | None:
    """Shard what has one entry for each token, (1, tokens, width), along a dimension that ``parts``
    divides; None: as PyTorch does it, along the first."""
    if parameter.dim() != 3 or parameter.shape[0] != 1:
        return None
    return next((Shard(d) for d in (1, 2) if parameter.shape[d] % parts == 0), None)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad * ctx.factor, None
