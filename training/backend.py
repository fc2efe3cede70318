"""What the loop asks of the hardware side. A backend is one folder that gives this."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from data.loader import Batch

InitializeModule = Callable[[nn.Module, str], None]
"""Allocates and fills a module that is on the meta device; takes its name in the model."""


def pass_seed(seed: int, pass_index: int, stream: int) -> int:
    """Of dropout in one forward pass: 56 bits from ``--seed``, its number, and who draws."""
    digest = hashlib.sha256(f"{seed}/{pass_index}/{stream}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


@dataclass(frozen=True)
class State:
    """What a checkpoint keeps of a backend: tensors, by their names and shapes in the plain model.

    Each is whole, or a ``training.shards.ShardedTensor`` of this process's part. What a checkpoint
    holds is read into them in place.
    """

    model: dict[str, torch.Tensor]
    """The weights by name."""
    optimizer: dict[str, dict[str, torch.Tensor]] | None
    """AdamW's "step", "exp_avg" and "exp_avg_sq" by the weight's name; None if not asked for."""
    step: dict[str, torch.Tensor]
    """What else the next step depends on, on the CPU, by names of the backend's own."""


class Backend(Protocol):
    """Places a plain model on devices and runs its steps there.

    Tensors that a backend returns live on the device; reading one is ``read``'s job.
    """

    is_main: bool
    """This process prints and writes the reports."""
    rank: int
    """Of this process among those that load data."""
    world_size: int
    """Processes that load data, each its share of the global batch."""
    device_count: int
    compiles: bool
    """The first step of a kind takes long, because it is compiled."""

    def describe(self) -> str:
        """One line: devices, sharding and precision that were chosen."""

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        """Fill, shard and place the model, one unit after the other."""

    def build_optimizer(
        self, *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        """AdamW over the sharded model, its state allocated."""

    def put(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """This process's share of a global batch, on the devices."""

    def begin_step(self, pass_index: int) -> None:
        """Seed dropout for this forward pass: from ``--seed`` and its number since the start
        of training, whatever ran before."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add to the gradients; ``is_last``: they are complete after this micro-batch."""

    def optimizer_step(
        self, lr: float, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip to the global norm (0 or less: don't), update, drop gradients, end the step.

        ``loss`` is the step's, over all replicas. If it or the norm is not finite, weights, moments
        and AdamW's counter stay as they are, on all replicas alike. Returns the norm before
        clipping, and the counts of steps skipped so (``training.skipped_steps``) since the start of
        this process.
        """

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Of a per-replica mean, over all replicas."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Of a per-replica sum, over all replicas."""

    def end_step(self) -> None:
        """Hand what was recorded to the device (nothing to do on eager backends)."""

    def wait(self) -> None:
        """Until the device is idle."""

    def read(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, list[float]]]:
        """Values of small tensors, without stopping the device or this thread."""

    def state(self, *, with_optimizer: bool = True) -> State:
        """Hand over the weights and, unless only these are wanted, what goes on from them."""

    def take(self, state: State) -> None:
        """Go on from a state that ``state`` gave and into which other values were read."""

    def barrier(self) -> None:
        """Until every process is here."""

    def largest_of_all(self, value: int) -> Callable[[], int]:
        """Begin to find the largest value of all processes, on the hosts; the result waits."""

    def counters(self) -> dict[str, int]:
        """Running counts worth logging: compilations, transfers, ..."""

    def memory(self) -> dict[str, int]:
        """Bytes of device memory (used, peak, limit), empty where the device tells none."""

    def state_bytes(self) -> dict[str, int]:
        """Bytes of parameters and of optimizer state on the first device."""

    def rounding(self) -> float:
        """By what share of it a number may be rounded, in the coarsest numbers that a step uses: of
        matrix products, and of gradients while they are summed."""

    def peak_flops(self) -> float | None:
        """Of one device at this precision, per second; None where unknown."""
