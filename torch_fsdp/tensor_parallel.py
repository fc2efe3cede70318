"""Tensor parallelism with sequence parallelism in timm's blocks, as in Megatron (arXiv 2205.05198):
each process of a group computes with some heads and some columns of the MLP.

The first product of attention and of the MLP is divided by columns, the second by rows. Each of
these halves of a block gathers its input, of which each process has some tokens, and scatters the
sum of its output. Collectives are functional, as SimpleFSDP's, so that a step that has them can be
traced.

Each process of a group computes the loss of the same images, and gradients are those of the sum of
these losses: what a collective passes forward to all is summed over all on the way back.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import RmsNorm
from torch import Tensor, nn

from models.blocks import Qkv, logical_axes, packed_parts, queries_keys_values, use_attend
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import OUTER, SHARD, TorchRun
from torch_fsdp.products import product
from training.checkpoints.state import Chunk
from training.mesh import tensor_dims

TENSOR = "tensor"
"""The mesh axis that shards heads and MLP columns."""

_c10d = torch.ops._c10d_functional


# ------------------------------------------------------------------------------------------------
# A process's part of a parameter.


@dataclass(frozen=True)
class Part:
    """Part number ``index`` of ``count`` of a block's parameter: of each of ``packed`` tensors that
    a layer has one after the other along dimension 0."""

    whole: torch.Size
    dim: int
    packed: int
    index: int
    count: int

    @property
    def size(self) -> int:
        """The size along ``dim`` of the part of one of the packed tensors."""
        return self.whole[self.dim] // self.packed // self.count

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.whole)
        sizes[self.dim] //= self.count
        return torch.Size(sizes)

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of the whole parameter."""
        packed = whole.unflatten(self.dim, (self.packed, -1))
        part = packed.narrow(self.dim + 1, self.index * self.size, self.size)
        return part.flatten(self.dim, self.dim + 1)

    def in_whole(self, chunk: Chunk) -> list[Chunk]:
        """Return the pieces of the whole parameter that a chunk of this part is."""
        pieces = []
        first, data = chunk.offsets[self.dim], chunk.data
        end = first + data.shape[self.dim]
        for number in range(self.packed):
            start = number * self.size
            begin, stop = max(first, start), min(end, start + self.size)
            if begin < stop:
                offsets = list(chunk.offsets)
                offsets[self.dim] = begin + (number * (self.count - 1) + self.index) * self.size
                piece = data.narrow(self.dim, begin - first, stop - begin)
                pieces.append(Chunk(tuple(offsets), piece))
        return pieces


# ------------------------------------------------------------------------------------------------
# The processes of a group, and their collectives, which pass gradients back.


class TensorGroup:
    """The processes that compute with the same images, of which this is number ``index``."""

    def __init__(self, run: TorchRun, device: Device) -> None:
        mesh = run.mesh
        ranks = torch.arange(mesh.devices).view(mesh.dcn, mesh.fsdp, mesh.tensor)
        axes = device.mesh(ranks, (OUTER, SHARD, TENSOR))
        self.same_parts = axes.get_group(SHARD)
        """The processes that have the same part of each parameter."""
        self.index, self.count = axes.get_local_rank(TENSOR), mesh.tensor
        self._name = axes.get_group(TENSOR).group_name
        # A tensor, of which each process has another one: all trace the same graph.
        self._is_own = (torch.arange(self.count) == self.index).to(device.where)

    def parts(self, block: nn.Module) -> Mapping[nn.Parameter, Part]:
        """Return the parts of the block's parameters that are divided."""
        axes = logical_axes(block)
        packed, parts = packed_parts(axes), {}
        for name, dim in tensor_dims(axes).items():
            parameter, count = block.get_parameter(name), packed.get(name, 1)
            dim -= count > 1  # unfolded, the parameter has one dimension more
            parts[parameter] = Part(parameter.shape, dim, count, self.index, self.count)
        return parts

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's part of ``x`` along a dimension, of which all have the same."""
        parts = x.unflatten(dim, (self.count, -1))
        is_own = self._is_own.view(-1, *[1] * (parts.dim() - dim - 1))
        return parts.where(is_own, 0).sum(dim)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the processes."""
        return _Sum.apply(x, self._name)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this process's part of the sum over all of (batch, count x tokens, width)."""
        parts = x.unflatten(1, (self.count, -1)).movedim(1, 0)
        rows = parts.flatten(0, 2).contiguous()  # on v6e, of 3 dimensions it would be an all-reduce
        part = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(rows, "sum", self.count, self._name))
        return part.unflatten(0, parts.shape[1:3])

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all processes' (batch, tokens, ...) one after the other along dimension 1."""
        parts = _c10d.all_gather_into_tensor(x.contiguous(), self.count, self._name)
        parts = _c10d.wait_tensor(parts).unflatten(0, (self.count, -1))
        return parts.movedim(0, 1).flatten(1, 2)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _c10d.wait_tensor(_c10d.all_reduce(grad.contiguous(), "sum", ctx.group)), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: "Tokens") -> Tensor:
        ctx.tokens = tokens
        return tokens.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tokens.reduce_scatter(grad), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: "Tokens") -> Tensor:
        ctx.tokens = tokens
        return tokens.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tokens.all_gather(grad), None


