"""Traces the program's own training step into graphs, without allocating the model.

The backend runs as in training, except that device data are placeholders and graphs are saved
instead of executed.
"""

import gc
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch_xla
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary
from torch_xla.core.xla_builder import create_placeholder_tensor

from data.batch import Batch, Fields
from models.spec import Units
from tools.compile_only.compiler import REPLICATED, Graph, Result, Step, Value, tiles
from tools.compile_only.placeholders import placeholder_batch
from training.backend import InitializeModule
from training.mesh import Spec
from training.objectives.registry import open_objective
from training.schedule import StepRates, rope_factors
from training.step import begin_step, forward_backward, put_micro_batches, shard_and_optimize
from xla_fsdp import torch_xla_private as private
from xla_fsdp.layout import MeshLayout
from xla_fsdp.nested import NestedBackend
from xla_fsdp.parallel_plan import XlaRun
from xla_fsdp.spmd import SpmdBackend
from xla_fsdp.xla_backend import XlaBackend

# -- graphs of the program as torch_xla would hand them to the devices ---------------------


class _Data(NamedTuple):
    """A placeholder for data on the devices, and its sharding."""

    placeholder: torch.Tensor
    value: Value


class Recorder:
    """Saves the graphs of a step. What lives on after one is a placeholder in the next."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self._data: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._inputs: list[_Data] = []
        """What the next graph may be given, by tensors living and dead by then."""

    def settle(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Treat these tensors (all, if not given) as data from here on, however they came about."""
        for same in _recorded(_living() if tensors is None else tensors):
            self._replace(same, self.mark(same[0]) or REPLICATED)

    def break_graph(self) -> None:
        """Save the graph of all living tensors that were computed since the last break."""
        living = _living()
        results = _recorded(living)
        # As after any execution: the next graph's collectives don't wait for this one's.
        private.forget_all_reduces(str(torch_xla.device()))
        if not results:
            return
        firsts = [same[0] for same in results]
        hlo = private.hlo_proto(firsts)
        context = private.lowering_context("Step")
        context.build(firsts)

        def argument(data: _Data) -> int:  # its number; -1: not an argument
            return context.tensor_parameter_id(data.placeholder)

        arguments = {argument(data): data.value for data in self._inputs}
        arguments.pop(-1, None)
        donated = {
            argument(self._data[tensor]): number
            for number, tensor in enumerate(firsts)
            if tensor in self._data and argument(self._data[tensor]) >= 0
        }
        resident = [data.value for data in self._data_behind(living) if argument(data) < 0]
        marks = tuple(map(self.mark, firsts))
        for number, (same, mark) in enumerate(zip(results, marks, strict=True)):
            self._replace(same, mark or Result(len(self.graphs), number))
        self.graphs.append(Graph(hlo, arguments, marks, donated, tuple(resident)))
        self._inputs = self._data_behind(living)

    def mark(self, tensor: torch.Tensor) -> str | None:
        """Return the sharding that the program gave a tensor, now or before a change in place."""
        marked = private.sharding_mark(tensor)
        if marked or tensor not in self._data:
            return marked or None
        known = self._data[tensor].value.sharding
        return known if isinstance(known, str) else None

    def _replace(self, same: list[torch.Tensor], sharding: str | Result) -> None:
        """Put a placeholder instead of the tensors of one value."""
        first = same[0]
        placeholder = create_placeholder_tensor(first.shape, first.dtype)
        data = _Data(placeholder, Value(placeholder.nbytes, sharding))
        shown = placeholder.clone()  # a mark on the placeholder itself would replace it
        for tensor in same:
            if tensor.numel() != tensor.shape.numel():  # a weight that FSDP has emptied so
                private.replace_value(tensor, shown)
            else:
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                    tensor.data = shown
            self._data[tensor] = data
        self._inputs.append(data)

    def _data_behind(self, living: list[torch.Tensor]) -> list[_Data]:
        """Return the data behind these tensors, once each however many of them show it."""
        behind = (self._data[tensor] for tensor in living if tensor in self._data)
        return list({id(data): data for data in behind}.values())


def _living() -> list[torch.Tensor]:
    """Return every tensor on XLA, in the order in which they were made."""
    living = []
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.device.type == "xla":
            # Two more that may be known to C++ alone.
            related = (tensor, tensor._base, tensor.grad if tensor.is_leaf else None)
            living += [tensor for tensor in related if tensor is not None]
    unique = {id(tensor): tensor for tensor in living}
    return sorted(unique.values(), key=private.recorded_number)


