"""The backends with nothing behind their tensors: they record a step and keep its graphs."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch
from torch import nn

from data.loading.loader import Batch
from training.backend import InitializeModule
from training.mesh import Spec
from xla_fsdp.compile_only.recorder import Recorder
from xla_fsdp.nested import NestedBackend
from xla_fsdp.resolve_xla import XlaRun
from xla_fsdp.spmd import SpmdBackend
from xla_fsdp.xla_backend import XlaBackend


class TracingBackend(XlaBackend):
    """The part that both forms share: values are zeros never computed, then placeholders."""

    def __init__(self, run: XlaRun) -> None:
        self.recorder = Recorder()
        self._records = False
        self.before_backward: Callable[[torch.Tensor], None] | None = None
        """Is told of each loss, before its backward pass is recorded."""
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
    def _lay_out(self, batch: torch.Tensor) -> torch.Tensor:
        """Mark how a batch lies on the devices."""

    def put(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = (
            self._lay_out(torch.zeros(part.shape, dtype=part.dtype, device=self._device))
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
        return self.recorder.local_bytes([*self._named_parameters().values(), *state])


class TracingSpmdBackend(TracingBackend, SpmdBackend):
    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        def leave_on_meta(module: nn.Module, name: str) -> None: ...

        return super().shard(model, units, leave_on_meta)

    def _device_order(self) -> list[int]:
        return list(range(self._shape.devices))  # the compiler is told which is which

    def _send(self, values: torch.Tensor, spec: Spec, minibatch: bool = False) -> torch.Tensor:
        zeros = torch.zeros(values.shape, dtype=values.dtype, device=self._device)
        return self._mark(zeros, spec)

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device)  # small: real data, unmarked and so replicated

    def _lay_out(self, batch: torch.Tensor) -> torch.Tensor:
        return self._mark(batch, self._batch_spec(batch.dim()))


class TracingNestedBackend(TracingBackend, NestedBackend):
    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        def zeros(module: nn.Module, name: str) -> None:
            for part in module.modules():
                if any(each.is_meta for each in part.parameters(recurse=False)):
                    part.to_empty(device=self._device, recurse=False)

        return super().shard(model, units, zeros)

    def _lay_out(self, batch: torch.Tensor) -> torch.Tensor:
        return batch  # a process has its own
