"""Measures the seconds of each step in which this process computes and waits for no other one."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_fsdp.devices import Device, Mark

_MOST = 64
"""The most steps that wait for a caller who asks late, or never."""


class BlockClock:
    """Measures the forward and backward passes of a model's blocks, which are most of a step.

    FSDP gathers a block's weights before its pass and reduces gradients after it, so inside of one
    no process waits for another (but for those that share an image, ``--mesh_domain``). Hooks
    that are registered after FSDP's run inside of them.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: Device) -> None:
        self._device = device
        self._spans: list[tuple[Mark, Mark]] = []
        """Of the step that runs now: where each pass of a block starts and ends."""
        self._steps: deque[list[tuple[Mark, Mark]]] = deque(maxlen=_MOST)
        self._before: tuple[Mark, torch.Tensor] | None = None
        for block in blocks:
            block.register_forward_pre_hook(self._starts)
            block.register_forward_hook(self._ended)

    def _starts(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._before = (self._device.mark(), inputs[0]) if block.training else None

    def _ended(self, block: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        if self._before is None:
            return
        (started, x), self._before = self._before, None
        self._spans.append((started, self._device.mark()))
        if not (x.requires_grad and output.requires_grad):
            return  # it has no backward pass, or the first one of a frozen part
        backward: list[Mark] = []
        output.register_hook(lambda _: backward.append(self._device.mark()))
        x.register_hook(lambda _: self._spans.append((backward[-1], self._device.mark())))

    def end_step(self) -> None:
        """End a step: what follows is of the next one."""
        self._steps.append(self._spans)
        self._spans = []

    def take(self) -> list[float]:
        """Return the seconds of the steps, in order, that are known by now, each once."""
        found = []
        while self._steps:
            seconds = self._device.seconds_of(self._steps[0])
            if seconds is None:
                break
            self._steps.popleft()
            found.append(seconds)
        return found
