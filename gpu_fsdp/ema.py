"""The moving average of the weights (EMA) on GPUs: of each process's own part of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from training.backend import State
from training.options.ema_config import EmaConfig
from training.updates.ema import UPDATES, exchanged_inside, weight_of_newest


class PartsAverage:
    """Keeps, in fp32, an average of each part, where the part is."""

    def __init__(self, parts: Mapping[str, torch.Tensor], config: EmaConfig) -> None:
        """Begin with the parts' values."""
        self._parts, self._config = dict(parts), config
        self.values = {name: part.detach().clone() for name, part in parts.items()}
        first = next(iter(self.values.values()))
        self.updates = torch.zeros((), device=first.device)
        """How many updates the average has seen."""

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Take up the weights of a step; of one that was ``skipped``, 1.0 and not 0.0, nothing.

        Nothing is read by the host, unless the parts are there (``--cpu_offload``).
        """
        takes = 1 - skipped.to(self.updates.device)
        self.updates.add_(takes)
        how = self._config
        weight = weight_of_newest(self.updates, how.model_ema_decay, warmup=how.model_ema_warmup)
        weight = weight * takes
        for name, average in self.values.items():
            average.lerp_(self._parts[name], weight)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all averages here."""
        return sum(average.nbytes for average in self.values.values())

    def added_to(self, state: State, view: Callable[[str, torch.Tensor], torch.Tensor]) -> State:
        """Return the state with the averages in it, each as ``view`` shows it by its name."""
        ema = {name: view(name, average) for name, average in self.values.items()}
        return replace(state, step=state.step | {UPDATES: self.updates.cpu()}, ema=ema)

    @torch.no_grad()
    def take(self, state: State) -> None:
        """Go on with the values that were read; where there were none, begin with the weights."""
        if state.ema is not None:
            self.updates.copy_(state.step[UPDATES])
            return
        for name, average in self.values.items():
            average.copy_(self._parts[name])

    def in_place_of_weights(self, exchanged: Callable[[], None]) -> AbstractContextManager[None]:
        """Let the model compute with the average inside; ``exchanged`` is called when the parts
        have other values. One part at a time is copied, so that there is room."""
        return exchanged_inside(self._exchange, exchanged)

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self.values.items():
            part = self._parts[name]
            weights = part.detach().clone()
            part.copy_(average)
            average.copy_(weights)
