"""FSDP2: PyTorch's ``fully_shard`` on each block and on the model around them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
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
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gpu_fsdp.devices import Device
from gpu_fsdp.domain import DomainGroup, places_of_part, see_all_tokens
from gpu_fsdp.gpu_backend import DOMAIN, OUTER, SHARD, GpuBackend
from gpu_fsdp.optimizers import LossScale
from gpu_fsdp.resolve_gpu import DTYPES, ZERO_NAMES, GpuRun
from gpu_fsdp.te_block import timm_name
from models.blocks import PartOfPositions, TokenPart
from models.initialize import cast_buffers
from training.backend import InitializeModule
from training.checkpoints.state import Chunk, ShardedTensor
from training.optimizers import not_finite


class Fsdp2Backend(GpuBackend):
    def __init__(self, run: GpuRun, device: Device) -> None:
        super().__init__(run, device)
        is_fp16 = self._sharding.precision == "fp16"
        self._loss_scale = LossScale(device.where) if is_fp16 else None
        self._dtensors: dict[str, DTensor] = {}
        self._positions: dict[str, PartOfPositions] = {}
        mesh, kind = run.mesh, device.where.type
        # Processes that share an image shard parameters like all others.
        shape = (mesh.dcn, mesh.fsdp * mesh.domain)
        if self._zero == 0:
            shape = (mesh.devices, 1)
        self._mesh = dist.init_device_mesh(kind, shape, mesh_dim_names=(OUTER, SHARD))
        if mesh.domain > 1:
            sizes = (mesh.dcn, mesh.fsdp, mesh.domain)
            self._whole_mesh = dist.init_device_mesh(
                kind, sizes, mesh_dim_names=(OUTER, SHARD, DOMAIN)
            )

    def _describe_form(self) -> str:
        form = f"FSDP2 {ZERO_NAMES[self._zero]}, each block a unit"
        if self._zero == 0:
            form = "FSDP2 as data parallel (no sharding)"
        if self._run.mesh.domain > 1:
            form += f", {self._sharding.domain_attention} attention over domain"
        return form

    # -- sharding ---------------------------------------------------------------------

    def _shard_units(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        blocks: list[FSDPModule] = []
        if self._run.mesh.domain > 1:
            see_all_tokens(model, self._sharding.domain_attention, self._domain_group())
        for name, unit in units:
            initialize(unit, name)
            if unit is model and self._run.mesh.domain > 1:
                self._divide_tokens(model)
            if unit is not model:
                unit = self._prepare_block(model, name, unit)
                cast_buffers(unit, DTYPES[self._sharding.precision])
            # Takes this unit to the device and keeps its part, before the next one is made.
            fully_shard(unit, **self._options(self._mesh, is_root=unit is model))
            assert isinstance(unit, FSDPModule)
            # Uneven parts get their final, padded storage only when first gathered; the
            # optimizer must not hold the one before.
            unit.unshard()
            unit.reshard()
            if unit is not model:
                blocks.append(unit)
        self._order_prefetch(blocks)
        self._model = model
        plain = {id(part.values): name for name, part in self._positions.items()}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            self._dtensors[plain.get(id(parameter)) or timm_name(name)] = parameter
        return model

    def _domain_group(self) -> DomainGroup:
        mesh, sizes = self._run.mesh, self._run.model.sizes
        places, index = places_of_part(mesh, dist.get_rank())
        patches = (len(mesh.rows_of(sizes.grid[0], p)) * sizes.row_patches for p in places)
        return DomainGroup(self._whole_mesh.get_group(DOMAIN), index, tuple(patches))

    def _divide_tokens(self, model: nn.Module) -> None:
        """Let the model, which has its values, compute with the tokens of this process."""
        group = self._domain_group()
        here, before = group.patches[group.index], sum(group.patches[: group.index])
        part = TokenPart(before, here, sum(group.patches), group.sum, group.largest)
        self._positions = self._run.model.compute_on_part(model, part)
        for module in self._positions.values():
            # Others have other positions: only "dcn" and "fsdp" hold, and sum up, the same ones.
            fully_shard(module, **self._options(self._whole_mesh, is_root=False))
            # A mean is taken over those; all others' gradients are of a mean over "domain", too.
            module.register_forward_hook(
                lambda _, __, values: _WithGradientTimes.apply(values, 1 / group.size)
            )

    def _options(self, mesh: DeviceMesh, *, is_root: bool) -> dict:
        own, precision = self._own, self._sharding.precision
        lower = precision != "fp32" or own.reduce_dtype != "fp32"
        # Of the mesh with all axes: PyTorch warns of a slice of a slice.
        shard = mesh[SHARD]
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[precision] if lower else None,
            reduce_dtype=DTYPES[own.reduce_dtype] if lower else None,
            output_dtype=torch.float32 if is_root else None,
        )
        return {
            "mesh": mesh[OUTER, SHARD] if mesh.size(0) > 1 else shard,
            "shard_placement_fn": functools.partial(_placement, parts=shard.size()),
            # The root's weights would be gathered again at once by the backward pass.
            "reshard_after_forward": self._zero == 3 and not is_root,
            "mp_policy": policy,
            "offload_policy": CPUOffloadPolicy() if own.cpu_offload else OffloadPolicy(),
        }

    def _order_prefetch(self, blocks: list[FSDPModule]) -> None:
        forward, backward = self._own.forward_prefetch, self._own.backward_prefetch
        for index, block in enumerate(blocks):
            if forward:
                block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + forward])
            before = blocks[max(0, index - backward) : index][::-1]
            # An empty list means PyTorch's own order, one ahead. The block itself, which is
            # gathered already, means none.
            block.set_modules_to_backward_prefetch(before or [block])

    def _sharded_over(self) -> list[dist.ProcessGroup]:
        return [self._mesh.get_group(SHARD)]

    def _local_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, part.to_local().detach()) for name, part in self._dtensors.items())

    # -- a step -----------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        root = self._model
        assert isinstance(root, FSDPModule)
        # Between micro-batches: gradients are scattered each time, so that they never stand
        # whole, but summed over the outer groups once; ZeRO-2 keeps its gathered weights.
        root.set_requires_all_reduce(is_last)
        root.set_is_last_backward(is_last)
        if self._zero != 3:
            root.set_reshard_after_backward(is_last)
        scaled = loss if self._loss_scale is None else loss * self._loss_scale.value
        scaled.backward()

    def _take_gradients(self) -> None:
        for name, parameter in self._dtensors.items():
            if isinstance(parameter.grad, DTensor):
                self._locals[name].grad = parameter.grad.to_local()

    def _drop_gradients(self) -> None:
        for parameter in self._dtensors.values():
            parameter.grad = None

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        if self._loss_scale is not None:
            parts = self._locals.values()
            self._loss_scale.unscale([part.grad for part in parts if part.grad is not None])
        return super()._clip_grad_norm(max_norm)

    def _judge(self, loss: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """Count no overflow of fp16 gradients as a bad step while the scale can still shrink."""
        if self._loss_scale is None:
            return skipped
        bad_loss = not_finite(loss, loss)
        bad = torch.maximum(bad_loss, skipped * self._loss_scale.is_least())
        self._loss_scale.update(overflowed=skipped, counts=1 - bad_loss)
        return bad

    def _squares(self) -> Iterator[torch.Tensor]:
        apart = self._positions.keys() if self._zero == 0 else set()
        yield self._square(self._locals.keys() - apart, self._sharded_over())
        if apart:
            yield self._square(apart, [self._whole_mesh.get_group(DOMAIN)])

    def _step_state(self) -> dict[str, torch.Tensor]:
        return {} if self._loss_scale is None else self._loss_scale.state()

    def _restore_step_state(self, state: dict[str, torch.Tensor]) -> None:
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.restore(state)

    # -- checkpoints ------------------------------------------------------------------

    def _after_load(self) -> None:
        # A forward pass leaves some gathered for its backward pass, which an evaluation has not.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        parameter = self._dtensors[name]
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


class _WithGradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad * ctx.factor, None


def _placement(parameter: nn.Parameter, parts: int) -> Shard | None:
    """Shard what has one entry for each token, (1, tokens, width), along a dimension that has
    several; None: as PyTorch does it, along the first."""
    if parameter.dim() != 3 or parameter.shape[0] != 1:
        return None
    return next((Shard(d) for d in (1, 2) if parameter.shape[d] % parts == 0), None)
