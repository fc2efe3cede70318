"""The SPMD backend with placeholders for data: it records a step and hands out the graph."""

from __future__ import annotations

import argparse

import torch
import torch_xla
from torch import nn
from torch_xla.core.xla_builder import create_placeholder_tensor

from training.backend import InitializeModule
from xla_fsdp.compile_only.trace import StepGraph
from xla_fsdp.mesh import Spec
from xla_fsdp.spmd import SpmdBackend


class TracingBackend(SpmdBackend):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._placeholders: list[tuple[torch.Tensor, Spec]] = []
        self._argument_of: dict[torch.Tensor, int] = {}

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        def leave_on_meta(module: nn.Module, name: str) -> None: ...

        return super().shard(model, units, leave_on_meta)

    def _placeholder(self, shape: torch.Size, dtype: torch.dtype, spec: Spec) -> torch.Tensor:
        raw = create_placeholder_tensor(shape, dtype)
        self._placeholders.append((raw, spec))
        value = raw.clone()  # a mark on the placeholder itself would replace it
        self._argument_of[value] = len(self._placeholders) - 1
        return value

    def _devices(self) -> str:
        return f"{self.device_count} TPU device(s)"

    # -- what the SPMD backend does with data -------------------------------------------

    def _device_order(self) -> list[int]:
        return list(range(self.device_count))  # the compiler is told which is which

    def _send(self, values: torch.Tensor, spec: Spec, minibatch: bool = False) -> torch.Tensor:
        return self._placeholder(values.shape, values.dtype, spec)

    def _new_state(self, shape: torch.Size, spec: Spec) -> torch.Tensor:
        return self._placeholder(shape, torch.float32, spec)

    def _fill(self, index: int, block: nn.Module) -> None:
        """The stack is a placeholder already."""

    def _as_parameter(self, values: torch.Tensor) -> nn.Parameter:
        parameter = nn.Parameter(values)
        self._argument_of[parameter] = self._argument_of.pop(values)
        return parameter

    def _constant(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device)  # small: real data, unmarked and so replicated

    def _cut_graph(self, wait: bool = False) -> None:
        """Everything stays in one graph."""

    # -- the graph ----------------------------------------------------------------------

    def graph(self, reports: list[torch.Tensor]) -> StepGraph:
        """Everything a step leaves: parameters, AdamW's state, and the values it reports."""
        tensors: list[torch.Tensor] = []
        specs: list[Spec] = []
        replaced: dict[int, int] = {}  # placeholder to result
        for parameter in self._named_parameters().values():
            entry = self._optimizer.state[parameter]
            for tensor in (parameter, entry["exp_avg"], entry["exp_avg_sq"]):
                replaced[self._argument_of[tensor]] = len(tensors)
                tensors.append(tensor.detach())
                specs.append(self._specs[parameter])
            tensors.append(entry["step"])
            specs.append(())
        state_bytes = sum(map(self._bytes_of, tensors, specs))
        tensors += reports
        specs += [()] * len(reports)

        hlo = torch_xla._XLAC._get_xla_tensors_hlo_proto(tensors)
        context = torch_xla._XLAC.lowering.LoweringContext("Step")
        context.build(tensors)
        numbers = [context.tensor_parameter_id(raw) for raw, _ in self._placeholders]
        return StepGraph(
            hlo=hlo,
            arguments={n: s for n, (_, s) in zip(numbers, self._placeholders, strict=True)},
            results=specs,
            donated={numbers[i]: result for i, result in replaced.items()},
            state_bytes=state_bytes,
            mesh=self._shape,
            description=self.describe(),
        )

    def _bytes_of(self, tensor: torch.Tensor, spec: Spec) -> int:
        return tensor.nbytes // self._shape.parts(spec)
