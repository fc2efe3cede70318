"""How SimpleFSDP divides a parameter over processes, gathers it, and reduces its gradient, by
functional collectives: operations of a step's graph."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from models.rounding import from_bytes, round_to_bytes
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import sharded_dim
from torch_fsdp.tensor_parallel import Part

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Layout:
    """How a parameter is sharded: in chunks of equal size along one dimension, the last ones padded
    with zeros, so that all processes run the same program."""

    shape: torch.Size
    """The shape of the whole parameter; with ``part``, of that."""
    dim: int
    shards: int
    group: str
    """The name of the group of processes that have a shard each."""
    dtype: torch.dtype
    """The dtype in which the parameter is used, and gathered if it is not ``rounded``."""
    reduce_dtype: torch.dtype
    processes: int
    """How many of a replica there are, whose gradients are averaged."""
    device: Device
    part: Part | None = None
    """With tensor parallelism: the part of the parameter that the group's processes shard."""
    rounded: torch.dtype | None = None
    """Int8 or fp8, in which each process rounds its shard before it is gathered."""
    multiplied: bool = False
    """Whether a product is computed with what is ``rounded``."""

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        processes: int,
        device: Device,
        part: Part | None = None,
    ) -> "Layout":
        if part:
            shape = part.shape
        shards = group.size()
        dim = sharded_dim(shape, shards)
        name = group.group_name
        return cls(shape, dim, shards, name, dtype, reduce_dtype, processes, device, part)

    def of_several(self, count: int) -> "Layout":
        """Return the layout of so many such parameters stacked along a new dimension 0."""
        return replace(self, shape=torch.Size([count, *self.shape]), dim=self.dim + 1)

    @property
    def held(self) -> torch.dtype:
        """The dtype in which a shard waits to be gathered."""
        return torch.float32 if self.rounded else self.dtype

    @property
    def chunk(self) -> int:
        """The size of a shard along ``dim``, padding included."""
        return -(-self.shape[self.dim] // self.shards)

    def range(self, index: int) -> tuple[int, int]:
        """Return where shard number ``index`` starts along ``dim``, and its size without
        padding."""
        start = min(index * self.chunk, self.shape[self.dim])
        return start, min(self.chunk, self.shape[self.dim] - start)

    def shard(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return shard number ``index``, a copy."""
        if self.part:
            whole = self.part.of(whole)
        sizes = list(self.shape)
        sizes[self.dim] = self.chunk
        start, size = self.range(index)
        shard = whole.new_zeros(sizes)
        shard.narrow(self.dim, 0, size).copy_(whole.narrow(self.dim, start, size))
        return shard

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Gather a parameter, or factors of it, in the dtype of the shard."""
        values = shard
        if shard.itemsize == 1 and shard.device.type == "cpu":
            values = shard.view(torch.int8)  # gloo has no fp8; on a TPU this would be a copy of all
        gathered = _c10d.all_gather_into_tensor(values.unsqueeze(0), self.shards, self.group)
        whole = _c10d.wait_tensor(gathered).movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        return whole.narrow(self.dim, 0, self.shape[self.dim]).view(shard.dtype)


class Gather(torch.autograd.Function):
    """Gathers a parameter, or its part, with its numbers and factors if products are computed with
    them; reduces its gradient to the mean over the processes."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
        ctx.layout, ctx.dtype, ctx.shape = layout, shard.dtype, shard.shape
        ctx.set_materialize_grads(False)
        shard = shard.detach()  # else a trace converts the parameter itself, as real numbers
        if layout.rounded is None:
            return (layout.gather(shard.to(layout.dtype)),)
        along = tuple(dim for dim in range(shard.dim()) if dim != layout.dim)
        numbers, factors = map(layout.gather, round_to_bytes(shard, layout.rounded, along))
        whole = from_bytes(numbers, factors, layout.dtype)
        if not layout.multiplied:
            return (whole,)
        ctx.mark_non_differentiable(numbers, factors)
        return whole, numbers, factors

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor, None]:
        layout = ctx.layout
        grad = grad.to(layout.reduce_dtype)
        padding = layout.chunk * layout.shards - grad.shape[layout.dim]
        if padding:
            sizes = list(grad.shape)
            sizes[layout.dim] = padding
            grad = torch.cat([grad, grad.new_zeros(sizes)], dim=layout.dim)
        grad = grad.unflatten(layout.dim, (layout.shards, layout.chunk)).movedim(layout.dim, 0)
        grad = layout.device.to_scatter(grad)
        summed = _c10d.reduce_scatter_tensor(grad.contiguous(), "sum", layout.shards, layout.group)
        summed = _c10d.wait_tensor(summed).view(ctx.shape)
        return (summed / layout.processes).to(ctx.dtype), None
