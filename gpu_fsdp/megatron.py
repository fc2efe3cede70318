"""NVIDIA's Megatron-FSDP with one unit per block: sharding, steps and checkpoints.

The optimizer is this program's, on each process's parts, as the package's own wrapper makes a step
when it is created. The loss is divided here, and gradients are only summed.

(FSDP2 is in ``torch_fsdp/fsdp2.py``; ``torch_fsdp/parallel_plan.py`` modifies blocks for both.)
"""

import copy
import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import PatchEmbed
from torch import nn
from torch.utils._pytree import tree_map_only

from gpu_fsdp import megatron_private
from gpu_fsdp.config import TorchConfig
from models.initialize import cast_buffers, fill_buffers
from models.spec import Units
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import OUTER, SHARD, TimmBlocks, TorchRun, parallelize_block
from torch_fsdp.torch_backend import TorchBackend
from torch_fsdp.varlen import use_varlen
from training.backend import InitializeModule
from training.checkpoints.state import Chunk, ShardedTensor, flat_range_boxes
from training.optimizers import Updates

with warnings.catch_warnings():  # about missing TransformerEngine and Apex
    warnings.simplefilter("ignore")
    from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model

_TENSOR = "tp"
_META_SHARE = 0.25
"""The fraction of device memory above which a model is initialized part by part."""


class MegatronBackend(TorchBackend):
    _model: MegatronFSDP
    _backend_config: TorchConfig

    def __init__(self, run: TorchRun, device: Device) -> None:
        super().__init__(run, device)
        # The package requires a tensor-parallel dimension, even of size 1.
        shape = (run.mesh.dcn, run.mesh.fsdp, 1)
        self._mesh = dist.init_device_mesh(
            device.where.type, shape, mesh_dim_names=(OUTER, SHARD, _TENSOR)
        )
        self._dp_group = self._mesh[OUTER, SHARD]._flatten("dp").get_group()
        self.shards = (0,)
        if self._zero:
            over_all = self._backend_config.outer_dp_sharding_strategy != 0
            self.shards = (dist.get_rank() if over_all else self._mesh.get_local_rank(SHARD),)
        self._rounded: dict[str, torch.Tensor] = {}
        """The parts that a teacher computes with, if they are not in fp32 as its average is."""

    def parallelize(
        self, model: nn.Module, units: Units, initialize: InitializeModule
    ) -> nn.Module:
        config, plan, device = self._backend_config, self._plan, self._device.where
        initial = InitialValues(model, units, initialize, plan.blocks)

        # With meta_init, the package initializes the weights part by part while it shards them, so
        # that no device holds the whole model.
        limit = self._device.memory().get("limit")
        meta_init = bool(config.meta_init)
        if config.meta_init is None and self._zero and limit is not None:
            size = 4 * sum(parameter.numel() for parameter in model.parameters())
            meta_init = size > _META_SHARE * limit

        # Sequences of several images: variable-length attention kernels.
        if plan.varlen:
            use_varlen(model, self._run.model)

        # Each block: TransformerEngine's or timm's, recomputation, torch.compile.
        blocks = [parallelize_block(model, n, block, plan, device) for n, block in units[:-1]]

        # Weights and inputs in the compute dtype.
        model.to(plan.dtype)
        _fill(model, initial, plan.dtype, device, meta_init=meta_init)

        model.register_forward_pre_hook(
            lambda _, inputs: tree_map_only(
                torch.Tensor, lambda x: x.to(plan.dtype) if x.is_floating_point() else x, inputs
            )
        )

        # The units, which are sharded and gathered as a whole. With the patch embedding as a
        # separate unit, no shard starts inside a row of another parameter, on which the package
        # fails for some widths.
        unit_kinds = {*(type(block) for block in blocks), PatchEmbed}
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        if is_frozen or self._run.config.objective.has_teacher:
            # The heads have layers of many widths. Besides, after a layer that follows the blocks
            # and is not a unit, the package gathers the first blocks again, and a frozen model
            # would hold them until the next step.
            unit_kinds |= {
                type(module)
                for module in model.modules()
                if module is not model and next(module.parameters(recurse=False), None) is not None
            }

        # Sharding. Without fp32 weights, gradients have the dtype of the weights.
        policy = MixedPrecisionPolicy(None, None, None)
        if config.preserve_fp32_weights:
            policy = MixedPrecisionPolicy(torch.float32, torch.float32, plan.reduce_dtype)
        outer: dict[str, Any] = {}
        if self._run.mesh.dcn > 1:
            outer = {"dp_outer_dim": OUTER, "hybrid_fsdp_group": self._dp_group}
        self._model = fully_shard_model(
            model,
            fsdp_unit_modules=list(unit_kinds),
            device_mesh=self._mesh,
            dp_shard_dim=SHARD,
            tp_dim=_TENSOR,
            **outer,
            zero_dp_strategy=plan.zero,
            outer_dp_sharding_strategy=config.outer_dp_sharding_strategy,
            device=device,
            init_model_with_meta_device=meta_init,
            mixed_precision_policy=policy,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            sync_model_each_microbatch=False,
            preproc_state_dict_for_dcp_ckpt=False,
            # Sum gradients; the backend divides the loss. The package's own scaling in 0.6.1 is
            # wrong for a sharded outer dimension.
            calculate_per_token_loss=True,
        )
        megatron_private.remove_guards_of_casts(self._model)

        # The parameters by names in the plain model, and the processes that shard them.
        distributed = megatron_private.optimizer_parameters(self._model)
        for name, _ in self._model.module.named_parameters():
            self._parameters[plan.blocks.timm_name(name)] = distributed[name]
        groups = [] if self._zero == 0 else [self._mesh.get_group(SHARD)]
        if config.outer_dp_sharding_strategy:
            groups = [self._dp_group]
        self._sharded_alike = [(self._parameters.keys(), groups)]

        # Restore the exact fp32 weights, which the package has copied from ones rounded to bf16.
        # Frozen weights exist only in bf16.
        if plan.dtype != torch.float32 and config.preserve_fp32_weights:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    local, part = parameter.to_local(), megatron_private.local_range(parameter)
                    if local.dtype == plan.dtype:
                        continue
                    local.copy_(initial[name].flatten()[part.start : part.stop].view(local.shape))
                self._after_load()

        # FP8 by TransformerEngine.
        plan.blocks.wrap_model(self._model)

        over_outer = ""
        if config.outer_dp_sharding_strategy:
            over_outer = ", optimizer state also sharded over dcn"
        self._form = (
            f"Megatron-FSDP {f'ZeRO-{self._zero}' if self._zero else 'no sharding'}{over_outer}, "
            f"one unit per block, {'' if config.preserve_fp32_weights else 'no '}fp32 weights"
            f"{', meta init' if meta_init else ''}"
        )
        return self._model

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        if self._run.config.objective.has_teacher:
            teacher = self._frozen[0]
            assert isinstance(teacher, MegatronBackend)
            # The average is computed part by part, so teacher and student must have equal parts.
            local_range = megatron_private.local_range
            for name, parameter in self._parameters.items():
                assert local_range(parameter) == local_range(teacher._parameters[name]), name
            if self._plan.dtype != torch.float32:  # bf16 is too coarse to accumulate an average
                teacher._rounded = {name: part.detach() for name, part in teacher._locals.items()}
                teacher._locals = {
                    name: nn.Parameter(part.float()) for name, part in teacher._rounded.items()
                }
        super().build_optimizer(updates, betas=betas, eps=eps)

    # -- a step -----------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        # After the last micro-batch, the package reduces the remaining gradients. Without overlap,
        # finish_grad_sync does that; doing both would count gradients twice.
        is_last = is_last and self._backend_config.overlap_grad_reduce
        megatron_private.set_last_micro_batch(self._model, is_last)
        (loss / self.batch_shards).backward()

    def _collect_gradients(self) -> None:
        self._model.finish_grad_sync()
        for name, parameter in self._parameters.items():
            if name in self._run.model.frozen:
                continue
            local = self._locals[name]
            grad: Any = parameter.grad
            # An empty part has no gradient, but its step counter must advance with the others.
            assert grad is not None or not local.numel(), f"{name} has no gradient"
            local.grad = torch.empty_like(local) if grad is None else grad.to_local()

    def _after_update(self) -> None:
        self._model.install_optimized_model_weights()
        if self._zero and not self._backend_config.overlap_param_gather:
            self._model.start_param_sync(force_sync=True)
        super()._after_update()
        self._model.zero_grad_buffer()

    def close(self) -> None:
        super().close()
        model = getattr(self, "_model", None)  # missing if the run has failed before
        if model is not None:
            megatron_private.remove_gradient_hooks(model)

    # -- checkpoints ------------------------------------------------------------------

    @torch.no_grad()
    def _after_load(self) -> None:
        if self._zero:
            with warnings.catch_warnings():  # about gathers for heads that features do not use
                warnings.simplefilter("ignore")
                self._model.synchronize_param_gather()
        for name, rounded in self._rounded.items():
            rounded.copy_(self._locals[name])
        self._model.install_optimized_model_weights()

    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters[name]
        if self._zero == 0:
            return values
        part = megatron_private.local_range(parameter)
        flat, chunks = values.view(-1), []
        for offsets, sizes, start in flat_range_boxes(parameter.shape, part.start, part.stop):
            at = start - part.start
            count = torch.Size(sizes).numel()
            chunks.append(Chunk(offsets, flat[at : at + count].view(sizes)))
        return ShardedTensor(parameter.shape, values.dtype, chunks)


