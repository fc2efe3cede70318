"""Graphs of the program as torch_xla would hand them to the devices, kept instead of run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch_xla
from torch.utils.weak import WeakTensorKeyDictionary
from torch_xla.core.xla_builder import create_placeholder_tensor

from xla_fsdp import torch_xla_private as private
from xla_fsdp.compile_only.graphs import REPLICATED, Graph, Result, Value, tiles


@dataclass(frozen=True)
class _Data:
    """A placeholder for data on the devices, and how the data lies there."""

    placeholder: torch.Tensor
    sharding: str | Result

    @property
    def value(self) -> Value:
        return Value(self.placeholder.nbytes, self.sharding)


class Recorder:
    """Keeps the graphs of a step. What lives on after one is a placeholder in the next."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self._data: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._given: list[_Data] = []  # to the next graph, by those living and those dead by then

    def settle(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Take these tensors (all, if not given) for data from here on, however they came about."""
        for same in _recorded(_living() if tensors is None else tensors):
            self._replace(same, self._mark(same[0]) or REPLICATED)

    def break_graph(self) -> None:
        """Keep the graph of all living tensors that were computed since the last break."""
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
        self._given = self._data_of(living)

    @contextlib.contextmanager
    def seeing_saved_tensors(self) -> Iterator[None]:
        """Let Python, too, know what autograd saves here for the backward pass.

        Held by C++ alone, it would not be found where the graph breaks.
        """

        def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is):
            yield

    def local_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of these tensors on one device."""
        return sum(tensor.nbytes // tiles(self._mark(tensor) or REPLICATED) for tensor in tensors)

    def _mark(self, tensor: torch.Tensor) -> str | None:
        """Return the sharding that the program gave a tensor, now or before a change in place."""
        marked = private.sharding_mark(tensor)
        if marked or tensor not in self._data:
            return marked or None
        known = self._data[tensor].sharding
        return known if isinstance(known, str) else None

    def _replace(self, same: list[torch.Tensor], sharding: str | Result) -> None:
        first = same[0]
        placeholder = create_placeholder_tensor(first.shape, first.dtype)
        data = _Data(placeholder, sharding)
        shown = placeholder.clone()  # a mark on the placeholder itself would replace it
        for tensor in same:
            if tensor.numel() != tensor.shape.numel():  # a weight that FSDP has emptied so
                private.replace_value(tensor, shown)
            else:
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                    tensor.data = shown
            self._data[tensor] = data
        self._given.append(data)

    def _data_of(self, living: list[torch.Tensor]) -> list[_Data]:
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
        donated = {}
        for index, tensor in enumerate(results):
            if tensor in self._data and number(self._data[tensor]) >= 0:
                donated[number(self._data[tensor])] = index
        return Graph(
            hlo=hlo,
            arguments=arguments,
            results=tuple(map(self._mark, results)),
            donated=donated,
            resident=tuple(data.value for data in self._data_of(living) if number(data) < 0),
        )


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
    for tensor, wanted in zip(tensors, needed, strict=True):
        if wanted:
            found.setdefault(private.recorded_number(tensor), []).append(tensor)
    return list(found.values())
