"""How the tensors of an SPMD program are sharded over its mesh: specs, annotations and transfers.

Tensors are annotated directly instead of by torch_xla's SpmdFullyShardedDataParallel: the speed is
the same to within 5 % (docs/evidence/benchmarks.md), and parameters keep the plain model's names.
"""

from collections.abc import Callable, Sequence

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

from models.blocks import logical_axes, packed_parts
from models.rounding import from_bytes, round_to_bytes
from training.mesh import Axes, Spec, tensor_dims
from xla_fsdp.attention.kernel_calls import Shards
from xla_fsdp.hosts import device_order
from xla_fsdp.parallel_plan import XlaRun
from xla_fsdp.torch_xla_private import local_device_names, mark_sharding, op_sharding_arguments

# ------------------------------------------------------------------------------------------------
# Marks for the partitioner that hold in the backward pass too: on a value and on its gradient.


Mark = Callable[[torch.Tensor], torch.Tensor]
"""A function that marks for the partitioner how a tensor is sharded, and returns it."""
MarkAs = Callable[[torch.Tensor, Spec], torch.Tensor]
"""The same by a spec."""
NumberMarks = tuple[Spec, Spec, MarkAs]
"""The specs of a weight at rest and in a product, and what marks it."""


class Marked(torch.autograd.Function):
    """Some marks on a value, one after the other, and others on its gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, marks: Sequence[Mark], of_gradient: Sequence[Mark]):
        ctx.marks = of_gradient
        for mark in marks:
            x = mark(x * 1)
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        for mark in ctx.marks:
            grad = mark(grad * 1)
        return grad, None, None


def mark_both(x: torch.Tensor, mark: Mark) -> torch.Tensor:
    """Mark a value and its gradient alike."""
    return Marked.apply(x, [mark], [mark])


def gather(x: torch.Tensor, shard: Mark, whole: Mark) -> torch.Tensor:
    """Gather a sharded tensor, and scatter its gradient. Left to itself, the partitioner may
    compute with the shards and exchange activations, or reduce whole gradients."""
    return Marked.apply(x, [shard, whole], [shard])


def scatter(x: torch.Tensor, shard: Mark, whole: Mark) -> torch.Tensor:
    """Scatter a sum over devices, and gather its gradient."""
    return Marked.apply(x, [shard], [shard, whole])


# ------------------------------------------------------------------------------------------------
# Weights that are gathered in a number of a byte, with factors in fp32.


def mark_numbers(x: torch.Tensor, mark: MarkAs, *specs: Spec) -> torch.Tensor:
    """Mark numbers of a weight by its specs, one after the other, or factors: 1 in place of some of
    its sizes."""
    for spec in specs:
        x = mark(x * 1, tuple(a if n > 1 else () for n, a in zip(x.shape, spec, strict=True)))
    return x


class GatherInFp8(torch.autograd.Function):
    """As ``gather``, by specs, with numbers rounded to fp8, and a factor for each index along a
    sharded dimension: each device finds those of its part. The gradient is not rounded."""

    @staticmethod
    def forward(
        ctx, weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
    ) -> torch.Tensor:
        ctx.dtype, ctx.shard, ctx.mark = weight.dtype, shard, mark
        along = next((d for d, axes in enumerate(shard) if axes), 0)
        others = [d for d in range(weight.dim()) if d != along]
        numbers, factors = (
            mark_numbers(tensor, mark, shard, whole)
            for tensor in round_to_bytes(weight, torch.float8_e4m3fn, others)
        )
        return from_bytes(numbers, factors, used)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.mark(grad * 1, ctx.shard).to(ctx.dtype), None, None, None, None


# ------------------------------------------------------------------------------------------------
# The tensors of one model.


class MeshLayout:
    """Shards the tensors of one model: remembers the spec of each parameter that it has placed."""

    def __init__(self, run: XlaRun, device: torch.device) -> None:
        self._run, self._plan, self._device = run, run.plan, device
        self.mesh, factors = run.mesh, run.mesh.factor_sizes
        self.local_devices = {int(name.rpartition(":")[2]) for name in local_device_names()}
        """The numbers of this host's devices."""
        self.device_order = self._device_order()
        """The numbers of all devices, in the mesh's order."""
        self.xla_mesh = xs.Mesh(self.device_order, tuple(factors.values()), tuple(factors))
        self.specs: dict[torch.Tensor, Spec] = {}
        """By parameter."""
        self.replicated_bytes = 0
        """Of a device's parameters, those beyond what it would have with a shard for each device
        along "fsdp"."""
        dimensions = logical_axes(run.model.block) if self.mesh.tensor > 1 else {}
        self._tensor_dims, self.packed = tensor_dims(dimensions), packed_parts(dimensions)

    def _device_order(self) -> list[int]:
        mesh = self.mesh
        if not mesh.counts_by_host or mesh.devices == xr.addressable_runtime_device_count():
            return list(range(mesh.devices))
        local = self.local_devices if mesh.devices_a_part > 1 else ()
        return device_order(xr.global_runtime_device_attributes(), local)

    # -- parameters and other state: a block's by their names in the block ------------------

    def parameter_spec(self, name: str, shape: torch.Size) -> Spec:
        """Return the spec of a parameter at rest."""
        if not self._plan.fsdp:
            return ((),) * len(shape)
        if self._is_sharded_as_tokens(name, shape):
            return self.mesh.position_embedding_spec(shape)
        return self.mesh.parameter_spec(shape, self._tensor_dims.get(name))

    def sharded_by_factors(self, module: nn.Module) -> set[str]:
        """Return the names of parameters that only some factors of an axis shard."""
        return {
            name
            for name, parameter in module.named_parameters()
            if self.mesh.uses_factors(self.parameter_spec(name, parameter.shape))
        }

    def number_marks(self, name: str, shape: torch.Size) -> NumberMarks:
        """Return how a block's parameter is sharded at rest, and while the block computes."""
        whole = self.mesh.unsharded_spec(shape, self._tensor_dims.get(name))
        return self.parameter_spec(name, shape), whole, self.mark

    def int8_marks(self, name: str, shape: torch.Size) -> NumberMarks | None:
        """Return the marks of a block's weight, if its products are in int8."""
        return self.number_marks(name, shape) if self._plan.int8 else None

    def _is_sharded_as_tokens(self, name: str, shape: torch.Size) -> bool:
        if self.mesh.domain == 1 or not self._plan.fsdp:
            return False
        return name in self._run.model.token_parameters and shape[1] % self.mesh.domain == 0

    def place(self, module: nn.Module) -> None:
        """Send the parameters that are still on the host to the devices, sharded or replicated."""
        for name, parameter in list(module.named_parameters()):
            if parameter.device.type == "xla":
                continue
            owner, _, key = name.rpartition(".")
            spec = self.parameter_spec(name, parameter.shape)
            values = self.send(parameter.detach(), spec)
            placed = self._parameter(values, spec, trains=parameter.requires_grad)
            module.get_submodule(owner)._parameters[key] = placed

    def stacked_zeros(self, name: str, parameter: torch.Tensor, depth: int) -> nn.Parameter:
        """Return a parameter with room for one of all ``depth`` blocks: (depth, *shape)."""
        spec = ((), *self.parameter_spec(name, parameter.shape))
        values = self.zeros(torch.Size((depth, *parameter.shape)), spec, torch.float32)
        return self._parameter(values, spec, trains=parameter.requires_grad)

    def _parameter(self, values: torch.Tensor, spec: Spec, *, trains: bool) -> nn.Parameter:
        parameter = nn.Parameter(values, requires_grad=trains)
        self.specs[parameter] = spec
        shards, least = self.mesh.shard_count(spec), self.mesh.min_shards
        self.replicated_bytes += max(0, parameter.nbytes // shards - parameter.nbytes // least)
        return parameter

    def zeros(self, shape: torch.Size, spec: Spec, dtype: torch.dtype) -> torch.Tensor:
        return self.mark(torch.zeros(shape, dtype=dtype, device=self._device), spec)

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        """Put a small tensor whole on every device."""
        # Marked, because results of a step are: an unmarked one would compile anew.
        return self.mark_replicated(values.to(self._device))

    def send(self, values: torch.Tensor, spec: Spec, minibatch: bool = False) -> torch.Tensor:
        """Send values from the host to the devices, sharded."""
        sharding = Sharding(self.xla_mesh, self._partition_spec(spec), minibatch=minibatch)
        return xm.send_cpu_data_to_device(values, self._device, sharding)[0]

    def gather(self, weight: torch.Tensor, name: str = "") -> torch.Tensor:
        """Gather a block's parameter before use, in the dtype that its products take. The weight of
        a linear layer needs its ``name`` only if "tensor" shards it."""
        is_matrix = weight.dim() > 1
        dtype = torch.bfloat16 if self._plan.bf16 and is_matrix else weight.dtype
        at_rest, whole, mark = self.number_marks(name, weight.shape)
        if self._plan.gather_fp8 and is_matrix:
            return GatherInFp8.apply(weight, dtype, at_rest, whole, mark)
        return gather(weight.to(dtype), lambda x: mark(x, at_rest), lambda x: mark(x, whole))

    def gather_around_blocks(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Gather a parameter before use: a small one, or one that only some factors of an axis
        shard. One with an entry a token stays sharded as these."""
        if self._is_sharded_as_tokens(name, parameter.shape):
            spec = self.mesh.logical_spec("width", "tokens", "width")
            return mark_both(parameter, lambda x: self.mark(x, spec))
        at_rest = self.parameter_spec(name, parameter.shape)
        if self.mesh.uses_factors(at_rest):
            return gather(parameter, lambda x: self.mark(x, at_rest), self.mark_replicated)
        return mark_both(parameter, self.mark_replicated)

    # -- marks on activations -----------------------------------------------------------

    def mark(self, x: torch.Tensor, spec: Spec) -> torch.Tensor:
        """Mark for the partitioner how ``x`` is sharded; returns it."""
        mark_sharding(x, self.xla_mesh.get_op_sharding(self._partition_spec(spec)))
        return x

    def activation_spec(self, dimensions: int, *logical_axes: str) -> Spec:
        """Return the spec of (images, ...), with these logical axes after the images'."""
        spec = self.mesh.logical_spec("batch", *logical_axes)
        return (*spec, *((),) * (dimensions - len(spec)))

    def mark_replicated(self, x: torch.Tensor) -> torch.Tensor:
        return self.mark(x, ((),) * x.dim())

    def mark_images(self, x: torch.Tensor) -> torch.Tensor:
        """Mark (images, ...) of which each device has whole images: features, logits."""
        return self.mark(x, self.activation_spec(x.dim()))

    def mark_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Mark (images, rows, ...), the rows of pixels or tokens sharded along "domain"."""
        return self.mark(x, self.activation_spec(x.dim(), "tokens"))

    def mark_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Mark (images, tokens, width) between blocks and between their halves."""
        return self.mark(x, self.activation_spec(x.dim(), "tokens between the halves of a block"))

    def mark_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Mark (images, tokens, ..., features): features of heads or of an MLP's columns."""
        spec = self.activation_spec(x.dim(), "tokens")
        return self.mark(x, (*spec[:-1], *self.mesh.logical_spec("heads")))

    def mark_saved(self, x: torch.Tensor) -> torch.Tensor:
        """Mark an activation that is saved for the backward pass."""
        # Unmarked, the partitioner would exchange it between devices.
        if self.mesh.tensor > 1:
            return self.mark_columns(x) if self._plan.grad_ckpt == "selective" else x
        images = self._run.config.data.global_micro_batch_size
        tokens = self._run.model.sizes.num_tokens
        spec = self.mesh.saved_activation_spec(x.shape, images, tokens)
        return x if spec is None else self.mark(x, spec)

    def shards(self, images: Axes, heads: Axes = ()) -> Shards:
        """Return the layout of a kernel's arguments: the mesh axes of images and of heads."""
        return Shards(self.xla_mesh, *self._partition_spec((images, heads)))

    # -- the mesh in torch_xla's terms: its axes are factors of the program's ------------

    def _partition_spec(self, spec: Spec) -> tuple:
        """Return a spec as torch_xla writes it: an axis, a tuple of axes or None for each
        dimension."""
        factors = self.mesh.in_factors(spec)
        return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in factors)


class Sharding(xs.ShardingSpec):
    """As torch_xla's, which mistakes a tensor sharded along some axes for one along all."""

    def __post_init__(self) -> None:
        (
            self._tile_assignment,
            self._group_assignment,
            self._replication_groups,
            self._sharding_type,
        ) = op_sharding_arguments(self.mesh, self.partition_spec)
