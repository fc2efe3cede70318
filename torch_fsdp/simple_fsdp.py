"""SimpleFSDP: sharding by functional collectives, so that a whole training step is one graph.

The model holds shards. The forward pass of a block gathers its parameters
(``_c10d_functional.all_gather_into_tensor``), and autograd reduce-scatters their gradients, as in
torchtitan's SimpleFSDP (arXiv 2411.00284). There are no hooks, streams or prefetching: with
--compile, ``step_graph.py`` traces forward, backward, clipping and update into one graph, in which
the device's compiler schedules collectives beside products. Blocks that are alike are a loop in it.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from models.initialize import cast_buffers
from models.patches import embed_by_product
from models.positions import PartOfPositions
from models.spec import Units
from torch_fsdp.attention import use_attention
from torch_fsdp.devices import Device
from torch_fsdp.domain import attend_over_processes, make_meshes, token_part
from torch_fsdp.orthogonalize import EqualExchange, Matrix, Orthogonalize
from torch_fsdp.parallel_plan import OUTER, SHARD, TorchRun
from torch_fsdp.products import multiply_rounded
from torch_fsdp.shards import Layout
from torch_fsdp.step_graph import StatelessRandom, StepGraphs
from torch_fsdp.tensor_parallel import Part, TensorGroup, Tokens, compute_part
from torch_fsdp.torch_backend import TorchBackend
from torch_fsdp.units import ScannedBlocks, Unit
from tpu_attention.choice import choose_mask
from training.backend import InitializeModule, StepInputs, evaluation_seed, micro_batch_seed
from training.checkpoints.state import Chunk, ShardedTensor

_c10d = torch.ops._c10d_functional

_MANY_IMAGES = 64
"""Of so many on a device, a convolution that makes patches is faster than a product on v5e and
v6e."""


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


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
