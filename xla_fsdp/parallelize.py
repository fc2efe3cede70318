"""Turns a plain Vision Transformer into a parallel one on XLA: one function per form of FSDP.

``units`` are those of ``ModelSpec.units``: the blocks, and last the model around them. They are
initialized, modified and sent to the devices one at a time, so the host never holds more than one.
Modules keep timm's names; hooks and replaced methods change what they compute.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, checkpoint_module

from models.initialize import fill_buffers
from models.patches import embed_by_product
from models.positions import Constant
from models.spec import Units
from tpu_attention.choice import choose_mask
from tpu_attention.flash import use_flash
from tpu_attention.whole import use_whole
from training.backend import InitializeModule
from xla_fsdp import around_blocks
from xla_fsdp.attention import sharded
from xla_fsdp.attention.kernel_calls import ONE_DEVICE
from xla_fsdp.layout import MeshLayout, mark_both
from xla_fsdp.parallel_plan import XlaRun
from xla_fsdp.products import multiply_unfolded, normalize_unfolded
from xla_fsdp.remat import SAVED_BY, SaveInput
from xla_fsdp.scan import ScannedBlocks
from xla_fsdp.tensor_parallel import pack, shard_heads_and_columns
from xla_fsdp.torch_xla_private import is_sharded, scatter_gradients_as_rows


def parallelize_spmd(
    model: nn.Module,
    units: Units,
    initialize: InitializeModule,
    run: XlaRun,
    layout: MeshLayout,
    end_graph: Callable[..., None],
) -> nn.Module:
    """Make ``model`` one program for all devices, with sharding annotations for the partitioner."""
    plan, mesh = run.plan, run.mesh
    choose_mask(model, plan.attention)
    for stack in run.model.stacks:
        blocks = [(name, block) for name, block in units[:-1] if name.rpartition(".")[0] == stack]
        entry: nn.Module  # the module that receives the first block's input
        if plan.scan:
            entry = scan_blocks(model, stack, blocks, initialize, run, layout, end_graph)
        else:
            entry = blocks[0][1]
            for name, block in blocks:
                initialize(block, name)
                fill_buffers(block, layout.constant)
                # Without a scan --grad_ckpt is full or none, and SaveInput does nothing.
                change_block(block, run, layout, SaveInput())
                # Domain without tensor: linear layers gather their weights themselves.
                by_factors = layout.sharded_by_factors(block)
                if by_factors and (mesh.domain == 1 or mesh.tensor > 1):
                    around_blocks.gather_parameters(
                        block, by_factors, lambda name, weight: layout.gather(weight, name)
                    )
                # Rematerialize after changing attention and before wrapping the whole block.
                if plan.grad_ckpt == "full" and _trains(block):
                    checkpoint_module(block)
                layout.place(block)
                # Domain: tokens stay sharded between blocks; small parameters are gathered.
                if mesh.domain > 1 and mesh.tensor == 1:
                    small = around_blocks.small_parameters(block)
                    around_blocks.gather_parameters(block, small, layout.gather_around_blocks)
                around_blocks.after_forward(block, layout.mark_tokens)
                end_graph()  # send this unit before the host creates the next one
        if plan.residual_bf16:  # residuals stay bf16 if the first block's input is bf16
            around_blocks.before_forward(entry, lambda x: x.to(torch.bfloat16))

    # Around the blocks: embedding, norm, head.
    initialize(model, units[-1][0])
    fill_buffers(model, layout.constant)
    layout.place(model)
    # Where rows are sharded, the partitioner would gather whole images for a convolution.
    embed_by_product(model, functools.partial(mark_both, mark=layout.mark_rows))
    around_blocks.find_largest_by_place(model)
    if _must_unfold_norms(run):
        normalize_unfolded(model)
    mark_images = functools.partial(mark_both, mark=layout.mark_images)
    mark_rows = functools.partial(mark_both, mark=layout.mark_rows)
    # Attention pooling: its linear layers also keep images and tokens as separate dimensions.
    # Without the marks, the partitioner gathers keys of all images for the weights' gradients.
    pool = getattr(model, "attn_pool", None)
    if pool is not None and mesh.devices > 1:
        multiply_unfolded(pool.kv, layout)  # gathers its weight
        for layer in [part for part in pool.modules() if isinstance(part, nn.Linear)]:
            mark = mark_rows if layer is pool.kv else mark_images
            around_blocks.before_forward(layer, mark)
            around_blocks.after_forward(layer, mark)
    # Several axes, or factors of one: gather small parameters, and weights that factors shard,
    # before use; results have whole images.
    by_factors = layout.sharded_by_factors(model)
    if len(mesh.axis_sizes) > 1 or mesh.domain > 1 or by_factors:
        in_blocks = tuple(f"{stack}." for stack in run.model.stacks)
        gathered = (by_factors - {"attn_pool.kv.weight"}) | around_blocks.small_parameters(model)
        gathered = {name for name in gathered if not name.startswith(in_blocks)}
        around_blocks.gather_parameters(model, gathered, layout.gather_around_blocks)
        around_blocks.before_forward(model.get_submodule("head"), mark_images)
        around_blocks.after_forward(model, functools.partial(tree_map, mark_images))
    if mesh.tensor > 1:
        around_blocks.drop_patches_of_whole_images(model, layout.mark_images)
    if plan.bf16:
        around_blocks.compute_in_bf16(model)
    # Graph breaks come last, outside of everything that wraps a block.
    if every := run.backend_config.mark_step_every_n_blocks:
        assert not plan.scan  # excluded by resolve_xla: scanned blocks are not modules of the model
        around_blocks.break_graph_every(every, [block for _, block in units[:-1]], end_graph)
    end_graph(wait=True)
    return model


def change_block(block: nn.Module, run: XlaRun, layout: MeshLayout, save: SaveInput) -> None:
    """Change how a block computes attention, linear layers and norms."""
    plan, mesh = run.plan, run.mesh
    image_shards = layout.shards(*mesh.logical_spec("batch"))
    # For "tensor". With a scan, this packs the template; scan_blocks packs the blocks that fill it.
    pack(block, layout.packed)

    # Domain: attention among the devices that share an image. (With "tensor", or with dropout in
    # attention, the partitioner chooses the communication.)
    if plan.domain_attention:
        sharded.use_over_domain(block, plan, layout)
    # Tensor: each device computes some heads and some columns of the MLP.
    elif mesh.tensor > 1:
        shard_heads_and_columns(block, plan, layout, save)
    # Attention by kernels on each device's own images; "sdpa" leaves it to PyTorch.
    elif plan.attention == "flash":
        use_flash(block, image_shards)
    elif plan.attention == "whole":
        use_whole(block, image_shards, save)

    # Linear layers keep images and tokens as separate dimensions, so that each can be sharded.
    if plan.scan and mesh.tensor == 1:
        multiply_unfolded(block, layout, save)
    elif mesh.domain > 1 and mesh.tensor == 1:
        multiply_unfolded(block, layout)
    if _must_unfold_norms(run):
        normalize_unfolded(block)


def scan_blocks(
    model: nn.Module,
    stack: str,
    blocks: Units,
    initialize: InitializeModule,
    run: XlaRun,
    layout: MeshLayout,
    end_graph: Callable[..., None],
) -> ScannedBlocks:
    """Replace a stack of blocks by a loop over one block with stacked parameters.

    In each iteration the loop itself rematerializes, gathers weights and annotates tokens.
    """
    plan = run.plan
    save = SAVED_BY[plan.grad_ckpt]()
    layers = blocks[0][1].named_modules() if plan.int8 else ()
    int8_weights = {f"{name}.weight" for name, layer in layers if type(layer) is nn.Linear}

    def gather(name: str, weight: torch.Tensor) -> torch.Tensor:
        # int8 products gather their weights themselves, after quantization.
        return weight if name in int8_weights else layout.gather(weight, name)

    scanned = ScannedBlocks(
        getattr(model, stack),
        layout,
        save,
        adapt=lambda block: change_block(block, run, layout, save),
        gather=gather,
        bf16=plan.bf16,
    )
    for index, (name, block) in enumerate(blocks):
        initialize(block, name)
        pack(block, layout.packed)  # the source; change_block has packed the template
        # Copy into the stack, whose shards are already on the devices.
        scanned.fill(index, block)
        block.to("meta")  # free the host's copy
        end_graph()  # send this unit before the host creates the next one
    run.model.put_blocks(model, stack, scanned)
    return scanned


def _must_unfold_norms(run: XlaRun) -> bool:
    """Return whether a norm that folds images and tokens would treat padding as tokens.

    This happens if the token shards are uneven and a device has a single image or shares one along
    "domain" (where the partitioner may also replicate the following operations).
    """
    mesh, images = run.mesh, run.config.data.global_micro_batch_size
    drops_patches = bool(run.model.settings.get("patch_drop_rate"))
    is_uneven = drops_patches or run.model.sizes.num_tokens % (mesh.domain * mesh.tensor) > 0
    return is_uneven and (mesh.domain > 1 or images == mesh.batch_shards)


def parallelize_nested(
    model: nn.Module,
    units: Units,
    initialize: InitializeModule,
    run: XlaRun,
    device: torch.device,
    constant: Constant,
    end_graph: Callable[..., None],
) -> nn.Module:
    """Wrap each block, then the model, in torch_xla's FSDP on this process's ``device``."""
    plan = run.plan
    choose_mask(model, plan.attention)
    blocks: list[nn.Module] = []
    for name, block in units[:-1]:
        initialize(block, name)
        fill_buffers(block, constant)
        # Attention: by kernels, or PyTorch's.
        if plan.attention == "flash":
            use_flash(block, ONE_DEVICE)
        elif plan.attention == "whole":
            use_whole(block, ONE_DEVICE)
        # Rematerialize inside the unit, so that its weights are gathered again for it.
        if plan.grad_ckpt == "full" and _trains(block):
            checkpoint_module(block)
        unit = _nested_unit(block, run, device)
        model.set_submodule(name, unit)
        blocks.append(unit)
        end_graph()  # send this unit before the host creates the next one

    # Around the blocks: embedding, norm, head.
    initialize(model, units[-1][0])
    fill_buffers(model, constant)
    embed_by_product(model, functools.partial(mark_both, mark=torch.Tensor.contiguous))
    around_blocks.find_largest_by_place(model)
    root = _nested_unit(model, run, device)
    if plan.bf16:
        around_blocks.compute_in_bf16(root)
    # Graph breaks are outside the units.
    if every := run.backend_config.mark_step_every_n_blocks:
        around_blocks.break_graph_every(every, blocks, end_graph)
    end_graph(wait=True)
    return root


def _nested_unit(module: nn.Module, run: XlaRun, device: torch.device) -> nn.Module:
    if not run.plan.fsdp:
        return module.to(device)
    xla, devices = run.backend_config, run.mesh.devices
    # Shard each parameter by rows if the number of devices divides them. A flat shard has another
    # layout on a TPU, so each gathered weight and gradient would be copied. (Padding the first
    # dimension, which is 1 in the position embedding, could multiply the memory.)
    left = [p for p in module.parameters() if not is_sharded(p)]
    by_row = not xla.flatten_parameters and all(p.shape[0] % devices == 0 for p in left)
    unit = XlaFullyShardedDataParallel(
        module if xla.shard_on_cpu else module.to(device),
        reshard_after_forward=run.config.sharding.reshard_after_forward,
        flatten_parameters=xla.flatten_parameters,
        shard_param_on_dim_0=by_row,
        execute_sharding_on_init=False,  # the graph ends after each unit anyway
        # With pinned layouts, a gather is an all-reduce of padded whole weights, another on each
        # rank.
        pin_layout_in_collective_ops=False,
        # FSDP's own linear layer runs its backward pass in fp32 under autocast.
        _use_xla_patched_linear=not run.plan.bf16,
    )
    if not by_row:
        scatter_gradients_as_rows(unit, devices)
    return unit


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
