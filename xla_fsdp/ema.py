"""The moving average of the weights (EMA) on XLA: a part of the step's one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from training.options.ema_config import EmaConfig
from training.updates.ema import exchanged_inside, weight_of_newest


class WeightAverage:
    """Keeps, in fp32, an average of each parameter, which lies on the devices as it does."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        zeros_like: Callable[[torch.Tensor], torch.Tensor],
        scalar: Callable[[float], torch.Tensor],
        config: EmaConfig,
    ) -> None:
        """Begin with the parameters' values. ``zeros_like`` gives zeros laid out like a parameter,
        ``scalar`` a device scalar."""
        self._parameters, self._config = dict(parameters), config
        self.values = {name: zeros_like(parameter) for name, parameter in parameters.items()}
        self.updates = scalar(0.0)
        """How many updates the average has seen."""
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Take the weights as they are now for the average."""
        for name, parameter in self._parameters.items():
            self.values[name].copy_(parameter * 1.0)  # the parameter itself would be shared

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Take up the weights of a step; of one that was ``skipped``, 1.0 and not 0.0, nothing."""
        takes = 1 - skipped
        self.updates.add_(takes)
        how = self._config
        weight = weight_of_newest(self.updates, how.model_ema_decay, warmup=how.model_ema_warmup)
        weight = weight * takes
        for name, parameter in self._parameters.items():
            average = self.values[name]
            average.copy_(_between(average, parameter, weight))

    def in_place_of_weights(self, exchanged: Callable[[], None]) -> AbstractContextManager[None]:
        """Let the model compute with the average inside. Nothing is copied, and no graph changes:
        parameter and average exchange the data on the devices that they stand for. ``exchanged`` is
        called when they have."""
        return exchanged_inside(self._exchange, exchanged)

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            average = self.values[name]
            parameter.data, average.data = average.data, parameter.data


def _between(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what ``torch.lerp`` does, exactly ``end`` where the weight is 1; torch_xla 2.9's own
    lerp rounds there."""
    way = end - start
    return torch.where(weight < 0.5, start + weight * way, end - way * (1 - weight))
