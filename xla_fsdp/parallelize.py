"""How a plain Vision Transformer becomes a parallel one on XLA: one function for each form of FSDP.

``units`` are those of ``ModelSpec.units``: the blocks, and last the model around them. They are
filled, changed and sent to the devices one after the other, so that the host never holds more than
one. Modules keep timm's names; what they compute is changed from outside.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, checkpoint_module

from models.initialize import fill_buffers
from models.positions import Constant
from models.spec import Units
from training.backend import InitializeModule
from xla_fsdp import around_blocks
from xla_fsdp.attention import sharded
from xla_fsdp.attention.flash import use_flash
from xla_fsdp.attention.whole import use_whole
from xla_fsdp.layout import MeshLayout, mark_both
from xla_fsdp.products import multiply_unfolded, normalize_unfolded
from xla_fsdp.remat import SAVED_BY, SaveInput
from xla_fsdp.resolve_xla import XlaPlan
from xla_fsdp.scan import ScannedBlocks
from xla_fsdp.tensor_parallel import pack, shard_heads_and_columns
from xla_fsdp.torch_xla_private import is_sharded, scatter_gradients_as_rows


def parallelize_spmd(
    model: nn.Module,
    units: Units,
    initialize: InitializeModule,
    plan: XlaPlan,
    layout: MeshLayout,
    end_graph: Callable[..., None],
) -> nn.Module:
    """Make ``model`` one program for all devices, sharded by marks that the partitioner follows."""
    mesh = plan.mesh
    _choose_mask(model, plan)
    for stack in plan.model.stacks:
        blocks = [(name, block) for name, block in units[:-1] if name.rpartition(".")[0] == stack]
        entry: nn.Module  # what has the input of the first block
        if plan.scan:
            entry = scan_blocks(model, stack, blocks, initialize, plan, layout, end_graph)
        else:
            entry = blocks[0][1]
            for name, block in blocks:
                initialize(block, name)
                fill_buffers(block, layout.constant)
                # SaveInput saves nothing outside of a scan; --grad_ckpt is full or none here.
                change_block(block, plan, layout, SaveInput())
                # Rematerialize after attention is changed, and before what wraps the whole block.
                if plan.remat == "full" and _trains(block):
                    checkpoint_module(block)
                layout.place(block)
                # Domain: tokens stay sharded between blocks, and vectors are gathered before use.
                if mesh.domain > 1 and mesh.tensor == 1:
                    around_blocks.gather_small_parameters(block, layout.gather_small)
                around_blocks.after_forward(block, layout.mark_tokens)
                end_graph()  # the device has this unit before the host makes the next one
        if plan.residual_bf16:  # residuals stay bf16 if the first block's input is bf16
            around_blocks.before_forward(entry, lambda x: x.to(torch.bfloat16))

    # Around the blocks: embedding, norm, head.
    initialize(model, units[-1][0])
    fill_buffers(model, layout.constant)
    layout.place(model)
    around_blocks.convolve_by_product(model, layout.mark_rows)
    around_blocks.find_largest_by_place(model)
    if _must_unfold_norms(plan):
        normalize_unfolded(model)
    mark_images = functools.partial(mark_both, mark=layout.mark_images)
    mark_rows = functools.partial(mark_both, mark=layout.mark_rows)
    # Pooling by attention: its linear layers, too, keep images and tokens apart.
    pool = getattr(model, "attn_pool", None)
    if pool is not None and mesh.domain * mesh.tensor > 1:
        multiply_unfolded(pool.kv, layout)
        for layer in [part for part in pool.modules() if isinstance(part, nn.Linear)]:
            mark = mark_rows if layer is pool.kv else mark_images
            around_blocks.before_forward(layer, mark)
            around_blocks.after_forward(layer, mark)
    # Several axes: small parameters are gathered before use, results have whole images.
    if len(mesh.axis_sizes) > 1 or mesh.domain > 1:
        in_blocks = tuple(f"{stack}." for stack in plan.model.stacks)
        around_blocks.gather_small_parameters(model, layout.gather_small, excluded=in_blocks)
        around_blocks.before_forward(model.get_submodule("head"), mark_images)
        around_blocks.after_forward(model, functools.partial(tree_map, mark_images))
    if mesh.tensor > 1:
        around_blocks.drop_patches_of_whole_images(model, layout.mark_images)
    if plan.bf16:
        around_blocks.compute_in_bf16(model)
    # Breaks of the graph come last: outside of all that belongs to a block.
    if plan.break_graph_every:
        assert not plan.scan  # resolve_xla excludes it: scanned blocks are no part of the model
        around_blocks.break_graph_every(
            plan.break_graph_every, [block for _, block in units[:-1]], end_graph
        )
    end_graph(wait=True)
    return model


def change_block(block: nn.Module, plan: XlaPlan, layout: MeshLayout, save: SaveInput) -> None:
    """Change how a block computes: attention, linear layers, norms."""
    mesh, image_shards = plan.mesh, layout.shards(*plan.mesh.logical_spec("batch"))
    # For "tensor". With a scan this packs the template, and scan_blocks the blocks that fill it.
    pack(block, layout.packed)

    # Domain: attention among the devices that share an image. (With "tensor", or with dropout in
    # attention, the partitioner finds the exchange by itself.)
    if plan.domain_attention:
        sharded.use_over_domain(block, plan, layout)
    # Tensor: each device computes some heads and some columns of the MLP.
    elif mesh.tensor > 1:
        shard_heads_and_columns(block, plan, layout, save)
    # Attention: by kernels on each device's own images; "sdpa" leaves it to PyTorch.
    elif plan.attention == "flash":
        use_flash(block, image_shards)
    elif plan.attention == "whole":
        use_whole(block, image_shards, save)

    # Linear layers keep images and tokens apart, so that each can be sharded.
    if plan.scan and mesh.tensor == 1:
        multiply_unfolded(block, layout, save)
    elif mesh.domain > 1 and mesh.tensor == 1:
        multiply_unfolded(block, layout)
    if _must_unfold_norms(plan):
        normalize_unfolded(block)


def scan_blocks(
    model: nn.Module,
    stack: str,
    blocks: Units,
    initialize: InitializeModule,
    plan: XlaPlan,
    layout: MeshLayout,
    end_graph: Callable[..., None],
) -> ScannedBlocks:
    """Put in the place of a stack of blocks a loop with one that has all parameters, stacked.
    The loop rematerializes, gathers weights and marks tokens itself, in each round."""
    save = SAVED_BY[plan.remat]()
    layers = blocks[0][1].named_modules() if plan.int8 else ()
    int8_weights = {f"{name}.weight" for name, layer in layers if type(layer) is nn.Linear}

    def gather(name: str, weight: torch.Tensor) -> torch.Tensor:
        # Products in int8 gather their weights themselves, after rounding.
        return weight if name in int8_weights else layout.gather(weight, name)

    scanned = ScannedBlocks(
        getattr(model, stack),
        layout,
        save,
        adapt=lambda block: change_block(block, plan, layout, save),
        gather=gather,
        bf16=plan.bf16,
    )
    for index, (name, block) in enumerate(blocks):
        initialize(block, name)
        pack(block, layout.packed)  # the source, as change_block has packed the template
        # Shard and place: into the stack, whose shards are on the devices already.
        scanned.fill(index, block)
        block.to("meta")  # the host needs no second copy
        end_graph()  # the device has this unit before the host makes the next one
    plan.model.put_blocks(model, stack, scanned)
    return scanned


def _must_unfold_norms(plan: XlaPlan) -> bool:
    """Return True where a norm that folds images and tokens would take padding for tokens.

    It would if parts of the tokens are uneven, and a device has one image or shares it along
    "domain" (where the partitioner may also replicate what comes after it).
    """
    mesh = plan.mesh
    drops_patches = bool(plan.model.settings.get("patch_drop_rate"))
    is_uneven = drops_patches or plan.model.sizes.num_tokens % (mesh.domain * mesh.tensor) > 0
    return is_uneven and (mesh.domain > 1 or plan.pass_size == mesh.batch_parts)


def parallelize_nested(
    model: nn.Module,
    units: Units,
    initialize: InitializeModule,
    plan: XlaPlan,
    device: torch.device,
    constant: Constant,
    end_graph: Callable[..., None],
) -> nn.Module:
    """Wrap each block, then the model, in torch_xla's FSDP: a program a device, ``device``."""
    _choose_mask(model, plan)
    blocks: list[nn.Module] = []
    for name, block in units[:-1]:
        initialize(block, name)
        fill_buffers(block, constant)
        # Attention: by kernels, or PyTorch's.
        if plan.attention == "flash":
            use_flash(block)
        elif plan.attention == "whole":
            use_whole(block)
        # Rematerialize inside of the unit, so that weights are gathered once more for it.
        if plan.remat == "full" and _trains(block):
            checkpoint_module(block)
        unit = _nested_unit(block, plan, device)
        model.set_submodule(name, unit)
        blocks.append(unit)
        end_graph()  # the device has this unit before the host makes the next one

    # Around the blocks: embedding, norm, head.
    initialize(model, units[-1][0])
    fill_buffers(model, constant)
    around_blocks.convolve_by_product(model, torch.Tensor.contiguous)
    around_blocks.find_largest_by_place(model)
    root = _nested_unit(model, plan, device)
    if plan.bf16:
        around_blocks.compute_in_bf16(root)
    # Breaks of the graph are outside of the units.
    if plan.break_graph_every:
        around_blocks.break_graph_every(plan.break_graph_every, blocks, end_graph)
    end_graph(wait=True)
    return root


