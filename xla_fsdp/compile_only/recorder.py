"""Graphs of the program as torch_xla would hand them to the devices, kept instead of run."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch_xla
from torch.utils.weak import WeakTensorKeyDictionary
from torch_xla.core.xla_builder import create_placeholder_tensor

from xla_fsdp.compile_only.graphs import REPLICATED, Graph

_XLAC = torch_xla._XLAC


@dataclass(frozen=True)
class _Value:
    """What stands for data on the devices."""

    placeholder: torch.Tensor
    sharding: str

    @property
    def local_bytes(self) -> int:
        return self.placeholder.nbytes // _tiles(self.sharding)


class Recorder:
    """Keeps the graphs of a step. What lives on after one is a placeholder in the next."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self._values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._given: list[_Value] = []  # to the next graph, by those living and those dead by then

    def settle(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """From here on these (all, if not given) are data, however they came about."""
        for tensor in _recorded(_living() if tensors is None else tensors):
            self._replace(tensor)

    def cut(self) -> None:
        """Keep the graph of all living tensors that were computed since the last cut."""
        living = _living()
        results = _recorded(living)
        # As after any execution: the next graph's collectives don't wait for this one's.
        _XLAC._set_all_reduce_token(str(torch_xla.device()), None)
        if not results:
            return
        self.graphs.append(self._lower(results, living))
        for tensor in results:
            self._replace(tensor)
        self._given = [self._values[each] for each in living if each in self._values]

    def local_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Of one device."""
        return sum(tensor.nbytes // _tiles(self._sharding(tensor)) for tensor in tensors)

    def _sharding(self, tensor: torch.Tensor) -> str:
        """What the program marked it with, now or before it was changed in place."""
        marked = _XLAC._get_xla_sharding_spec(tensor)
        known = self._values.get(tensor)
        return marked or (known.sharding if known else REPLICATED)

    def _replace(self, tensor: torch.Tensor) -> None:
        placeholder = create_placeholder_tensor(tensor.shape, tensor.dtype)
        value = _Value(placeholder, self._sharding(tensor))
        data = placeholder.clone()  # a mark on the placeholder itself would replace it
        if tensor.numel() != tensor.shape.numel():  # a weight that FSDP has emptied, in this way
            _XLAC._replace_xla_tensor(tensor, data)
        else:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.data = data
        self._values[tensor] = value
        self._given.append(value)

    def _lower(self, results: list[torch.Tensor], living: list[torch.Tensor]) -> Graph:
        hlo = _XLAC._get_xla_tensors_hlo_proto(results)
        context = _XLAC.lowering.LoweringContext("Step")
        context.build(results)
        numbers = {
            id(value): context.tensor_parameter_id(value.placeholder) for value in self._given
        }  # -1: not an argument
        given = [value for value in self._given if numbers[id(value)] >= 0]
        donated = {}
        for index, tensor in enumerate(results):
            value = self._values.get(tensor)
            if value is not None and numbers[id(value)] >= 0:
                donated[numbers[id(value)]] = index
        unused = (self._values[each] for each in living if each in self._values)
        return Graph(
            hlo=hlo,
            arguments={numbers[id(value)]: value.sharding for value in given},
            results=tuple(map(self._sharding, results)),
            donated=donated,
            argument_bytes=sum(value.local_bytes for value in given),
            resident_bytes=sum(v.local_bytes for v in unused if numbers[id(v)] < 0),
        )


def _living() -> list[torch.Tensor]:
    """Every tensor on XLA, in the order in which they were made."""
    found = []
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "xla":
            found.append(each)
            if each.is_leaf and each.grad is not None:  # may be known to C++ alone
                found.append(each.grad)
    unique = {id(each): each for each in found}
    return sorted(unique.values(), key=_XLAC._xla_get_tensor_id)


def _recorded(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that are a graph so far and not data."""
    tensors = list(tensors)
    needed = _XLAC._check_tensor_need_materialization(tensors)
    return [each for each, wanted in zip(tensors, needed, strict=True) if wanted]


def _tiles(sharding: str) -> int:
    """Over how many different parts a value is spread: 4 of {devices=[4,1]0,1,2,3}."""
    found = re.match(r"\{devices=\[([\d,]+)\]", sharding)
    if not found:
        return 1
    sizes = [int(size) for size in found[1].split(",")]
    return math.prod(sizes[:-1] if "last_tile_dim_replicate" in sharding else sizes)