class Tokens:
    """The tokens of one stack of blocks, (batch, tokens, width), of which each process of a group
    has as many. Zeros follow the last ones, so that it has whole tiles of 8 rows, too: of others,
    XLA makes an all-reduce of a reduce-scatter."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._count = 0
        """The number of tokens of the current step."""

    def divide(self, first: nn.Module, last: nn.Module) -> None:
        """Let the modules from ``first`` to ``last`` compute with this process's tokens of what
        the first one is given; return all tokens from the last one."""

        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            self._count = inputs[0].shape[1]
            return self.own(inputs[0]), *inputs[1:]

        def leave(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return self.gather(output)

        first.register_forward_pre_hook(enter)
        last.register_forward_hook(leave)

    def own(self, x: Tensor) -> Tensor:
        """Return this process's tokens of those that all have."""
        return self._group.own(self._padded(x), 1)

    def gather(self, x: Tensor) -> Tensor:
        """Return the tokens of all processes."""
        return _Gather.apply(x, self)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this process's tokens of the sum of what all processes have."""
        return _Scatter.apply(x, self)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._group.all_gather(x)[:, : self._count]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._group.reduce_scatter(self._padded(x))

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        return (part[0], self._count, *part[2:])

    def _padded(self, x: Tensor) -> Tensor:
        step = self._group.count * 8 // math.gcd(8, x.shape[0])
        return F.pad(x, (0, 0, 0, -x.shape[1] % step))


# ------------------------------------------------------------------------------------------------
# A block of timm's.


def compute_part(block: nn.Module, group: TensorGroup, tokens: Tokens, attention: str) -> None:
    """Let a block that ``logical_axes`` knows compute with this process's heads and MLP columns,
    once its parameters are those of ``TensorGroup.parts``. ``attention``: as in ``TorchPlan``, by
    which ``use_attention`` has already changed the block."""
    attn: Any = block.attn
    mlp: Any = block.mlp
    attn.num_heads //= group.count
    if getattr(attn, "k_bias", None) is not None:  # zeros, a buffer
        attn.k_bias = attn.k_bias[: len(attn.k_bias) // group.count]
    if attention in ("sdpa", "plain"):
        use_attend(attn, _attend)
    attend, compute_mlp = attn.forward, mlp.forward

    def forward(x: Tensor, rope: Tensor | None = None, **kwargs: Any) -> Tensor:
        if rope is not None and rope.dim() > 2 and rope.shape[-3] > 1:  # each head has its own
            rope = group.own(rope, rope.dim() - 3)
        return attend(tokens.gather(x), rope, **kwargs)

    attn.forward = forward
    mlp.forward = lambda x: compute_mlp(tokens.gather(x))
    for layer in (attn.proj, mlp.fc2):
        layer.forward = functools.partial(_by_rows, layer, tokens)
    for norm in (attn.norm, mlp.norm):
        if not isinstance(norm, nn.Identity):
            assert isinstance(norm, nn.LayerNorm | RmsNorm)
            norm.forward = functools.partial(  # type: ignore[method-assign]
                _normalize_columns, norm, group
            )

    def heads(x: Tensor) -> Tensor:
        return group.own(x, 1)

    def columns(x: Tensor) -> Tensor:
        return group.own(x, 2)

    def all_heads(shape: Sequence[int]) -> tuple[int, ...]:
        return (shape[0], shape[1] * group.count, *shape[2:])

    def all_columns(shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:2], shape[2] * group.count)

    _drop_part(attn.attn_drop, all_heads, heads)
    _drop_part(mlp.drop1, all_columns, columns)
    for dropout in (attn.proj_drop, mlp.drop2):
        _drop_part(dropout, tokens.whole_shape, tokens.own)


def _by_rows(layer: nn.Linear, tokens: Tokens, x: Tensor) -> Tensor:
    y = tokens.scatter(product(layer, x))
    return y if layer.bias is None else y + layer.bias


def _attend(attn: Any, qkv: Qkv, rope: Tensor | None, attn_mask: Tensor | None) -> Tensor:
    """Compute attention as PyTorch does, or in plain products, which can drop out heads' parts."""
    q, k, v = (x.transpose(1, 2) for x in queries_keys_values(attn, qkv, rope))
    if attn.fused_attn and not (attn.training and attn.attn_drop.p):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    else:
        scores = (q * attn.scale) @ k.transpose(-2, -1)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        y = attn.attn_drop(scores.softmax(dim=-1)) @ v
    return y.transpose(1, 2).flatten(2)


def _normalize_columns(norm: nn.LayerNorm | RmsNorm, group: TensorGroup, x: Tensor) -> Tensor:
    """Compute a norm over the columns of all processes."""

    def mean(values: Tensor) -> Tensor:
        return group.sum(values.sum(-1, keepdim=True)) / (x.shape[-1] * group.count)

    y = x.float()
    if isinstance(norm, nn.LayerNorm):
        y = y - mean(y)
    y = (y * (mean(y.square()) + norm.eps).rsqrt()).to(x.dtype) * norm.weight
    return y if getattr(norm, "bias", None) is None else y + norm.bias


def _drop_part(
    dropout: nn.Dropout,
    whole_shape: Callable[[Sequence[int]], tuple[int, ...]],
    own: Callable[[Tensor], Tensor],
) -> None:
    """Let a part of a tensor be dropped out as in the whole one, for which all processes of a
    group draw the same random numbers."""

    def forward(x: Tensor) -> Tensor:
        if not dropout.training or not dropout.p:
            return x
        return x * own(F.dropout(x.new_ones(whole_shape(x.shape)), dropout.p))

    dropout.forward = forward  # type: ignore[assignment,method-assign]
