"""The step and the checkpoints of NVIDIA's Megatron-FSDP, blocks as its units.

The optimizer is this program's, on each process's parts: the package's own wrapper takes a step
while it is made. The loss is divided here and gradients are only summed.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from gpu_fsdp import megatron_private
from gpu_fsdp.parallelize import (
    TENSOR,
    MegatronFSDP,
    install_weights,
    optimizer_parameters,
    parallelize,
)
from torch_fsdp.devices import Device
from torch_fsdp.parallelize import OUTER, SHARD
from torch_fsdp.recipe import TorchRun
from torch_fsdp.torch_backend import TorchBackend
from training.backend import InitializeModule
from training.checkpoints.state import Chunk, ShardedTensor, flat_range_boxes
from training.schedule import StepRates

_META_SHARE = 0.25
"""The share of the device's memory above which a model is not put there whole before sharding."""


class MegatronBackend(TorchBackend):
    _model: MegatronFSDP

    def __init__(self, run: TorchRun, device: Device) -> None:
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
        form = f"Megatron-FSDP {f'ZeRO-{self._zero}' if self._zero else 'no sharding'}"
        if self._own.outer_dp_sharding_strategy:
            form += f", optimizer sharded over {OUTER} too"
        form += ", each block a unit"
        form += ", fp32 weights" if self._own.preserve_fp32_weights else ", no fp32 weights"
        return form + (", meta init" if self._meta_init else "")

    def _parallelize(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        limit = self._device.memory().get("limit")
        self._meta_init = bool(self._own.meta_init)
        if self._own.meta_init is None and self._zero and limit is not None:
            size = 4 * sum(parameter.numel() for parameter in model.parameters())
            self._meta_init = size > _META_SHARE * limit
        self._model = parallelize(
            model,
            units,
            initialize,
            self._run,
            self._mesh,
            self._all,
            self._device.where,
            meta_init=self._meta_init,
        )
        self._parameters = optimizer_parameters(self._model, self._recipe.blocks)
        return self._model

    def _shard_groups(self) -> list[dist.ProcessGroup]:
        if self._own.outer_dp_sharding_strategy:
            return [self._all]
        return [] if self._zero == 0 else [self._mesh.get_group(SHARD)]

    # -- a step -----------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        # After the last micro-batch the package reduces what it has not yet; without overlap
        # finish_grad_sync does, and both would add gradients up twice.
        is_last = is_last and self._own.overlap_grad_reduce
        megatron_private.set_last_micro_batch(self._model, is_last)
        (loss / self.world_size).backward()

    def _collect_gradients(self) -> None:
        self._model.finish_grad_sync()
        for name, parameter in self._parameters.items():
            if name in self._run.model.frozen:
                continue
            local = self._locals[name]
            grad: Any = parameter.grad
            # An empty part has no gradient, but its step counter shall move with the others'.
            assert grad is not None or not local.numel(), f"{name} got no gradient"
            local.grad = torch.empty_like(local) if grad is None else grad.to_local()

    def _update(self, rates: StepRates, skipped: torch.Tensor) -> None:
        super()._update(rates, skipped)
        self._model.install_optimized_model_weights()
        if self._zero and not self._own.overlap_param_gather:
            self._model.start_param_sync(force_sync=True)

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._model.zero_grad_buffer()

    def close(self) -> None:
        super().close()
        model = getattr(self, "_model", None)  # not yet there where a mistake has ended the run
        if model is not None:
            megatron_private.remove_gradient_hooks(model)

    # -- checkpoints ------------------------------------------------------------------

    def _after_load(self) -> None:
        install_weights(self._model, self._zero)

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