class InitialValues:
    """The initial values of all parameters, computed by ``initialize`` on the CPU unit by unit.

    The package initializes single modules, in its own order. This caches the values of one unit, so
    that access unit by unit computes each unit once.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Units,
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
        units = [unit for unit in self._units if f"{name}.".startswith(f"{unit}.")]
        unit = max(units, key=len, default="")
        if unit != self._current or not self._values:
            module = copy.deepcopy(self._units[unit])
            self._initialize(module, unit)
            self._current = unit
            self._values = {
                f"{unit}.{inner}" if unit else inner: parameter.detach()
                for inner, parameter in module.named_parameters()
            }
        return self._values[name]


def _fill(
    model: nn.Module,
    initial: InitialValues,
    dtype: torch.dtype,
    device: torch.device,
    *,
    meta_init: bool,
) -> None:
    """Initialize buffers and parameters; with ``meta_init``, parameters are initialized later."""

    @torch.no_grad()
    def fill(name: str, module: nn.Module) -> None:
        """Fill the module's own parameters, and all buffers below it."""
        for key, parameter in module.named_parameters(prefix=name, recurse=False):
            parameter.copy_(initial[key])
        fill_buffers(module, lambda values: values.to(device))
        for inner_name, inner in module.named_modules(prefix=name):
            if inner_name.startswith("blocks."):
                cast_buffers(inner, dtype)

    for name, module in list(model.named_modules()):
        if next(module.parameters(recurse=False), None) is None:
            continue
        if meta_init:  # the package calls this after it has allocated the module
            module.reset_parameters = functools.partial(fill, name, module)
        else:
            module.to_empty(device=device, recurse=False)
            fill(name, module)
    fill("", model)  # the remaining buffers
