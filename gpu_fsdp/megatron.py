"""Megatron-FSDP: NVIDIA's ``fully_shard_model`` around the whole model, blocks as its units.

The optimizer is a plain AdamW on each process's parts: the package's own wrapper takes a
step while it is made. The loss is divided here and gradients are only summed
(``calculate_per_token_loss``): the scaling in 0.6.1 is wrong for a sharded outer dimension.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import PatchEmbed
from torch import nn
from torch.distributed.tensor import DTensor

from gpu_fsdp import megatron_private
from gpu_fsdp.devices import Device
from gpu_fsdp.gpu_backend import OUTER, SHARD, GpuBackend, InitialValues
from gpu_fsdp.resolve_gpu import DTYPES, ZERO_NAMES, GpuRun
from gpu_fsdp.te_block import timm_name
from models.initialize import cast_buffers, fill_buffers
from training.backend import InitializeModule
from training.checkpoints.state import Chunk, ShardedTensor, flat_range_boxes

with warnings.catch_warnings():  # that it does without TransformerEngine and Apex
    warnings.simplefilter("ignore")
    from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model

TENSOR = "tp"
_META_SHARE = 0.25
"""Share of the device's memory above which a model is not put there whole before sharding."""


class MegatronBackend(GpuBackend):
    _model: MegatronFSDP

    def __init__(self, run: GpuRun, device: Device) -> None:
        super().__init__(run, device)
        # The package wants a tensor-parallel dimension, if only of size 1.
        shape = (run.mesh.dcn, run.mesh.fsdp, 1)
        self._mesh = dist.init_device_mesh(
            device.where.type, shape, mesh_dim_names=(OUTER, SHARD, TENSOR)
        )
        self._all = self._mesh[OUTER, SHARD]._flatten("dp").get_group()
        self._parameters: dict[str, DTensor] = {}
        self._meta_init = False

    def _describe_form(self) -> str:
        form = f"Megatron-FSDP {ZERO_NAMES[self._zero]}"
        if self._own.outer_dp_sharding_strategy:
            form += f", optimizer sharded over {OUTER} too"
        form += ", each block a unit"
        form += ", fp32 weights" if self._own.preserve_fp32_weights else ", no fp32 weights"
        return form + (", meta init" if self._meta_init else "")

    # -- sharding ---------------------------------------------------------------------

    def _shard_units(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        initial = InitialValues(model, units, initialize)
        self._meta_init = self._wants_meta_init(model)
        blocks = [self._prepare_block(model, name, unit) for name, unit in units if name]
        dtype = DTYPES[self._sharding.precision]
        model.to(dtype)
        fill = functools.partial(self._fill, initial)
        owners = [
            (name, part)
            for name, part in model.named_modules()
            if next(part.parameters(recurse=False), None) is not None
        ]
        for name, part in owners:
            if self._meta_init:  # the package calls it once it has given the part memory
                part.reset_parameters = functools.partial(fill, name, part)
            else:
                part.to_empty(device=self._device.where, recurse=False)
                fill(name, part)
        self._fill_buffers("", model)
        model.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(dtype),))
        self._model = fully_shard_model(model, **self._options(type(blocks[0])))
        self._take_parameters()
        if dtype != torch.float32 and self._own.preserve_fp32_weights:
            self._restore_precision(initial)
        return self._model

    def _wants_meta_init(self, model: nn.Module) -> bool:
        limit = self._device.memory().get("limit")
        if self._own.meta_init is not None or self._zero == 0 or limit is None:
            return bool(self._own.meta_init)
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        return size > _META_SHARE * limit

    @torch.no_grad()
    def _fill(self, initial: InitialValues, name: str, part: nn.Module) -> None:
        for key, parameter in part.named_parameters(prefix=name, recurse=False):
            parameter.copy_(initial[timm_name(key)])
        self._fill_buffers(name, part)

    def _fill_buffers(self, name: str, module: nn.Module) -> None:
        """Give the buffers below ``module`` their values; those in blocks the blocks' dtype."""
        fill_buffers(module, lambda values: values.to(self._device.where))
        dtype = DTYPES[self._sharding.precision]
        for inner, part in module.named_modules(prefix=name):
            if inner.startswith("blocks."):
                cast_buffers(part, dtype)

    def _options(self, block: type[nn.Module]) -> dict[str, Any]:
        own, mesh = self._own, self._run.mesh
        several = {"dp_outer_dim": OUTER, "hybrid_fsdp_group": self._all} if mesh.dcn > 1 else {}
        return {
            "device_mesh": self._mesh,
            "dp_shard_dim": SHARD,
            "tp_dim": TENSOR,
            **several,
            # With the patch embedding a unit of its own, no part begins inside a row of another
            # parameter, on which the package fails for some widths.
            "fsdp_unit_modules": [block, PatchEmbed],
            "zero_dp_strategy": self._zero,
            "outer_dp_sharding_strategy": own.outer_dp_sharding_strategy,
            "device": self._device.where,
            "init_model_with_meta_device": self._meta_init,
            "mixed_precision_policy": self._precision_policy(),
            "overlap_grad_reduce": own.overlap_grad_reduce,
            "overlap_param_gather": own.overlap_param_gather,
            "sync_model_each_microbatch": False,
            "preproc_state_dict_for_dcp_ckpt": False,
            "calculate_per_token_loss": True,
        }

    def _precision_policy(self) -> MixedPrecisionPolicy:
        if not self._own.preserve_fp32_weights:  # gradients then have the weights' precision
            return MixedPrecisionPolicy(None, None, None)
        reduce_dtype = DTYPES[self._own.reduce_dtype]
        return MixedPrecisionPolicy(torch.float32, torch.float32, reduce_dtype)

    def _take_parameters(self) -> None:
        distributed = megatron_private.optimizer_parameters(self._model)
        for name, _ in self._model.module.named_parameters():
            self._parameters[timm_name(name)] = distributed[name]

    @torch.no_grad()
    def _restore_precision(self, initial: InitialValues) -> None:
        """Give fp32 weights their exact values: the package took them from ones rounded to bf16."""
        for name, parameter in self._parameters.items():
            local = parameter.to_local()
            part = megatron_private.own_range(parameter)
            local.copy_(initial[name].flatten()[part.start : part.stop].view(local.shape))
        self._install()

    def _install(self) -> None:
        """Let the weights that are computed with follow the optimizer's."""
        if self._zero:
            self._model.synchronize_param_gather()
        self._model.install_optimized_model_weights()

    def _local_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, part.to_local().detach()) for name, part in self._parameters.items())

    # -- a step -----------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        # After the last micro-batch the package reduces what it has not yet; without overlap
        # finish_grad_sync does, and both would add gradients up twice.
        is_last = is_last and self._own.overlap_grad_reduce
        megatron_private.say_last_micro_batch(self._model, is_last)
        (loss / self.world_size).backward()

    def _take_gradients(self) -> None:
        self._model.finish_grad_sync()
        for name, parameter in self._parameters.items():
            local = self._locals[name]
            grad: Any = parameter.grad
            # An empty part has no gradient, but its step counter shall move with the others'.
            assert grad is not None or not local.numel(), f"{name} got no gradient"
            local.grad = torch.empty_like(local) if grad is None else grad.to_local()

    def _update(self, skipped: torch.Tensor) -> None:
        super()._update(skipped)
        self._model.install_optimized_model_weights()
        if self._zero and not self._own.overlap_param_gather:
            self._model.start_param_sync(force_sync=True)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        self._model.zero_grad_buffer()

    def _squares(self) -> Iterator[torch.Tensor]:
        yield self._square(self._locals, self._sharded_over())

    def _sharded_over(self) -> list[dist.ProcessGroup]:
        if self._own.outer_dp_sharding_strategy:
            return [self._all]
        return [] if self._zero == 0 else [self._mesh.get_group(SHARD)]

    def close(self) -> None:
        super().close()
        model = getattr(self, "_model", None)  # not yet there where a mistake has ended the run
        if model is not None:
            megatron_private.remove_gradient_hooks(model)

    # -- checkpoints ------------------------------------------------------------------

    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters[name]
        if self._zero == 0:
            return values
        part = megatron_private.own_range(parameter)
        flat, chunks = values.view(-1), []
        for offsets, sizes, start in flat_range_boxes(parameter.shape, part.start, part.stop):
            at = start - part.start
            count = torch.Size(sizes).numel()
            chunks.append(Chunk(offsets, flat[at : at + count].view(sizes)))
        return ShardedTensor(parameter.shape, values.dtype, chunks)

    def _after_load(self) -> None:
        self._install()