def _nested_unit(module: nn.Module, plan: XlaPlan, device: torch.device) -> nn.Module:
    if not plan.fsdp:
        return module.to(device)
    # Shard rows of each parameter where the devices divide them. A flat shard has another layout on
    # a TPU, so each gathered weight and gradient would be copied. (Padding a first dimension, of 1
    # in the position embedding, could take many times the memory.)
    devices = plan.mesh.devices
    left = [p for p in module.parameters() if not is_sharded(p)]
    by_row = not plan.flatten_parameters and all(p.shape[0] % devices == 0 for p in left)
    unit = XlaFullyShardedDataParallel(
        module if plan.shard_on_cpu else module.to(device),
        reshard_after_forward=plan.reshard_after_forward,
        flatten_parameters=plan.flatten_parameters,
        shard_param_on_dim_0=by_row,
        execute_sharding_on_init=False,  # the graph ends after each unit anyway
        # Pinned, a gathering is an all-reduce of padded whole weights, other on each rank.
        pin_layout_in_collective_ops=False,
        # FSDP's own linear layer runs its backward in fp32 under autocast.
        _use_xla_patched_linear=not plan.bf16,
    )
    if not by_row:
        scatter_gradients_as_rows(unit, devices)
    return unit


def _choose_mask(model: Any, plan: XlaPlan) -> None:
    """Let a model of packed sequences give its blocks segments where attention is by kernels;
    elsewhere it gives them a matrix of booleans."""
    if hasattr(model, "mask_of") and plan.attention in ("flash", "whole"):
        model.mask_of = lambda segments: segments


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
