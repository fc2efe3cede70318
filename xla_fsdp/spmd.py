"""SPMD FSDP: one program for all devices, weights cut by sharding marks on a plain model.

The marks are set directly (``mark_sharding``) rather than through torch_xla's
SpmdFullyShardedDataParallel: as fast to within 5 % (docs/benchmarks.md), and parameter
names stay those of the plain model.
"""

from __future__ import annotations

import argparse
import functools
import math

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard, XLAShardedTensor

from data.loader import Batch
from training.shards import Chunk, ShardedTensor
from xla_fsdp.attention import attention_form
from xla_fsdp.backend import XlaBackend
from xla_fsdp.blocks import after_forward
from xla_fsdp.flash_attention import Cut, use_flash
from xla_fsdp.marks import Gather
from xla_fsdp.options import scans_blocks
from xla_fsdp.scanned_blocks import ScannedBlocks

AXIS = "fsdp"
Spec = tuple[str | None, ...]
"""For each dimension the mesh axis it is cut along, None if it is not cut."""


class SpmdBackend(XlaBackend):
    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.world_size = xr.process_index(), xr.process_count()
        super().__init__(args)
        count = self.device_count
        self._mesh = xs.Mesh(np.arange(count), (count,), (AXIS,))
        self._replicated_bytes = 0
        self._scans = scans_blocks(args)
        self._stacked: set[torch.Tensor] = set()

    @property
    def _rng_stream(self) -> int:
        return 0  # every host traces the same program

    def describe(self) -> str:
        if self._args.run_without_fsdp:
            form = "SPMD data parallel, parameters replicated (--run_without_fsdp)"
        else:
            form = "SPMD FSDP (ZeRO-3), each block a unit"
            form += ", scanned" if self._scans else ""
            if self._replicated_bytes:
                form += (
                    f", {self._replicated_bytes:,} bytes of parameters replicated "
                    f"(no dimension is a multiple of {self.device_count})"
                )
        return f"XLA: {self._describe_common()}, {form}"

    # -- sharding ---------------------------------------------------------------------

    def _shard_block(self, model: nn.Module, name: str, block: nn.Module) -> nn.Module:
        if self._scans:
            return self._stack_block(model, name, block)
        self._place(block)
        self._choose_attention(block)
        after_forward(block, self._mark_batch)
        return block

    def _stack_block(self, model: nn.Module, name: str, block: nn.Module) -> nn.Module:
        """Move a block's values into the stack; the last one leaves the stack in their place."""
        blocks: nn.Sequential = model.blocks  # type: ignore[assignment]
        index = int(name.removeprefix("blocks."))
        if index == 0:
            self._stack = ScannedBlocks(
                blocks,
                stack=self._stacked_zeros,
                constant=self._constant,
                mark_batch=self._mark_batch,
                gather=self._gather,
                bf16=self._args.precision == "bf16",
            )
            self._choose_attention(self._stack.block)
        self._fill(index, block)
        if index + 1 == len(blocks):
            model.blocks = self._stack
        return block

    def _choose_attention(self, block: nn.Module) -> None:
        if attention_form(self._args) == "flash":
            use_flash(block, Cut(self._mesh, AXIS))

    def _fill(self, index: int, block: nn.Module) -> None:
        self._stack.fill(index, block, self._send)
        block.to("meta")  # the host needs no second copy

    def _stacked_zeros(self, parameter: torch.Tensor, depth: int) -> nn.Parameter:
        spec = (None, *self._spec(parameter.shape))
        shape = torch.Size((depth, *parameter.shape))
        stacked = self._as_parameter(self._new_state(shape, spec))
        self._count_replicated(stacked, spec)
        self._stacked.add(stacked)
        return stacked

    def _new_state(self, shape: torch.Size, spec: Spec) -> torch.Tensor:
        """Zeros on the devices, for stacked parameters and AdamW."""
        return self._mark(torch.zeros(shape, device=self._device), spec)

    def _as_parameter(self, values: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(values)

    def _count_replicated(self, parameter: torch.Tensor, spec: Spec) -> None:
        if not any(spec):
            self._replicated_bytes += parameter.nbytes

    def _spec_of(self, parameter: torch.Tensor) -> Spec:
        if parameter in self._stacked:
            return (None, *self._spec(parameter.shape[1:]))
        return self._spec(parameter.shape)

    def _gather(self, weight: torch.Tensor) -> torch.Tensor:
        lower = self._args.precision == "bf16" and weight.dim() > 1
        dtype = torch.bfloat16 if lower else weight.dtype
        cut = functools.partial(self._mark, spec=self._spec(weight.shape))
        whole = functools.partial(self._mark, spec=(None,) * weight.dim())
        return Gather.apply(weight, dtype, cut, whole)

    def _shard_root(self, model: nn.Module) -> nn.Module:
        self._place(model)
        return model

    def _place(self, module: nn.Module) -> None:
        """Send parameters that are not there yet to the devices, cut or replicated."""
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is None or parameter.device.type == "xla":
                    continue
                part._parameters[key] = self._as_parameter(self._send(parameter.detach()))
                self._count_replicated(parameter, self._spec(parameter.shape))

    def _spec(self, shape: torch.Size) -> Spec:
        """Cut along the largest dimension that the devices divide, if there is one."""
        divisible = [d for d, size in enumerate(shape) if size % self.device_count == 0]
        if self._args.run_without_fsdp or not divisible:
            return (None,) * len(shape)
        cut = max(divisible, key=lambda d: shape[d])
        return tuple(AXIS if d == cut else None for d in range(len(shape)))

    def _mark(self, x: torch.Tensor, spec: Spec) -> torch.Tensor:
        xs.mark_sharding(x, self._mesh, spec)
        return x

    def _mark_batch(self, x: torch.Tensor) -> torch.Tensor:
        return self._mark(x, (AXIS,) + (None,) * (x.dim() - 1))

    def _send(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter's values from the host to the devices, cut."""
        sharding = xs.ShardingSpec(self._mesh, self._spec(parameter.shape))
        return xm.send_cpu_data_to_device(parameter, self._device, sharding)[0]

    def _zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._new_state(parameter.shape, self._spec_of(parameter))

    def _scalar(self, value: float) -> torch.Tensor:
        return self._constant(torch.tensor(value))

    def _constant(self, values: torch.Tensor) -> torch.Tensor:
        # Marked, because results of a step are: an unmarked one would compile anew.
        return self._mark(values.to(self._device), (None,) * values.dim())

    # -- a step -----------------------------------------------------------------------

    def put(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        several_hosts = self.world_size > 1

        def send(tensor: torch.Tensor) -> torch.Tensor:
            spec = (AXIS,) + (None,) * (tensor.dim() - 1)
            sharding = xs.ShardingSpec(self._mesh, spec, minibatch=several_hosts)
            return xm.send_cpu_data_to_device(tensor, self._device, sharding)[0]

        return send(batch[0]), send(batch[1])

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return value  # the program's tensors are global

    sum = mean

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, foreach=False)

    # -- state ------------------------------------------------------------------------

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _local_bytes(self, tensor: torch.Tensor) -> int:
        placements = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]
        _, indices = placements[0]
        if indices is Ellipsis:
            return tensor.nbytes
        return math.prod(i.stop - i.start for i in indices) * tensor.element_size()

    def _to_host(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        chunks: dict[tuple[int, ...], Chunk] = {}
        for shard in XLAShardedTensor(tensor).local_shards:
            if shard.indices is Ellipsis:
                return _by_plain_name(name, shard.data)
            offsets = tuple(index.start for index in shard.indices)
            chunks[offsets] = Chunk(offsets, shard.data)  # unpadded: _spec cuts evenly
        return _by_plain_name(
            name, ShardedTensor(tensor.shape, tensor.dtype, list(chunks.values()))
        )

    def _to_device(self, tensor: torch.Tensor, saved: list[torch.Tensor]) -> None:
        stacked = tensor.dim() > saved[0].dim()
        cut = [each for each in saved if isinstance(each, ShardedTensor)]
        if not cut:  # on one device, or replicated
            values = torch.stack(saved) if stacked else saved[0]
            replicated = self._constant(values)
            with torch.no_grad():  # (torch_xla's _replace_xla_tensor is undone by the next sync)
                tensor.copy_(replicated)
            return
        target = XLAShardedTensor(tensor.detach())
        shards: list[XLAShard] = target.local_shards
        for shard in shards:
            offsets = tuple(index.start for index in shard.indices)[stacked:]
            parts = [c.data for each in cut for c in each.chunks if c.offsets == offsets]
            shard.data = torch.stack(parts) if stacked else parts[0]
        target.load_local_shards_(shards)


_STACKED = "blocks.block."


def _by_plain_name(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Under its own name, or if stacked: each block's part under the name in the plain model."""
    if not name.startswith(_STACKED):
        return {name: value}
    names = [f"blocks.{i}.{name.removeprefix(_STACKED)}" for i in range(len(value))]
    if not isinstance(value, ShardedTensor):
        return dict(zip(names, value, strict=True))
    return {
        plain: ShardedTensor(
            value.shape[1:], value.dtype, [Chunk(c.offsets[1:], c.data[i]) for c in value.chunks]
        )
        for i, plain in enumerate(names)
    }
