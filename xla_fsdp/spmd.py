"""SPMD FSDP: one program for all devices, weights sharded by annotations on a plain model."""

import math
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future

import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

from data.batch import Batch, Fields
from models.spec import Units
from training import optimizers
from training.backend import InitializeModule, ScanBody, Tensors
from training.checkpoints.state import Chunk, ShardedTensor
from training.mesh import Spec
from xla_fsdp.hosts import HostPart, part_of_host
from xla_fsdp.layout import MeshLayout
from xla_fsdp.parallel_plan import XlaRun
from xla_fsdp.parallelize import parallelize_spmd
from xla_fsdp.scan import Scan
from xla_fsdp.torch_xla_private import REPLICATED, local_shard_indices
from xla_fsdp.xla_backend import XlaBackend

_LEAST_ROUNDS = 3
"""The fewest rounds that are a loop in the graph; fewer are unrolled."""
_STACKED = ".block."
"""Separates the name of a stack of blocks from a parameter's name in a block."""


class SpmdBackend(XlaBackend):
    layout_class = MeshLayout

    def __init__(self, run: XlaRun) -> None:
        super().__init__(run)
        self._mesh = run.mesh
        self._layout = self.layout_class(run, self._device)
        self.batch_shard, self.batch_shards = xr.process_index(), xr.process_count()
        replica = self._mesh.devices // self._mesh.dcn if self._plan.fsdp else 1
        local, order = self._layout.local_devices, self._layout.device_order
        places = (place for place, number in enumerate(order) if number in local)
        self.shards = tuple(sorted({place % replica for place in places}))
        self.replicas_here = self._mesh.batch_shards
        self._scans: dict[Hashable, Scan] = {}
        self._host: HostPart | None = None
        height = run.model.sizes.input_shape[1]
        # If no devices share images, torch_xla divides a host's images among its devices.
        if self.batch_shards > 1 and self._mesh.devices_a_part > 1:
            self._host = part_of_host(self._mesh, order, local, height)
            self.batch_shard, self.batch_shards = self._host.shard, self._host.shards
        self.image_rows = self._host.rows if self._host else range(height)

    def _describe_form(self) -> str:
        mesh, plan, replicated = self._mesh, self._plan, self._layout.replicated_bytes
        form = "SPMD data parallel, parameters replicated (--run_without_fsdp)"
        if plan.fsdp:
            form = (
                f"SPMD FSDP (ZeRO-3), one unit per block{', scanned' if plan.scan else ''}, {mesh}"
            )
            if mesh.domain > 1:
                form += f", {self._sharding.domain_attention} attention over domain"
            if replicated:
                form += f", {replicated:,} bytes of parameters replicated on each device "
                form += f"(no dimension is a multiple of {mesh.min_shards})"
        form += ", residuals in bf16" if plan.residual_bf16 else ""
        form += ", weights gathered in fp8" if plan.gather_fp8 else ""
        return form + (", linear layers in int8" if plan.int8 else "")

    def shard(self, model: nn.Module, units: Units, initialize: InitializeModule) -> nn.Module:
        self._model = parallelize_spmd(
            model, units, initialize, self._run, self._layout, self._break_graph
        )
        return self._model

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        return self._layout.constant(values)

    def _zeros_like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._layout.zeros(parameter.shape, self._layout.specs[parameter], dtype)

    def _mark_replicated(self, x: torch.Tensor) -> torch.Tensor:
        return self._layout.mark_replicated(x)

    # -- a step -----------------------------------------------------------------------

    def put(self, batch: Batch, fields: Fields) -> Batch:
        placed = {}
        for name, shard in batch.items():
            rows = fields[name].rows if name in fields else None
            dimensions = () if rows is None else (*["width"] * rows, "tokens")
            spec = self._layout.activation_spec(shard.dim(), *dimensions)
            if self._host is not None:
                height = self._run.model.sizes.input_shape[1]
                shard = self._host.in_global_batch(shard, rows, height)
            minibatch = self._host is None and xr.process_count() > 1
            placed[name] = self._layout.send(shard, spec, minibatch)
        return placed

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return value  # the program's tensors are global

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return self._mark_replicated(value)  # already global; replicated, every host can read it

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        shards = self._layout.mark_images(values.detach() * 1)
        return self._mark_replicated(shards * 1)

    def scan(self, body: ScanBody, state: Tensors, shared: Tensors, stacked: Tensors) -> Tensors:
        rounds = len(next(iter(stacked.values())))
        if rounds < _LEAST_ROUNDS:
            return super().scan(body, state, shared, stacked)
        carried, inputs = [*state.values(), *shared.values()], [*stacked.values()]

        def one_round(
            carried: list[torch.Tensor], slices: list[torch.Tensor]
        ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            current = dict(zip(state, carried, strict=False))
            constant = carried[len(state) :]
            given = dict(zip([*shared, *stacked], [*constant, *slices], strict=True))
            following = body(current, given)
            return [*map(following.__getitem__, state), *constant], []

        key = body, rounds, *((tuple(x.shape), x.dtype) for x in (*carried, *inputs))
        if key not in self._scans:
            self._scans[key] = Scan(one_round, carried, inputs, rounds=rounds)
        last, _ = self._scans[key](carried, inputs)
        return dict(zip(state, last, strict=False))

    def read_images(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, torch.Tensor]]:
        mark = self._layout.mark_images  # each device gets whole images
        marked = {name: mark(x * 1) for name, x in values.items()}  # x may have an annotation
        if xr.process_count() == 1:
            return super().read_images(marked)
        self.end_step()

        def images_here() -> dict[str, torch.Tensor]:
            here = {}
            for name, x in marked.items():
                shards = {s.indices[0].start: s.data for s in xs.XLAShardedTensor(x).local_shards}
                here[name] = torch.cat([shards[start] for start in sorted(shards)])
            return here

        return self._reader.submit(images_here)

    def _muon_directions(
        self, parameters: Sequence[nn.Parameter], momenta: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        # Parameters are sharded, but a Newton-Schulz iteration multiplies a whole matrix by itself.
        # So all matrices of one shape form a batch, sharded along its first dimension: each device
        # orthogonalizes some of them. A matrix may have three dimensions: queries, keys and values.
        specs, mark = self._layout.specs, self._layout.mark  # specs of parameters and momenta
        dtype = optimizers.ns_dtype(self._sharding.precision)
        alike: dict[tuple, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        for parameter, momentum in zip(parameters, momenta, strict=True):
            matrix = self._updates[parameter][0].matrix
            assert matrix is not None
            stacked = int(momentum.numel() > math.prod(matrix))  # of several blocks
            kind = (matrix, momentum.shape[stacked:], specs[parameter][stacked:])
            alike.setdefault(kind, []).append((parameter, momentum.to(dtype)))
        directions: dict[nn.Parameter, torch.Tensor] = {}
        for (matrix, shape, matrix_spec), group in alike.items():
            shards = [mark(momentum * 1, specs[parameter]) for parameter, momentum in group]
            stacks = [x if x.dim() > len(shape) else x.unsqueeze(0) for x in shards]
            batch = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
            count = len(batch)
            moves = self._mesh.parts_of_axes(matrix_spec) if count > 1 else []
            first = tuple(axis for axes in moves for axis in axes)
            if first:  # pad: uneven shards would be gathered on the way back
                missing = batch.new_zeros(-count % self._mesh.devices, *batch.shape[1:])
                batch = torch.cat([batch, missing])
            # Move the sharding to dimension 0 one axis at a time: in a single step, the partitioner
            # would gather the batch on each device.
            way: list[Spec] = []
            for n in range(len(moves)):
                there = tuple(axis for axes in moves[:n] for axis in axes)
                way.append(
                    (there, *(tuple(a for a in axes if a not in there) for axes in matrix_spec))
                )
            way.append((first, *((),) * (batch.dim() - 1)))
            for spec in way:
                batch = mark(batch * 1, spec)
            matrices = mark(batch.reshape(len(batch), *matrix) * 1, (first, (), ()))
            results = optimizers.orthogonalized(matrices, self._eps)
            results = mark(results * 1, (first, (), ())).reshape(batch.shape)
            for spec in reversed(way):
                results = mark(results * 1, spec)
            parts = results[:count].split([len(stack) for stack in stacks])
            for (parameter, momentum), part in zip(group, parts, strict=True):
                shard = mark(part.reshape(momentum.shape) * 1, specs[parameter])
                directions[parameter] = shard.float() * optimizers.lr_factor(matrix)
        return [directions[parameter] for parameter in parameters]

    # -- state ------------------------------------------------------------------------
    #
    # On the devices, stacked parameters are (depth, ...) and packed ones (parts, rows, ...).
    # Checkpoints have the parameters of the plain model.

    def _plain_names(self, name: str) -> list[str]:
        stack, is_stacked, in_block = name.partition(_STACKED)
        if not is_stacked:
            return [name]
        depth = self._run.model.stacks[stack].depth
        return [f"{stack}.{i}.{in_block}" for i in range(depth)]

    def _packed_parts(self, name: str) -> int:
        """Return the number of parts of a packed parameter; 0 for one as in the plain model."""
        stack, _, rest = name.partition(".")  # of blocks that are a loop, or not
        in_stack = stack in self._run.model.stacks
        return self._layout.packed.get(rest.partition(".")[2], 0) if in_stack else 0

    def _local_bytes(self, tensor: torch.Tensor) -> int:
        indices = local_shard_indices(tensor)[0]
        if indices is REPLICATED:
            return tensor.nbytes
        return math.prod(i.stop - i.start for i in indices) * tensor.element_size()

    def _to_host(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        names, stacked = self._plain_names(name), _STACKED in name
        chunks: dict[tuple[int, ...], Chunk] = {}
        for shard in xs.XLAShardedTensor(tensor).local_shards:
            if shard.indices is REPLICATED:
                return dict(zip(names, shard.data if stacked else [shard.data], strict=True))
            offsets = tuple(index.start for index in shard.indices)
            chunks[offsets] = Chunk(offsets, shard.data)  # no padding: sharded evenly
        value = ShardedTensor(tensor.shape, tensor.dtype, list(chunks.values()))
        if self._packed_parts(name):
            # Reshape (..., parts, rows, ...) to (..., parts * rows, ...), one chunk per part.
            dim = int(stacked)
            before, (count, rows, *after) = value.shape[:dim], value.shape[dim:]
            unpacked = []
            for chunk in value.chunks:
                outer, (part, row, *inner) = chunk.offsets[:dim], chunk.offsets[dim:]
                for i, data in enumerate(chunk.data.unbind(dim)):
                    unpacked.append(Chunk((*outer, (part + i) * rows + row, *inner), data))
            value = ShardedTensor((*before, count * rows, *after), value.dtype, unpacked)
        if not stacked:
            return {name: value}
        return {
            plain: ShardedTensor(
                value.shape[1:],
                value.dtype,
                [Chunk(chunk.offsets[1:], chunk.data[i]) for chunk in value.chunks],
            )
            for i, plain in enumerate(names)
        }

    def _to_device(self, name: str, tensor: torch.Tensor, saved: list[torch.Tensor]) -> None:
        stacked = _STACKED in name and tensor.dim() > 0  # AdamW's step is a scalar
        sharded = [tensor for tensor in saved if isinstance(tensor, ShardedTensor)]
        if not sharded:  # on one device, or replicated
            replicated = self.constant(torch.stack(saved) if stacked else saved[0])
            with torch.no_grad():  # (the next sync would undo torch_xla's _replace_xla_tensor)
                tensor.copy_(replicated)
            return
        target, parts = xs.XLAShardedTensor(tensor.detach()), self._packed_parts(name)
        shards: list[xs.XLAShard] = target.local_shards
        for shard in shards:
            place = shard.indices[1:] if stacked else shard.indices
            first, *rest = (index.start for index in place)
            blocks = []
            for block in sharded:
                data = {chunk.offsets: chunk.data for chunk in block.chunks}
                if parts:
                    rows, here = block.shape[0] // parts, range(first, place[0].stop)
                    packed = [data[i * rows + rest[0], *rest[1:]] for i in here]
                    blocks.append(torch.stack(packed))
                else:
                    blocks.append(data[first, *rest])
            shard.data = torch.stack(blocks) if stacked else blocks[0]
        target.load_local_shards_(shards)
