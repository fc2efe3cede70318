"""Backends without devices: they trace a step and save its graphs instead of running them."""

import abc
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch_xla
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from torch_xla.core.xla_builder import create_placeholder_tensor

from data.loader import Batch
from tools.compile_only.graphs import REPLICATED, Graph, Result, Value, tiles
from training.backend import InitializeModule
from training.mesh import Spec
from xla_fsdp import torch_xla_private as private
from xla_fsdp.layout import MeshLayout
from xla_fsdp.nested import NestedBackend
from xla_fsdp.resolve_xla import XlaRun
from xla_fsdp.spmd import SpmdBackend
from xla_fsdp.xla_backend import XlaBackend

# -- graphs of the program as torch_xla would hand them to the devices ---------------------


@dataclass(frozen=True)
class _Data:
    """A placeholder for data on the devices, and its sharding."""

    placeholder: torch.Tensor
    value: Value


class Recorder:
    """Saves the graphs of a step. What lives on after one is a placeholder in the next."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self._data: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._given: list[_Data] = []  # to the next graph, by those living and those dead by then

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
        graph = self._lower([same[0] for same in results], living)
        for number, (same, mark) in enumerate(zip(results, graph.results, strict=True)):
            self._replace(same, mark or Result(len(self.graphs), number))
        self.graphs.append(graph)
        self._given = self._data_behind(living)

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
        self._given.append(data)

    def _data_behind(self, living: list[torch.Tensor]) -> list[_Data]:
        """Return the data behind these tensors, once each however many of them show it."""
        found = (self._data[each] for each in living if each in self._data)
        return list({id(data): data for data in found}.values())

    def _lower(self, results: list[torch.Tensor], living: list[torch.Tensor]) -> Graph:
        hlo = private.hlo_proto(results)
        context = private.lowering_context("Step")
        context.build(results)

        def number(data: _Data) -> int:  # -1: not an argument
            return context.tensor_parameter_id(data.placeholder)

        arguments = {number(data): data.value for data in self._given}
        arguments.pop(-1, None)
        donated = {
            number(self._data[tensor]): index
            for index, tensor in enumerate(results)
            if tensor in self._data and number(self._data[tensor]) >= 0
        }
        resident = [data.value for data in self._data_behind(living) if number(data) < 0]
        marks = tuple(map(self.mark, results))
        return Graph(hlo, arguments, marks, donated, tuple(resident))


def _living() -> list[torch.Tensor]:
    """Return every tensor on XLA, in the order in which they were made."""
    found = []
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "xla":
            beside = (each._base, each.grad if each.is_leaf else None)  # may be known to C++ alone
            found += [each, *(other for other in beside if other is not None)]
    unique = {id(each): each for each in found}
    return sorted(unique.values(), key=private.recorded_number)


def _recorded(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors that are a graph so far and not data; those of one value together."""
    tensors = list(tensors)
    needed = private.need_computing(tensors)
    found: dict[int, list[torch.Tensor]] = {}
    for tensor, is_needed in zip(tensors, needed, strict=True):
        if is_needed:
            found.setdefault(private.recorded_number(tensor), []).append(tensor)
    return list(found.values())


# -- backends -----------------------------------------------------------------------------


class TracingBackend(XlaBackend):
    """The part that both forms share: values are zeros never computed, then placeholders."""

    def __init__(self, run: XlaRun) -> None:
        self.recorder = Recorder()
        self._records = False
        self.before_backward: Callable[[torch.Tensor], None] | None = None
        """Called with each loss, before its backward pass is recorded."""
        super().__init__(run)

    def start_recording(self) -> None:
        """Record from here on: model and optimizer are there, what follows is a step."""
        self.recorder.settle()
        self._records = True

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        if self.before_backward:
            self.before_backward(loss)
        super().backward(loss, is_last=is_last)

    def _break_graph(self, wait: bool = False) -> None:
        if self._records:
            self.recorder.break_graph()

    @abc.abstractmethod
    def _shard_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """Mark the sharding of a batch."""

    def put(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = (
            self._shard_batch(torch.zeros(part.shape, dtype=part.dtype, device=self._device))
            for part in batch
        )
        self.recorder.settle([images, labels])
        return images, labels

    def _devices(self) -> str:
        return f"{self.device_count} TPU device(s)"

    def local_state_bytes(self) -> int:
        """Return the bytes of parameters, of AdamW's state and of the EMA on one device."""
        state = [t for entry in self._optimizer.state.values() for t in entry.values()]
        state += self._ema.values.values() if self._ema is not None else []
        state += self._named_parameters().values()
        return sum(each.nbytes // tiles(self.recorder.mark(each) or REPLICATED) for each in state)


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

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        return super().shard(model, units, lambda module, name: None)  # all stays on meta

    def _shard_batch(self, batch: torch.Tensor) -> torch.Tensor:
        return self._layout.mark(batch, self._layout.batch_spec(batch.dim()))


class TracingNestedBackend(TracingBackend, NestedBackend):
    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        def zeros(module: nn.Module, name: str) -> None:
            for part in module.modules():
                if any(each.is_meta for each in part.parameters(recurse=False)):
                    part.to_empty(device=self._device, recurse=False)

        return super().shard(model, units, zeros)

    def _shard_batch(self, batch: torch.Tensor) -> torch.Tensor:
        return batch  # a process has its own
