"""Nested FSDP: torch_xla's XlaFullyShardedDataParallel around each block and the model, with one
process per device. bf16 uses autocast, as convolutions fail with FSDP's compute_dtype
(torch_xla 2.9)."""

import functools

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

from data.batch import Batch, Fields
from models.spec import Units
from training.backend import InitializeModule
from training.checkpoints.state import Chunk, ShardedTensor, flat_range_boxes
from xla_fsdp.parallel_plan import XlaRun
from xla_fsdp.parallelize import parallelize_nested
from xla_fsdp.torch_xla_private import (
    drop_views,
    free_gathered,
    original_parameters,
    without_wrappers,
)
from xla_fsdp.xla_backend import XlaBackend


class NestedBackend(XlaBackend):
    replicas_here = 1

    def __init__(self, run: XlaRun) -> None:
        super().__init__(run)
        self.batch_shard, self.batch_shards = xr.global_ordinal(), xr.world_size()
        self.image_rows = range(run.model.sizes.input_shape[1])
        self._rng_stream, self._fsdp = self.batch_shard, self._plan.fsdp
        self._part = self.batch_shard if self._fsdp else 0
        self.shards = (self._part,)

    def _describe_form(self) -> str:
        if not self._fsdp:
            return "data parallel, one process per device (--run_without_fsdp)"
        zero = "ZeRO-3" if self._sharding.reshard_after_forward else "ZeRO-2"
        form = f"nested FSDP ({zero}), one unit per block"
        form += ", flat parameters" if self._xla.flatten_parameters else ""
        return form + (", sharded on the host" if self._xla.shard_on_cpu else "")

    def shard(self, model: nn.Module, units: Units, initialize: InitializeModule) -> nn.Module:
        self._model = parallelize_nested(
            model, units, initialize, self._run, self._device, self.constant, self._break_graph
        )

        # FSDP keeps the root unsharded for the backward pass. After an evaluation, which has none,
        # these weights would be another input of the next step and cause a recompilation.
        def after_forward(*_: object) -> None:
            if not torch.is_grad_enabled():
                self._reshard()

        self._model.register_forward_hook(after_forward)
        return self._model

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        # With .to(), torch_xla 2.9 sends equal scalars only once: a learning rate that equals
        # another scalar of the step would become the same input and cause a recompilation.
        (sent,) = xm.send_cpu_data_to_device([values], self._device)
        return sent

    # -- a step -----------------------------------------------------------------------

    def put(self, batch: Batch, fields: Fields) -> Batch:
        tensors = xm.send_cpu_data_to_device([*batch.values()], self._device)
        return dict(zip(batch, tensors, strict=True))

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.sum(value) / self.batch_shards

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        # As in the units: XLA refuses programs in which only some sums have pinned layouts.
        return xm.all_reduce(xm.REDUCE_SUM, value, pin_layout=False)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return xm.all_gather(values.detach(), dim=0, pin_layout=False)

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        if self._fsdp:
            assert isinstance(self._model, XlaFullyShardedDataParallel)
            return self._model.clip_grad_norm_(max_norm)
        xm.reduce_gradients(self._optimizer, pin_layout=False)
        return super()._clip_grad_norm(max_norm)

    def _reshard(self) -> None:
        for unit in self._model.modules():
            if isinstance(unit, XlaFullyShardedDataParallel):
                free_gathered(unit)

    def _after_backward(self) -> None:
        for unit in self._model.modules():
            if isinstance(unit, XlaFullyShardedDataParallel):
                drop_views(unit)

    # -- state ------------------------------------------------------------------------

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        if self._fsdp:
            return {name: shard for name, (shard, _) in self._shards.items()}
        return super()._named_parameters()

    @functools.cached_property
    def _shards(self) -> dict[str, tuple[nn.Parameter, list[tuple[str, torch.Size]]]]:
        """The sharded parameters by name, each with the plain parameters that it holds, in order.
        (FSDP's get_original_names_and_sharded_parameters repeats the root's for each unit.)"""
        shards = {}
        for unit_name, unit in self._model.named_modules():
            if isinstance(unit, XlaFullyShardedDataParallel):
                for shard in unit.sharded_params:
                    name, parts = original_parameters(unit, shard)
                    plain = [(without_wrappers(f"{unit_name}.{n}"), shape) for n, shape in parts]
                    shards[without_wrappers(f"{unit_name}.{name}")] = shard, plain
        return shards

    def _plain_names(self, name: str) -> list[str]:
        return [plain for plain, _ in self._shards[name][1]] if self._fsdp else [name]

    def _to_host(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        values = tensor.cpu()
        if not self._fsdp:
            return {name: values}
        values = values.flatten()  # rows, where it is sharded by rows
        # This rank holds a range of the flattened, concatenated and padded parameters.
        first = self.batch_shard * values.numel()
        last, base = first + values.numel(), 0
        saved: dict[str, torch.Tensor] = {}
        for plain_name, shape in self._shards[name][1]:
            start, end = max(first - base, 0), min(last - base, shape.numel())
            chunks = []
            for offsets, sizes, flat in flat_range_boxes(shape, start, end):
                rest = values[flat + base - first :]
                chunks.append(Chunk(offsets, rest[: torch.Size(sizes).numel()].view(sizes)))
            saved[plain_name] = ShardedTensor(shape, values.dtype, chunks)
            base += shape.numel()
        return saved

    def _to_device(self, name: str, tensor: torch.Tensor, saved: list[torch.Tensor]) -> None:
        values = saved[0]  # unsharded: a plain parameter, or Adam's step
        sharded = [part for part in saved if isinstance(part, ShardedTensor)]
        if sharded:
            values = tensor.detach().cpu()
            flat, at = values.view(-1), 0  # chunks come first, padding last
            for chunk in (chunk for part in sharded for chunk in part.chunks):
                flat[at : at + chunk.data.numel()] = chunk.data.flatten()
                at += chunk.data.numel()
        with torch.no_grad():
            tensor.copy_(values.to(tensor.device))
