"""SPMD FSDP: one program for all devices, weights sharded by marks on a plain model."""

from __future__ import annotations

import math

import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

from data.loader import Batch
from training.backend import InitializeModule
from training.checkpoints.state import Chunk, ShardedTensor
from xla_fsdp.hosts import HostPart, part_of_host
from xla_fsdp.layout import (
    MeshLayout,
    device_part,
    is_stacked,
    local_devices,
    name_in_block,
    plain_names,
    plain_values,
)
from xla_fsdp.optimizer import Momenta, Orthogonalize, orthogonalized_by_marks
from xla_fsdp.parallelize import parallelize_spmd
from xla_fsdp.resolve_xla import XlaRun
from xla_fsdp.torch_xla_private import REPLICATED, local_shard_indices
from xla_fsdp.xla_backend import XlaBackend


class SpmdBackend(XlaBackend):
    layout_class = MeshLayout

    def __init__(self, run: XlaRun) -> None:
        super().__init__(run)
        self._mesh = run.mesh
        self._layout = self.layout_class(self._recipe, self._device)
        self.rank, self.world_size = xr.process_index(), xr.process_count()
        self._host: HostPart | None = None
        height = run.model.sizes.input_shape[1]
        # Where no devices share images, torch_xla divides a host's among them by itself.
        if self.world_size > 1 and self._mesh.devices_a_part > 1:
            order = self._layout.device_order
            self._host = part_of_host(self._mesh, order, local_devices(), height)
            self.rank, self.world_size = self._host.rank, self._host.world_size
        self.image_rows = self._host.rows if self._host else range(height)

    def describe(self) -> str:
        if not self._recipe.fsdp:
            form = "SPMD data parallel, parameters replicated (--run_without_fsdp)"
        else:
            form = "SPMD FSDP (ZeRO-3), each block a unit"
            form += ", scanned" if self._recipe.scan else ""
            form += f", {self._mesh}"
            if self._mesh.domain > 1:
                form += f", {self._sharding.domain_attention} attention over domain"
            if self._layout.replicated_bytes:
                form += (
                    f", {self._layout.replicated_bytes:,} bytes of parameters replicated "
                    f"(no dimension is a multiple of {self._mesh.min_shards})"
                )
        form += ", residuals in bf16" if self._recipe.residual_bf16 else ""
        form += ", weights gathered in fp8" if self._recipe.gather_fp8 else ""
        form += ", linear layers in int8" if self._recipe.int8 else ""
        return f"XLA: {self._describe_common()}, {form}{self._run.why.get('xla_fsdp', '')}"

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        self._model = parallelize_spmd(
            model, units, initialize, self._recipe, self._layout, self._break_graph
        )
        return self._model

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        return self._layout.constant(values)

    def _zeros_like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._layout.zeros(parameter.shape, self._layout.specs[parameter], dtype)

    def _mark_replicated(self, x: torch.Tensor) -> torch.Tensor:
        return self._layout.mark_replicated(x)

    # -- a step -----------------------------------------------------------------------

    def put(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = (self._put(part) for part in batch)
        return images, labels

    def _put(self, share: torch.Tensor) -> torch.Tensor:
        spec = self._layout.batch_spec(share.dim())
        if xr.process_count() == 1:
            return self._layout.send(share, spec)
        if self._host is None:
            return self._layout.send(share, spec, minibatch=True)
        height = self._run.model.sizes.input_shape[1] if share.dim() > 1 else None
        return self._layout.send(self._host.in_global_batch(share, height), spec)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return value  # the program's tensors are global

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return self._mark_replicated(value)  # global, too; and every host can read it

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, foreach=False)

    def _orthogonal(self, momenta: Momenta, how: Orthogonalize) -> list[torch.Tensor]:
        axes, devices = tuple(self._mesh.axis_sizes), self._mesh.devices
        return orthogonalized_by_marks(
            momenta, how, self._layout.specs, axes, devices, self._layout.mark
        )

    # -- state ------------------------------------------------------------------------

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _plain_names(self, name: str) -> list[str]:
        return plain_names(name, self._run.model.sizes.depth)

    def _local_bytes(self, tensor: torch.Tensor) -> int:
        indices = local_shard_indices(tensor)[0]
        if indices is REPLICATED:
            return tensor.nbytes
        return math.prod(i.stop - i.start for i in indices) * tensor.element_size()

    def _to_host(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        chunks: dict[tuple[int, ...], Chunk] = {}
        for shard in xs.XLAShardedTensor(tensor).local_shards:
            if shard.indices is REPLICATED:
                return plain_values(name, shard.data, packed=False)
            offsets = tuple(index.start for index in shard.indices)
            chunks[offsets] = Chunk(offsets, shard.data)  # unpadded: sharded evenly
        value = ShardedTensor(tensor.shape, tensor.dtype, list(chunks.values()))
        return plain_values(name, value, packed=self._packed_parts(name) > 0)

    def _packed_parts(self, name: str) -> int:
        """Return into how many parts a parameter was unfolded, 0 if it is as in the plain model."""
        return self._layout.packed.get(name_in_block(name) or "", 0)

    def _to_device(self, name: str, tensor: torch.Tensor, saved: list[torch.Tensor]) -> None:
        stacked = is_stacked(name) and tensor.dim() > 0  # AdamW's step is one for all blocks
        sharded = [each for each in saved if isinstance(each, ShardedTensor)]
        if not sharded:  # on one device, or replicated
            values = torch.stack(saved) if stacked else saved[0]
            replicated = self.constant(values)
            with torch.no_grad():  # (torch_xla's _replace_xla_tensor is undone by the next sync)
                tensor.copy_(replicated)
            return
        target, packed = xs.XLAShardedTensor(tensor.detach()), self._packed_parts(name)
        shards: list[xs.XLAShard] = target.local_shards
        for shard in shards:
            shard.data = device_part(sharded, shard.indices, stacked=stacked, packed=packed)
        target.load_local_shards_(shards)
