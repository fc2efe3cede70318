"""How a plain Vision Transformer becomes a parallel one with Megatron-FSDP: ``parallelize``.

(FSDP2's is ``torch_fsdp/parallelize.py``, with what a block becomes in ``torch_fsdp/recipe.py``.)
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import PatchEmbed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gpu_fsdp import megatron_private
from models.initialize import cast_buffers, fill_buffers
from torch_fsdp.parallelize import OUTER, SHARD
from torch_fsdp.recipe import TimmBlocks, TorchRun, parallelize_block
from training.backend import InitializeModule

with warnings.catch_warnings():  # that it does without TransformerEngine and Apex
    warnings.simplefilter("ignore")
    from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model

TENSOR = "tp"


def parallelize(
    model: nn.Module,
    units: list[tuple[str, nn.Module]],
    initialize: InitializeModule,
    run: TorchRun,
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    meta_init: bool,
) -> MegatronFSDP:
    """Change, fill and shard ``model``, which is on the meta device; return it wrapped.

    ``units``: each block with its name, then the model around them. ``mesh`` is (dcn, fsdp, tp),
    ``group`` that of all its processes. With ``meta_init`` the package has the weights filled part
    by part while it shards them, so that no device has all of them.
    """
    own, recipe = run.own, run.recipe
    initial = InitialValues(model, units, initialize, recipe.blocks)

    # Each block: TransformerEngine's or timm's, recomputation, torch.compile.
    blocks = [parallelize_block(model, n, block, recipe, device) for n, block in units[:-1]]

    # Weights, in the precision that is computed in.
    model.to(recipe.dtype)
    _fill(model, initial, recipe.dtype, device, meta_init=meta_init)
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(recipe.dtype), *inputs[1:]))

    # Shards. Without fp32 weights gradients have the weights' precision.
    policy = MixedPrecisionPolicy(None, None, None)
    if own.preserve_fp32_weights:
        policy = MixedPrecisionPolicy(torch.float32, torch.float32, recipe.reduce_dtype)
    outer: dict[str, Any] = {}
    if run.mesh.dcn > 1:
        outer = {"dp_outer_dim": OUTER, "hybrid_fsdp_group": group}
    sharded = fully_shard_model(
        model,
        # With the patch embedding a unit of its own, no part begins inside a row of another
        # parameter, on which the package fails for some widths.
        fsdp_unit_modules=[*{type(block) for block in blocks}, PatchEmbed],
        device_mesh=mesh,
        dp_shard_dim=SHARD,
        tp_dim=TENSOR,
        **outer,
        zero_dp_strategy=recipe.zero,
        outer_dp_sharding_strategy=own.outer_dp_sharding_strategy,
        device=device,
        init_model_with_meta_device=meta_init,
        mixed_precision_policy=policy,
        overlap_grad_reduce=own.overlap_grad_reduce,
        overlap_param_gather=own.overlap_param_gather,
        sync_model_each_microbatch=False,
        preproc_state_dict_for_dcp_ckpt=False,
        # Gradients are summed, the loss is divided by the backend: the package's own scaling in
        # 0.6.1 is wrong for a sharded outer dimension.
        calculate_per_token_loss=True,
    )

    # The exact values of fp32 weights: the package took them from ones rounded to bf16.
    if recipe.dtype != torch.float32 and own.preserve_fp32_weights:
        with torch.no_grad():
            for name, parameter in optimizer_parameters(sharded, recipe.blocks).items():
                local, part = parameter.to_local(), megatron_private.own_range(parameter)
                local.copy_(initial[name].flatten()[part.start : part.stop].view(local.shape))
            install_weights(sharded, recipe.zero)
    recipe.blocks.wrap_model(sharded)
    return sharded


def optimizer_parameters(sharded: MegatronFSDP, blocks: TimmBlocks) -> dict[str, DTensor]:
    """Return what the optimizer updates of each parameter, by its name in the plain model."""
    distributed = megatron_private.optimizer_parameters(sharded)
    return {blocks.timm_name(n): distributed[n] for n, _ in sharded.module.named_parameters()}


def install_weights(sharded: MegatronFSDP, zero: int) -> None:
    """Let the model compute with the values that the optimizer's parameters have now."""
    if zero:
        sharded.synchronize_param_gather()
    sharded.install_optimized_model_weights()


def _fill(
    model: nn.Module,
    initial: InitialValues,
    dtype: torch.dtype,
    device: torch.device,
    *,
    meta_init: bool,
) -> None:
    """Give parameters and buffers their values: at once, or with ``meta_init`` parameters later."""

    def fill_buffers_below(name: str, module: nn.Module) -> None:
        fill_buffers(module, lambda values: values.to(device))
        for inner, part in module.named_modules(prefix=name):
            if inner.startswith("blocks."):
                cast_buffers(part, dtype)

    @torch.no_grad()
    def fill(name: str, part: nn.Module) -> None:
        for key, parameter in part.named_parameters(prefix=name, recurse=False):
            parameter.copy_(initial[key])
        fill_buffers_below(name, part)

    modules = list(model.named_modules())
    for name, part in modules:
        if next(part.parameters(recurse=False), None) is None:
            continue
        if meta_init:  # the package calls it once it has given the part memory
            part.reset_parameters = functools.partial(fill, name, part)
        else:
            part.to_empty(device=device, recurse=False)
            fill(name, part)
    fill_buffers_below("", model)


class InitialValues:
    """The values that ``initialize`` gives each parameter, made on the CPU one unit at a time.

    The package asks for single modules, in an order of its own. This holds the values of one unit:
    asking unit by unit computes each of them once.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[tuple[str, nn.Module]],
        initialize: InitializeModule,
        blocks: TimmBlocks,
    ) -> None:
        """Copy the structure of ``model``, which must still be on the meta device."""
        self._initialize, self._blocks = initialize, blocks
        root = copy.deepcopy(model)
        self._units = {}
        for name, unit in units:
            if unit is not model:
                self._units[name] = copy.deepcopy(unit)
                root.set_submodule(name, nn.Identity())
        self._units[""] = root
        self._current = ""
        self._values: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a parameter's values by its name in the plain model or in one with ``blocks``."""
        name = self._blocks.timm_name(name)
        unit = max((u for u in self._units if f"{name}.".startswith(f"{u}.")), key=len, default="")
        if unit != self._current or not self._values:
            module = copy.deepcopy(self._units[unit])
            self._initialize(module, unit)
            self._current = unit
            self._values = {
                f"{unit}.{inner}" if unit else inner: parameter.detach()
                for inner, parameter in module.named_parameters()
            }
        return self._values[name]
