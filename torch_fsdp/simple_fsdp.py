"""SimpleFSDP: sharding by functional collectives, so that a whole training step is one graph.

The model holds shards. The forward pass of a block gathers its parameters
(``_c10d_functional.all_gather_into_tensor``), and autograd reduce-scatters their gradients, as in
torchtitan's SimpleFSDP (arXiv 2411.00284). There are no hooks, streams or prefetching: with
--compile, ``step_graph.py`` traces forward, backward, clipping and update into one graph, in which
the device's compiler schedules collectives beside products. Blocks that are alike are a loop in it.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from timm.layers import DropPath
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from models.blocks import drop_path_rates
from models.initialize import cast_buffers
from models.patches import embed_by_product
from models.positions import PartOfPositions
from models.rounding import from_bytes, round_to_bytes
from models.spec import Units
from torch_fsdp.attention import use_attention
from torch_fsdp.devices import Device
from torch_fsdp.domain import attend_over_processes, make_meshes, token_part
from torch_fsdp.orthogonalize import EqualExchange, Matrix, Orthogonalize
from torch_fsdp.parallel_plan import (
    OUTER,
    SHARD,
    TorchRun,
    selective_contexts,
    sharded_dim,
)
from torch_fsdp.products import ROUNDED, multiply_rounded
from torch_fsdp.scan import ScanWithRecomputation
from torch_fsdp.step_graph import StatelessRandom, StepGraphs
from torch_fsdp.tensor_parallel import Part, TensorGroup, Tokens, compute_part
from torch_fsdp.torch_backend import TorchBackend
from tpu_attention.choice import choose_mask
from training.backend import InitializeModule, StepInputs, evaluation_seed, micro_batch_seed
from training.checkpoints.state import Chunk, ShardedTensor

_c10d = torch.ops._c10d_functional

_MANY_IMAGES = 64
"""Of so many on a device, a convolution that makes patches is faster than a product on v5e and
v6e."""


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


@dataclass
class Unit:
    """A module whose parameters, except for those of units below it, are gathered together for its
    forward pass."""

    slots: list[tuple[nn.Module, str, Layout]]
    """The modules' entries that hold shards outside of a forward pass."""
    number: int
    forward: Callable[..., Any]
    """Of the plain module."""
    dtype: torch.dtype
    output_dtype: torch.dtype | None
    """What floating-point outputs are cast to."""
    barrier: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self._shards(), self._random(), args, kwargs)

    def _random(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return what begins the random numbers of a pass that starts; None outside of a trace."""
        if (random := StatelessRandom.of_trace) is None:
            return None
        return functools.partial(random.at, random.next_pass(self.number))

    def compute(
        self,
        shards: Sequence[Any],
        random: Callable[[], AbstractContextManager[None]] | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        return self._compute_with(self._gathered(shards), random, args, kwargs)

    def _gathered(self, shards: Sequence[Any]) -> list[Any]:
        return [
            values
            for shard, (_, _, layout) in zip(shards, self.slots, strict=True)
            for values in Gather.apply(shard, layout)
        ]

    def _compute_with(
        self,
        whole: Sequence[Any],
        random: Callable[[], AbstractContextManager[None]] | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        args, kwargs = _cast((args, kwargs), self.dtype)
        with self._in_place(whole), random() if random else nullcontext():
            output = self.forward(*args, **kwargs)
        return output if self.output_dtype is None else _cast(output, self.output_dtype)

    def _shards(self) -> list[Any]:
        return [module._parameters[key] for module, key, _ in self.slots]

    @contextlib.contextmanager
    def _in_place(self, whole: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the modules compute inside with ``whole`` parameters, as ``Gather`` gives them."""
        entries: list[tuple[dict[str, Any], str]] = []
        for module, key, layout in self.slots:
            entries.append((module._parameters, key))
            entries += [(module._buffers, name) for name in ROUNDED if layout.multiplied]
        outside = [tensors[key] for tensors, key in entries]
        for (tensors, key), values in zip(entries, whole, strict=True):
            tensors[key] = values
        try:
            yield
        finally:
            for (tensors, key), values in zip(entries, outside, strict=True):
                tensors[key] = values

    def recompute(self, mode: str, *, keeps_gathered: bool) -> Callable[..., Any]:
        """Return a function that recomputes activations in the backward pass, and gathers
        parameters again there, unless it ``keeps_gathered`` ones. ``mode``: "full" or
        "selective"."""

        how: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            random = self._random()
            weights = self._shards()
            run: Callable[..., Any] = self.compute
            if keeps_gathered:
                weights, run = self._gathered(weights), self._compute_with
            hidden: list[torch.Tensor] = []
            """In a recomputation: the arguments that are tensors, then the weights."""

            def compute(*args: Any, **kwargs: Any) -> Any:
                if not hidden:
                    return run(weights, random, args, kwargs)
                given = iter(hidden)
                args = tuple(next(given) if isinstance(x, torch.Tensor) else x for x in args)
                return run(list(given), random, args, kwargs)

            output = checkpoint(
                compute,
                *args,
                use_reentrant=False,
                preserve_rng_state=random is None,
                **how,
                **kwargs,
            )
            if random and output.requires_grad:
                inputs = [x for x in args if isinstance(x, torch.Tensor)]
                output.register_hook(functools.partial(self._hide, inputs, weights, hidden))
            return output

        return forward

    def _hide(
        self,
        inputs: list[torch.Tensor],
        weights: list[torch.Tensor],
        hidden: list[torch.Tensor],
        grad: torch.Tensor,
    ) -> torch.Tensor:
        """Fill ``hidden`` when the backward pass reaches the block.

        XLA would find that a recomputation computes what the forward pass did, and keep that
        instead. It can gather the weights before ``grad`` is there, but not compute with them.
        """
        grad, *late = self.barrier([grad, *inputs])
        hidden += [
            values.detach().requires_grad_(given.requires_grad)
            for values, given in zip(
                [*late, *self.barrier(weights)], [*inputs, *weights], strict=True
            )
        ]
        return grad


class _DropPath(DropPath):
    """timm's, with a probability to keep that is a tensor, another one in each round of a loop."""

    keep: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keep is None or not self.training:
            return super().forward(x)
        kept = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(self.keep)
        return x * (kept / self.keep).to(x.dtype)


class ScannedBlocks(nn.ModuleList):
    """Blocks that are alike, called once for all: in a traced step as one loop forward and one
    backward, which computes each block again from its input."""

    def __init__(
        self, blocks: Sequence[nn.Module], units: Sequence[Unit], device: Device, *, offloads: bool
    ) -> None:
        """``offloads``: keep the blocks' inputs in the host's memory."""
        super().__init__(blocks)
        self._units, self._device, self._offloads = units, device, offloads
        self._keep: list[torch.Tensor] = []
        self._drop_paths: list[_DropPath] = []
        """Those of the last block, as which all are computed."""
        for name, rates in drop_path_rates(blocks).items():
            module: Any = blocks[-1].get_submodule(name)
            self._keep.append((1 - torch.tensor(rates)).to(device.where))
            self._drop_paths.append(_DropPath(module.drop_prob, module.scale_by_keep))
            blocks[-1].set_submodule(name, self._drop_paths[-1])

    def forward(
        self,
        x: torch.Tensor,
        *,
        shared: Mapping[str, torch.Tensor] | None = None,
        stacked: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute what all blocks make of ``x``, (batch, tokens, width). Keyword arguments of
        each block are ``shared``, without a gradient, and its part of ``stacked`` along
        dimension 0."""
        shared, stacked = shared or {}, stacked or {}
        random = StatelessRandom.of_trace
        if random is None:
            for index, block in enumerate(self):
                own = {name: values[index] for name, values in stacked.items()}
                x = block(x, **shared, **own)
            return x
        first, last = self._units[0], self._units[-1]
        _, pass_ = random.next_pass(first.number)
        numbers = torch.arange(len(self), dtype=torch.int32, device=x.device) + first.number
        of_each: list[Any] = [numbers, *self._keep, *stacked.values()]
        layouts = [layout for *_, layout in last.slots]
        matrices: list[Sequence[Any]] = []
        vectors: list[torch.Tensor] = []
        for shards, layout in zip(
            zip(*(unit._shards() for unit in self._units), strict=True), layouts, strict=True
        ):
            if _is_gathered_once(layout):
                vectors += Gather.apply(torch.stack(shards), layout.of_several(len(shards)))
            else:
                # Whose gradients leave the loop in the dtype in which they are reduced.
                is_same = layout.held == layout.reduce_dtype
                matrices.append([x.to(layout.held) for x in shards] if is_same else shards)
        # One row for all of a block, of which a round of the loop takes one slice.
        joined = [torch.cat(vectors, dim=1).unbind()] if vectors else []
        sizes = [values.shape[1] for values in vectors]
        rows = [
            [values[index] for values in [*of_each, *joined, *matrices]]
            for index in range(len(self))
        ]
        # Shards in the dtype in which they are gathered, so that the rounds convert nothing.
        dtypes = [values.dtype for values in [*of_each, *vectors[:1]]]
        dtypes += [layout.held for layout in layouts if not _is_gathered_once(layout)]

        def compute(x: torch.Tensor, row: list[torch.Tensor]) -> torch.Tensor:
            given = iter(row)
            begin = functools.partial(random.at, (next(given), pass_))
            for module in self._drop_paths:
                module.keep = next(given)
            kwargs = {**shared, **{name: next(given) for name in stacked}}
            small = iter(next(given).split(sizes) if sizes else [])
            whole = [
                values
                for layout in layouts
                for values in (
                    [next(small)]
                    if _is_gathered_once(layout)
                    else Gather.apply(next(given), layout)
                )
            ]
            try:
                return last._compute_with(whole, begin, (x,), kwargs)
            finally:
                for module in self._drop_paths:
                    module.keep = None

        tensors = [x.to(first.dtype), *itertools.chain(*rows)]
        if not torch.is_grad_enabled():  # else the function would save what a backward pass needs
            tensors = [values.detach() for values in tensors]
        return ScanWithRecomputation.apply(compute, dtypes, self._device, self._offloads, *tensors)


def _is_gathered_once(layout: Layout) -> bool:
    """Return True for norms and biases, whose values of all blocks are small. In each round of a
    loop, their gradients would be all-reduces: a shard of them is no whole tile. These are not
    asynchronous, so they wait for all that the links still have to do."""
    return len(layout.shape) == 1


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _cast(tensors: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tensors
    )


class SimpleFsdpBackend(TorchBackend):
    def __init__(self, run: TorchRun, device: Device) -> None:
        super().__init__(run, device)
        # The axis "fsdp" of _mesh includes "tensor": where "tensor" shards nothing, it does.
        self._mesh, _, self._domain = make_meshes(run, device)
        self.shards = (self._mesh.get_local_rank(SHARD),)
        self._tensor = TensorGroup(run, device) if run.mesh.tensor > 1 else None
        self._layouts: dict[str, Layout] = {}
        """By names in the plain model."""
        self._graphs: StepGraphs | None = None
        self._evaluations: StepGraphs | None = None
        self._evaluated: Callable[[], Any] = lambda: None
        """What ``_evaluations`` are graphs of, as long as it exists."""
        self._form = "SimpleFSDP as data parallel (no sharding)"
        if self._zero:
            self._form = f"SimpleFSDP ZeRO-{self._zero}, one unit per block"
        if self._domain:
            self._form += f", {self._plan.domain_attention} attention over domain"
        if self._plan.compile == "step":
            self._graphs, self._evaluations = StepGraphs(device), StepGraphs(device)
            self._form += ", one graph per step"

    # -- model ------------------------------------------------------------------------

    def shard(self, model: nn.Module, units: Units, initialize: InitializeModule) -> nn.Module:
        return self.parallelize(model, units, initialize)

    def parallelize(
        self, model: nn.Module, units: Units, initialize: InitializeModule
    ) -> nn.Module:
        """Initialize the model unit by unit on the CPU, and copy this process's shards to the
        device."""
        plan = self._plan
        layouts: dict[nn.Parameter, Layout] = {}

        choose_mask(model, plan.attention)
        tokens = {stack: Tokens(self._tensor) for stack in self._run.model.stacks if self._tensor}

        # Domain parallelism: attention sees the tokens of all processes that share an image.
        if self._domain:
            attend_over_processes(model, plan, self._domain)

        # Each block: weights, attention, products, part of heads and columns,
        # shards, recomputation.
        blocks: dict[str, Unit] = {}
        for number, (name, block) in enumerate(units[:-1], 1):
            initialize(block, name)
            if not self._domain:
                use_attention(block, plan.attention)
            if plan.matmul:
                multiply_rounded(block)
            cast_buffers(block, plan.dtype)
            parts: Mapping[nn.Parameter, Part] = {}
            if self._tensor:
                parts = self._tensor.parts(block)
                of_stack = tokens[name.rpartition(".")[0]]
                compute_part(block, self._tensor, of_stack, plan.attention)
            unit = blocks[name] = self._unit(block, number, layouts, parts=parts)
            block.forward = unit  # whose gathered weights autograd keeps
            if plan.grad_ckpt != "none":
                block.forward = unit.recompute(plan.grad_ckpt, keeps_gathered=plan.zero == 2)
        if self._graphs:
            self._form += f", {self._scan_blocks(model, blocks)}"
        for stack, of_stack in tokens.items():
            stacked: Any = model.get_submodule(stack)
            is_one = isinstance(stacked, ScannedBlocks)
            of_stack.divide(*(stacked, stacked) if is_one else (stacked[0], stacked[-1]))
        self._form += ", weights gathered in fp8" if plan.gather_dtype else ""
        self._form += f", linear layers in {self._sharding.matmul}" if plan.matmul else ""

        # Around the blocks: embedding, norm, head. They stay gathered for the backward pass.
        initialize(model, "")
        if self._run.config.data.global_micro_batch_size < _MANY_IMAGES * self.batch_shards:
            embed_by_product(model)
        positions: Mapping[str, PartOfPositions] = {}
        if self._domain:
            first = torch.tensor([self._domain.first]).to(self._device.where)
            part = token_part(self._domain, first)
            positions = self._run.model.compute_on_part(model, part)
        model.forward = self._unit(model, 0, layouts, output_dtype=torch.float32)

        plain_names = {id(part.values): name for name, part in positions.items()}
        self._locals = {
            plain_names.get(id(shard), name): shard for name, shard in model.named_parameters()
        }
        self._layouts = {name: layouts[shard] for name, shard in self._locals.items()}
        self._sharded_alike = [(self._locals.keys(), [self._mesh.get_group(SHARD)])]
        return model

    def _scan_blocks(self, model: nn.Module, units: Mapping[str, Unit]) -> str:
        """Replace each stack of blocks by a loop over them, if it can be one; return how they are
        computed, for the line that describes a run."""
        spec, plan = self._run.model, self._plan
        why = spec.why_blocks_differ()
        if plan.grad_ckpt not in ("full", "offload"):
            why = f"--grad_ckpt {plan.grad_ckpt}"
        elif plan.zero == 2:
            why = "--zero_dp_strategy 2"
        if why:
            return f"blocks unrolled ({why})"
        for stack in spec.stacks:
            blocks = list(getattr(model, stack))
            of_stack = [units[f"{stack}.{index}"] for index in range(len(blocks))]
            offloads = plan.grad_ckpt == "offload"
            scanned = ScannedBlocks(blocks, of_stack, self._device, offloads=offloads)
            spec.put_blocks(model, stack, scanned)
        return "blocks as one loop"

    def _unit(
        self,
        module: nn.Module,
        number: int,
        layouts: dict[nn.Parameter, Layout],
        output_dtype: torch.dtype | None = None,
        parts: Mapping[nn.Parameter, Part] = MappingProxyType({}),
    ) -> Unit:
        """Shard what is not sharded yet in ``module``, and add its ``layouts``. ``parts``: those
        of parameters that tensor parallelism divides."""
        plan, where = self._plan, self._device.where
        shards: dict[nn.Parameter, nn.Parameter] = {}
        slots = []
        for part in module.modules():
            for key, buffer in part.named_buffers(recurse=False):
                part._buffers[key] = buffer.to(where)
            for key, whole in part.named_parameters(recurse=False):
                if whole in layouts:  # by a unit below
                    continue
                if whole not in shards:
                    tensor_part = parts.get(whole)
                    group, processes = self._group_of(tensor_part), self._mesh.size(1)
                    layout = Layout.of(
                        whole.shape,
                        group,
                        plan.dtype,
                        plan.reduce_dtype,
                        processes,
                        self._device,
                        tensor_part,
                    )
                    if number and whole.dim() > 1:
                        multiplied = plan.matmul is not None and type(part) is nn.Linear
                        rounded = plan.matmul if multiplied else plan.gather_dtype
                        layout = replace(layout, rounded=rounded, multiplied=multiplied)
                    shard = layout.shard(whole.detach(), group.rank()).to(where)
                    shards[whole] = nn.Parameter(shard, requires_grad=whole.requires_grad)
                    layouts[shards[whole]] = layout
                part._parameters[key] = shards[whole]
                slots.append((part, key, layouts[shards[whole]]))
        return Unit(
            slots,
            number,
            module.forward,
            plan.dtype,
            output_dtype,
            barrier=self._device.barrier,
        )

    def _group_of(self, part: Part | None) -> dist.ProcessGroup:
        """Return the processes that shard a parameter, or a part of one."""
        return self._tensor.same_parts if self._tensor and part else self._mesh.get_group(SHARD)

    # -- a step -----------------------------------------------------------------------

    def run_step(
        self, compute: Callable[[StepInputs], dict[str, torch.Tensor]], inputs: StepInputs
    ) -> dict[str, torch.Tensor]:
        if self._graphs is None:
            return compute(inputs)
        first, count = inputs.first_micro_batch, len(inputs.micro_batches)
        rates = {name: x for name, x in vars(inputs.rates).items() if isinstance(x, (int, float))}
        seeds = [
            micro_batch_seed(self._run.config.seed, index, self.batch_shard)
            for index in range(first, first + count)
        ]
        tensors = {
            "rates": self.constant(torch.tensor([*rates.values()])),
            "seeds": self._of_graph(seeds),
            "micro_batches": inputs.micro_batches,
            "rope_factors": inputs.rope_factors,
            "counts": (self._skipped, self.epoch_loss),
        }

        def step(tensors: Any) -> Any:
            self._seeds = dict(enumerate(tensors["seeds"].unbind(), first))
            self._skipped, self.epoch_loss = tensors["counts"]
            scalars = dict(zip(rates, tensors["rates"].unbind(), strict=True))
            values = compute(
                StepInputs(
                    first,
                    tensors["micro_batches"],
                    replace(inputs.rates, rope_factors=None, **scalars),
                    tensors["rope_factors"],
                )
            )
            return values, (self._skipped, self.epoch_loss)

        values, counts = self._graphs.run(step, tensors, key=tuple(rates))
        self._skipped, self.epoch_loss = counts
        return values

    def run_evaluation(self, compute: Callable[[Any], Any], inputs: Any, batch_index: int) -> Any:
        if self._evaluations is None:
            return super().run_evaluation(compute, inputs, batch_index)
        if compute is not self._evaluated():  # it may use other tensors
            self._evaluations.forget()
            self._evaluated = weakref.ref(compute)
        seed = evaluation_seed(self._run.config.seed, batch_index, self.batch_shard)

        def evaluation(tensors: Any) -> Any:
            assert StatelessRandom.of_trace is not None
            StatelessRandom.of_trace.begin(tensors["seeds"].squeeze())
            return compute(tensors["inputs"])

        tensors = {"seeds": self._of_graph([seed]), "inputs": inputs}
        return self._evaluations.run(evaluation, tensors)

    def _of_graph(self, seeds: Sequence[int]) -> torch.Tensor:
        """Return seeds as ``StatelessRandom`` takes them, on the device."""
        return self.constant(torch.tensor([seed % 2**31 for seed in seeds], dtype=torch.int32))

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        if StatelessRandom.of_trace:
            raise RuntimeError(
                "a compiled step cannot take values from the host where they are used: return them "
                "from Objective.host_inputs, or train with --fsdp fsdp2"
            )
        return super().constant(values)

    def begin_micro_batch(self, micro_batch_index: int) -> None:
        if random := StatelessRandom.of_trace:
            random.begin(self._seeds[micro_batch_index])
        else:
            super().begin_micro_batch(micro_batch_index)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        trained = [shard for shard in self._locals.values() if shard.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for shard, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                shard.grad = gradient if shard.grad is None else shard.grad + gradient

    def _collect_gradients(self) -> None:
        if (replicas := self._mesh.size(0)) == 1:
            return
        group = self._mesh.get_group(OUTER)
        for shard in self._locals.values():
            if shard.grad is not None:
                shard.grad = self._all_reduce(shard.grad, group=group) / replicas

    def _orthogonalizer(self, matrices: Mapping[str, Matrix], *, eps: float) -> Orthogonalize:
        group = self._mesh.get_group(SHARD)
        return EqualExchange([*matrices.values()], group, eps, self._device.where)

    # -- collectives ------------------------------------------------------------------

    def _all_reduce(
        self,
        values: torch.Tensor,
        op: Literal["sum", "max"] = "sum",
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        name = (group or _world()).group_name
        return _c10d.wait_tensor(_c10d.all_reduce(values, op, name))

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        world, values = _world(), values.detach().contiguous()
        gathered = _c10d.all_gather_into_tensor(values, world.size(), world.group_name)
        # Processes that compute with the same images follow one another.
        of_each = _c10d.wait_tensor(gathered).unflatten(0, (self.batch_shards, -1, len(values)))
        return of_each[:, 0].flatten(0, 1)

    # -- checkpoints ------------------------------------------------------------------

    def _after_load(self) -> None:
        """Do nothing: no unsharded weights outlive a forward pass."""

    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        layout = self._layouts[name]
        start, size = layout.range(self._group_of(layout.part).rank())
        offsets = [0] * len(layout.shape)
        offsets[layout.dim] = start
        chunks = [Chunk(tuple(offsets), values.narrow(layout.dim, 0, size))] if size else []
        if layout.part is None:
            return ShardedTensor(layout.shape, values.dtype, chunks)
        pieces = [piece for chunk in chunks for piece in layout.part.in_whole(chunk)]
        return ShardedTensor(layout.part.whole, values.dtype, pieces)
