"""The step and the checkpoints of FSDP2, PyTorch's ``fully_shard``: each block a unit."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.positions import PartOfPositions
from torch_fsdp.devices import Device
from torch_fsdp.parallelize import DOMAIN, SHARD, make_device_meshes, parallelize
from torch_fsdp.recipe import TorchRun
from torch_fsdp.torch_backend import TorchBackend
from training.backend import InitializeModule
from training.checkpoints.state import Chunk, ShardedTensor


class Fsdp2Backend(TorchBackend):
    def __init__(self, run: TorchRun, device: Device) -> None:
        super().__init__(run, device)
        self._mesh, self._image_mesh = make_device_meshes(run, device)
        self._parameters: dict[str, DTensor] = {}
        self._positions: dict[str, PartOfPositions] = {}

    def _describe_form(self) -> str:
        form = f"FSDP2 ZeRO-{self._zero}, each block a unit"
        if self._zero == 0:
            form = "FSDP2 as data parallel (no sharding)"
        if self._recipe.domain_attention:
            form += f", {self._recipe.domain_attention} attention over domain"
        return form

    def _parallelize(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        meshes = (self._mesh, self._image_mesh)
        self._positions = parallelize(model, units, initialize, self._run, meshes, self._device)
        self._model = model
        positions = {id(part.values): name for name, part in self._positions.items()}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            name = positions.get(id(parameter)) or self._recipe.blocks.timm_name(name)
            self._parameters[name] = parameter
        return model

    def _shard_groups(self) -> list[dist.ProcessGroup]:
        return [self._mesh.get_group(SHARD)]

    # -- a step -----------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        root = self._model
        assert isinstance(root, FSDPModule)
        # Between micro-batches: gradients are reduced and scattered each time, so that no process
        # has all of them, but all-reduced over the replicas once; ZeRO-2 keeps unsharded weights.
        root.set_requires_all_reduce(is_last)
        root.set_is_last_backward(is_last)
        if self._zero != 3:
            root.set_reshard_after_backward(is_last)
        scaled = loss if self._loss_scale is None else loss * self._loss_scale.value
        scaled.backward()

    def _collect_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter.grad, DTensor):
                self._locals[name].grad = parameter.grad.to_local()

    def _sharded_alike(self) -> list[tuple[Collection[str], list[dist.ProcessGroup]]]:
        # Without sharding all parameters are replicated, but positions differ along "domain".
        if self._zero != 0 or not self._positions:
            return super()._sharded_alike()
        others = self._locals.keys() - self._positions.keys()
        over_domain = [self._image_mesh.get_group(DOMAIN)]
        return [(others, self._shard_groups()), (self._positions.keys(), over_domain)]

    # -- checkpoints ------------------------------------------------------------------

    def _after_load(self) -> None:
        # A forward pass leaves the root unsharded for its backward pass, which an evaluation has
        # not: these weights are stale.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters[name]
        shape, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        assert values.shape == torch.Size(shape)
        chunks = [Chunk(offsets, values)] if values.numel() else []
        if name not in self._positions:
            return ShardedTensor(parameter.shape, values.dtype, chunks)
        first = self._positions[name].first
        for chunk in chunks:
            chunk.offsets = (chunk.offsets[0], chunk.offsets[1] + first, chunk.offsets[2])
        entries = self._run.model.sizes.num_patches + self._run.model.token_parameters[name]
        whole = (parameter.shape[0], entries, parameter.shape[2])
        return ShardedTensor(whole, values.dtype, chunks)