def _recorded(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors that are a graph so far and not data; those of one value together."""
    tensors = list(tensors)
    needed = private.need_computing(tensors)
    by_number: dict[int, list[torch.Tensor]] = {}
    for tensor, is_needed in zip(tensors, needed, strict=True):
        if is_needed:
            by_number.setdefault(private.recorded_number(tensor), []).append(tensor)
    return list(by_number.values())


# -- backends -----------------------------------------------------------------------------


class TracingBackend(XlaBackend):
    """The part that both forms share: values are zeros never computed, then placeholders."""

    def __init__(self, run: XlaRun) -> None:
        self.recorder = Recorder()
        self.records = False
        """Whether model and optimizer are there, and what follows is a step."""
        super().__init__(run)
        self._device_type = "TPU"  # for the description

    def _break_graph(self, wait: bool = False) -> None:
        if self.records:
            self.recorder.break_graph()

    def local_state_bytes(self) -> int:
        """Return the bytes of parameters, of AdamW's state and of the EMA on one device."""
        state = [t for entry in self._optimizer.state.values() for t in entry.values()]
        state += self._ema.values.values() if self._ema is not None else []
        state += self._named_parameters().values()
        return sum(t.nbytes // tiles(self.recorder.mark(t) or REPLICATED) for t in state)


class TracedLayout(MeshLayout):
    """The layout of values that are never computed."""

    def _device_order(self) -> list[int]:
        return list(range(self.mesh.devices))  # the compiler is told which is which

    def send(self, values: torch.Tensor, spec: Spec, minibatch: bool = False) -> torch.Tensor:
        return self.zeros(values.shape, spec, values.dtype)

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device)  # small: real data, unmarked and so replicated


class TracingSpmdBackend(TracingBackend, SpmdBackend):
    layout_class = TracedLayout

    def shard(self, model: nn.Module, units: Units, initialize: InitializeModule) -> nn.Module:
        return super().shard(model, units, lambda module, name: None)  # all stays on meta

    def put(self, batch: Batch, fields: Fields) -> Batch:
        placed = super().put(batch, fields)  # zeros, by the layout
        self.recorder.settle([*placed.values()])
        return placed


class TracingNestedBackend(TracingBackend, NestedBackend):
    def shard(self, model: nn.Module, units: Units, initialize: InitializeModule) -> nn.Module:
        def zeros(module: nn.Module, name: str) -> None:
            for part in module.modules():
                if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
                    part.to_empty(device=self._device, recurse=False)

        return super().shard(model, units, zeros)

    def put(self, batch: Batch, fields: Fields) -> Batch:
        placed = {
            name: torch.zeros(part.shape, dtype=part.dtype, device=self._device)
            for name, part in batch.items()
        }
        self.recorder.settle([*placed.values()])
        return placed


# -- the step ------------------------------------------------------------------------------


def trace_step(run: XlaRun, named: bool = False) -> Step:
    """Trace one step of ``run``, sharded as in training.

    ``named``: write into the graphs from which module of the model each operation comes.
    """
    backend = (
        TracingSpmdBackend if run.backend_config.xla_fsdp == "spmd" else TracingNestedBackend
    )(run)
    sharded = shard_and_optimize(run, backend)
    sharded.train()
    if named:
        backend.name_operations()

    data, optimizer = run.config.data, run.config.optimizer
    objective = open_objective(run, backend)
    batch, fields = placeholder_batch(run, backend, objective, "meta")

    backend.recorder.settle()
    backend.records = True
    micro_batches = put_micro_batches(backend, batch, fields, data.grad_accum_steps)
    rates = StepRates(optimizer.lr, rope_factors=rope_factors(run).at(0))
    begin_step(sharded, objective, backend, rates)

    # What autograd saves for the backward pass passes through Python: held by C++ alone, the
    # recorder would not find it where the graph breaks.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss = forward_backward(sharded, objective, backend, 0, micro_batches)
    outcome = backend.optimizer_step(rates, optimizer.clip_grad_norm, loss)
    del loss, outcome  # until here they live, and so are results
    return Step(
        graphs=backend.recorder.graphs,
        replicas=backend.batch_shards,
        state_bytes=backend.local_state_bytes(),
        description=backend.describe(),
    )
