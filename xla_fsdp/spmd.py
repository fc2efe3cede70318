"""SPMD FSDP: one program for all devices, weights sharded by marks on a plain model.

The marks are set directly (``mark_sharding``) rather than through torch_xla's
SpmdFullyShardedDataParallel: as fast to within 5 % (docs/benchmarks.md), and parameter
names stay those of the plain model.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import nn

from data.loader import Batch
from models.blocks import attentions, use_product
from training.checkpoints.state import ShardedTensor
from training.mesh import Axes, Spec
from xla_fsdp.around_blocks import add_in_bf16, after_forward
from xla_fsdp.attention import sharded
from xla_fsdp.attention.kernels import Shards, use_flash
from xla_fsdp.attention.sharded import FlashProducts, Gathered, PartProducts, PlainProducts, Ring
from xla_fsdp.attention.whole import How, use_whole
from xla_fsdp.optimizer import Momenta, Orthogonalize, distributed
from xla_fsdp.products import Int8Marks, int8_marks, linear_weights, multiply_unfolded
from xla_fsdp.remat import KeptResults, kept_by
from xla_fsdp.resolve_xla import XlaRun
from xla_fsdp.scan import ScannedBlocks
from xla_fsdp.sharding import (
    Gather,
    HostPart,
    MarkBoth,
    Scatter,
    Sharding,
    compute_with_whole,
    convolve_by_product,
    device_order,
    gather,
    gather_in_fp8,
    local_bytes,
    local_devices,
    on_host,
    part_of_host,
    partition_spec,
)
from xla_fsdp.tensor_parallel import Marks, packed_parts, shard_block, tensor_dims
from xla_fsdp.xla_backend import XlaBackend, device_part, is_stacked, name_in_block, plain_values


class SpmdBackend(XlaBackend):
    def __init__(self, run: XlaRun) -> None:
        self._shape = run.mesh
        live = self._shape.axis_sizes
        order = self._device_order()
        self.rank, self.world_size = xr.process_index(), xr.process_count()
        self._host: HostPart | None = None
        height = run.model.sizes.input_shape[1]
        # Where no devices share images, torch_xla divides a host's among them by itself.
        if self.world_size > 1 and self._shape.devices_a_part > 1:
            self._host = part_of_host(self._shape, order, local_devices(), height)
            self.rank, self.world_size = self._host.rank, self._host.world_size
        self.image_rows = self._host.rows if self._host else range(height)
        super().__init__(run)
        self._mesh = xs.Mesh(order, tuple(live.values()), tuple(live))
        self._replicated_bytes = 0
        self._scans = bool(run.own.scan_blocks)
        self._specs: dict[torch.Tensor, Spec] = {}
        self._kept = kept_by(self._sharding.grad_ckpt if self._scans else "full")
        self._in_int8: set[str] = set()
        dimensions = run.model.block_dimensions() if self._shape.tensor > 1 else {}
        self._tensor_dims, self._packed = tensor_dims(dimensions), packed_parts(dimensions)

    def _device_order(self) -> list[int]:
        return device_order(self._shape)

    @property
    def _rng_stream(self) -> int:
        return 0  # every host traces the same program

    def describe(self) -> str:
        if self._sharding.run_without_fsdp:
            form = "SPMD data parallel, parameters replicated (--run_without_fsdp)"
        else:
            form = "SPMD FSDP (ZeRO-3), each block a unit"
            form += ", scanned" if self._scans else ""
            form += f", {self._shape}"
            if self._shape.domain > 1:
                form += f", {self._sharding.domain_attention} attention over domain"
            if self._replicated_bytes:
                form += (
                    f", {self._replicated_bytes:,} bytes of parameters replicated "
                    f"(no dimension is a multiple of {self._shape.min_shards})"
                )
        form += ", residuals in bf16" if self._own.residual_dtype == "bf16" else ""
        form += ", weights gathered in fp8" if self._own.gather_dtype == "fp8" else ""
        form += ", linear layers in int8" if self._own.matmul == "int8" else ""
        return f"XLA: {self._describe_common()}, {form}{self._run.why.get('xla_fsdp', '')}"

    # -- sharding ---------------------------------------------------------------------

    def _shard_block(self, model: nn.Module, name: str, block: nn.Module) -> nn.Module:
        if self._scans:
            return self._stack_block(model, name, block)
        self._adapt(block)
        self._place(block, self._tensor_dims)
        if self._shape.domain > 1 and self._shape.tensor == 1:
            compute_with_whole(block, self._whole_in_root)
        self._choose_attention(block)
        after_forward(block, self._mark_tokens)
        if name == "blocks.0" and self._own.residual_dtype == "bf16":
            add_in_bf16(block)
        return block

    def _stack_block(self, model: nn.Module, name: str, block: nn.Module) -> nn.Module:
        """Move a block's values into the stack; the last one leaves the stack in their place."""
        blocks: nn.Sequential | nn.ModuleList = model.blocks  # type: ignore[assignment]
        index = int(name.removeprefix("blocks."))
        if index == 0:
            self._stack = ScannedBlocks(
                blocks,
                adapt=self._adapt,
                stack=self._stacked_zeros,
                constant=self.constant,
                mark_tokens=self._mark_tokens,
                gather=self._gather,
                bf16=self._sharding.precision == "bf16",
                kept=self._kept,
                mark_kept=self._mark_kept,
            )
            self._choose_attention(self._stack.block)
        self._fill(index, block)
        if index + 1 == len(blocks):
            if self._own.residual_dtype == "bf16":
                add_in_bf16(self._stack)
            self._run.model.put_blocks(model, self._stack)
        return block

    def _choose_attention(self, block: nn.Module) -> None:
        drops = self._run.model.sizes.attn_drop_rate > 0
        if self._shape.domain > 1 and self._shape.tensor == 1 and not drops:
            product = self._over_domain().attention
            for attention in attentions(block):
                use_product(attention, product)
        elif self._own.attention != "sdpa" and self._shape.tensor == 1:
            shards = self._shards(*self._shape.logical_spec("batch"))
            if self._own.attention == "flash":
                use_flash(block, shards)
            else:
                use_whole(block, How(shards, self._kept))

    def _shards(self, images: Axes, heads: Axes = ()) -> Shards:
        """Return how kernels are called where images and heads are sharded along these axes."""
        return Shards(self._mesh, *partition_spec((images, heads)))

    def _over_domain(self) -> Ring:
        """Return how attention is computed among the devices that share an image."""

        def mark_parts(x: torch.Tensor) -> torch.Tensor:
            return self._mark(x, (self._shape.domain_batch_axes, *((),) * (x.dim() - 1)))

        def mark_tokens(x: torch.Tensor) -> torch.Tensor:
            return self._mark(x, self._shape.logical_spec("batch", "width", "tokens", "width"))

        shards = self._shards(self._shape.domain_batch_axes)
        flash = self._own.attention == "flash"
        products: PartProducts = FlashProducts(shards) if flash else PlainProducts()
        how = (self._shape.domain, products, mark_tokens, mark_parts)
        if self._sharding.domain_attention == "gather":
            return Gathered(*how, self._mark_images)
        return Ring(*how)

    def _fill(self, index: int, block: nn.Module) -> None:
        self._adapt(block)
        self._stack.fill(
            index, block, lambda name, values: self._send(values, self._block_spec(name, values))
        )
        block.to("meta")  # the host needs no second copy

    def _stacked_zeros(self, name: str, parameter: torch.Tensor, depth: int) -> nn.Parameter:
        spec = ((), *self._block_spec(name, parameter))
        shape = torch.Size((depth, *parameter.shape))
        return self._keep(self._new_state(shape, spec), spec, parameter.requires_grad)

    def _new_state(
        self, shape: torch.Size, spec: Spec, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Make zeros on the devices, for stacked parameters and AdamW."""
        return self._mark(torch.zeros(shape, dtype=dtype, device=self._device), spec)

    def _keep(self, values: torch.Tensor, spec: Spec, trains: bool) -> nn.Parameter:
        """Make a parameter of values that lie on the devices as ``spec`` says."""
        parameter = nn.Parameter(values, requires_grad=trains)
        self._specs[parameter] = spec
        if self._shape.shard_count(spec) < self._shape.min_shards:
            self._replicated_bytes += parameter.nbytes
        outlives = self._run.config.data.grad_accum_steps > 1 or self._own.mark_step_every_n_blocks
        if trains and outlives:
            parameter.register_post_accumulate_grad_hook(self._shard_gradient)
        return parameter

    def _shard_gradient(self, parameter: torch.Tensor) -> None:
        """Shard a gradient that outlives its graph like its parameter.

        It is copied, so that it is no view that keeps its base alive.
        """
        assert parameter.grad is not None
        parameter.grad = self._mark(parameter.grad * 1, self._specs[parameter])

    def _gather(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name in self._in_int8:
            return weight  # the product rounds and gathers it
        whole = self._shape.unsharded_spec(weight.shape, self._tensor_dims.get(name))
        lower = self._sharding.precision == "bf16" and weight.dim() > 1
        used = torch.bfloat16 if lower else weight.dtype
        how = gather_in_fp8 if self._own.gather_dtype == "fp8" and weight.dim() > 1 else gather
        return how(weight, used, self._block_spec(name, weight), whole, self._mark)

    def _shard_root(self, model: nn.Module) -> nn.Module:
        self._place(model, {})
        convolve_by_product(model, self._mark_rows)
        if len(self._shape.axis_sizes) > 1 or self._shape.domain > 1:
            compute_with_whole(model, self._whole_in_root)
            after_forward(model, lambda logits: MarkBoth.apply(logits, self._mark_images))
        if self._shape.tensor > 1:
            self._drop_from_whole(model)
        return model

    def _drop_from_whole(self, model: nn.Module) -> None:
        """Let patches be dropped from whole images, though blocks shard their tokens.

        Where devices have unequal parts of them, XLA ends the process.
        """
        drop = getattr(model, "patch_drop", None)
        if not isinstance(drop, PatchDropout | PatchDropoutWithIndices):
            return
        forward = drop.forward

        def of_whole(x: torch.Tensor):
            found = forward(MarkBoth.apply(x, self._mark_images))
            if isinstance(found, torch.Tensor):
                return MarkBoth.apply(found, self._mark_images)
            kept, indices = found
            return MarkBoth.apply(kept, self._mark_images), indices

        drop.forward = of_whole

    def _lies_with_tokens(self, name: str, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter's entries, one for each token, are sharded as the tokens are."""
        if self._shape.domain == 1 or self._sharding.run_without_fsdp:
            return False
        named = name in self._run.model.token_parameters
        return named and parameter.shape[1] % self._shape.domain == 0

    def _whole_in_root(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Make a parameter whole, or, of one with an entry for each token, those of the tokens."""
        mark = self._mark_replicated
        if self._lies_with_tokens(name, parameter):
            mark = functools.partial(
                self._mark, spec=self._shape.logical_spec("width", "tokens", "width")
            )
        return MarkBoth.apply(parameter, mark)

    def _place(self, module: nn.Module, tensor_dims: dict[str, int]) -> None:
        """Send parameters that are not there yet to the devices, sharded or replicated."""
        for name, parameter in list(module.named_parameters()):
            if parameter.device.type == "xla":
                continue
            owner, _, key = name.rpartition(".")
            spec = self._spec(parameter.shape, tensor_dims.get(name))
            if self._lies_with_tokens(name, parameter):
                spec = self._shape.position_embedding_spec(parameter.shape)
            values = self._send(parameter.detach(), spec)
            placed = self._keep(values, spec, parameter.requires_grad)
            module.get_submodule(owner)._parameters[key] = placed

    def _block_spec(self, name: str, parameter: torch.Tensor) -> Spec:
        return self._spec(parameter.shape, self._tensor_dims.get(name))

    def _spec(self, shape: torch.Size, tensor_dim: int | None) -> Spec:
        if self._sharding.run_without_fsdp:
            return ((),) * len(shape)
        return self._shape.parameter_spec(shape, tensor_dim)

    def _mark(self, x: torch.Tensor, spec: Spec) -> torch.Tensor:
        xs.mark_sharding(x, self._mesh, partition_spec(spec))
        return x

    def _activations(self, dimensions: int, *last: str) -> Spec:
        """Return the spec of activations: the batch first, the last ones of the kinds given."""
        between: tuple[Axes, ...] = ((),) * (dimensions - 1 - len(last))
        return (*self._shape.logical_spec("batch"), *between, *self._shape.logical_spec(*last))

    def _mark_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Mark what lies between blocks, and between their halves: (batch, tokens, width)."""
        kinds = ("tokens between the halves of a block", "width")
        return self._mark(x, self._activations(x.dim(), *kinds))

    def _mark_kept(self, x: torch.Tensor) -> torch.Tensor:
        # Unmarked, the partitioner would exchange it between devices.
        if self._shape.tensor > 1:
            return self._mark_columns(x) if isinstance(self._kept, KeptResults) else x
        sizes = self._run.config.data.pass_size, self._run.model.sizes.num_tokens
        spec = self._shape.saved_activation_spec(x.shape, *sizes)
        return self._mark(x, spec) if spec else x

    def _mark_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Mark (batch, tokens, ..., features) of heads, or of an MLP's columns."""
        first, last = self._shape.logical_spec("batch", "tokens"), self._shape.logical_spec("heads")
        return self._mark(x, (*first, *((),) * (x.dim() - 3), *last))

    def _mark_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Mark (images, rows, ...)."""
        return self._mark(x, (*self._shape.logical_spec("batch", "tokens"), *((),) * (x.dim() - 2)))

    def _mark_images(self, x: torch.Tensor) -> torch.Tensor:
        """Mark what is whole for each image: features, logits."""
        return self._mark(x, self._activations(x.dim()))

    def _adapt(self, block: nn.Module) -> None:
        parts = self._shape.shard_count(self._shape.logical_spec("batch"))
        int8 = self._int8_marks if self._own.matmul == "int8" else None
        if int8:
            self._in_int8 = linear_weights(block)
        if self._shape.tensor > 1:
            marks = replace(self._tensor_marks(parts), int8=int8)
            shard_block(block, marks, self._kept, self._packed)
        elif self._scans:
            multiply_unfolded(block, kept=self._kept, parts=parts, int8=int8)
        elif self._shape.domain > 1:
            multiply_unfolded(block, functools.partial(self._gather, ""), parts=parts)

    def _tensor_marks(self, parts: int) -> Marks:
        shards = self._shards(*self._shape.logical_spec("batch", "heads"))
        return Marks(
            gather=lambda x: Gather.apply(x, x.dtype, self._mark_tokens, self._mark_rows),
            scatter=lambda x: Scatter.apply(x, self._mark_tokens, self._mark_rows),
            columns=lambda x: MarkBoth.apply(x, self._mark_columns),
            parts=parts,
            attention=sharded.choose(self._own.attention, shards, How(shards, self._kept)),
        )

    def _int8_marks(self, name: str) -> Int8Marks:
        """Return how numbers of a weight of a block are marked."""
        dim, whole = self._tensor_dims.get(name), self._shape.unsharded_spec
        return int8_marks(lambda n: self._spec(n, dim), lambda n: whole(n, dim), self._mark)

    def _send(self, values: torch.Tensor, spec: Spec, minibatch: bool = False) -> torch.Tensor:
        """Send values from the host to the devices, sharded."""
        sharding = Sharding(self._mesh, partition_spec(spec), minibatch=minibatch)
        return xm.send_cpu_data_to_device(values, self._device, sharding)[0]

    def _zeros_like(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._new_state(parameter.shape, self._specs[parameter], dtype)

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        # Marked, because results of a step are: an unmarked one would compile anew.
        return self._mark_replicated(values.to(self._device))

    def _mark_replicated(self, value: torch.Tensor) -> torch.Tensor:
        return self._mark(value, ((),) * value.dim())

    # -- a step -----------------------------------------------------------------------

    def put(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = (self._put(part) for part in batch)
        return images, labels

    def _batch_spec(self, dimensions: int) -> Spec:
        """Return the spec of images, whose rows lie as tokens do, or of labels."""
        spec = self._activations(dimensions)
        return (
            (*spec[:2], *self._shape.logical_spec("tokens"), *spec[3:]) if dimensions > 1 else spec
        )

    def _put(self, share: torch.Tensor) -> torch.Tensor:
        spec = self._batch_spec(share.dim())
        if xr.process_count() == 1:
            return self._send(share, spec)
        if self._host is None:
            return self._send(share, spec, minibatch=True)
        height = self._run.model.sizes.input_shape[1] if share.dim() > 1 else None
        return self._send(self._host.in_global_batch(share, height), spec)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return value  # the program's tensors are global

    sum = _mark_replicated  # global, too; and every host can read it

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, foreach=False)

    def _orthogonal(self, momenta: Momenta, how: Orthogonalize) -> list[torch.Tensor]:
        axes, devices = tuple(self._shape.axis_sizes), self._shape.devices
        return distributed(momenta, how, self._specs, axes, devices, self._mark)

    # -- state ------------------------------------------------------------------------

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _local_bytes(self, tensor: torch.Tensor) -> int:
        return local_bytes(tensor)

    def _to_host(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        value = on_host(tensor)
        packed = isinstance(value, ShardedTensor) and self._parts(name) > 0
        return plain_values(name, value, packed=packed)

    def _parts(self, name: str) -> int:
        """Return how many parts a parameter is packed of here, 0 if it is as in the plain model."""
        return self._packed.get(name_in_block(name) or "", 0)

    def _to_device(self, name: str, tensor: torch.Tensor, saved: list[torch.Tensor]) -> None:
        stacked = is_stacked(name) and tensor.dim() > 0  # AdamW's step is one for all blocks
        sharded = [each for each in saved if isinstance(each, ShardedTensor)]
        if not sharded:  # on one device, or replicated
            values = torch.stack(saved) if stacked else saved[0]
            replicated = self.constant(values)
            with torch.no_grad():  # (torch_xla's _replace_xla_tensor is undone by the next sync)
                tensor.copy_(replicated)
            return
        target = xs.XLAShardedTensor(tensor.detach())
        shards: list[xs.XLAShard] = target.local_shards
        for shard in shards:
            indices, packed = shard.indices, self._parts(name)
            shard.data = device_part(sharded, indices, stacked=stacked, packed=packed)
        target.load_local_shards_(shards)
