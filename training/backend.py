"""Opens loaders of what a backend puts on its devices: some images, of each all rows or a few."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import nn

from data.loader import Batch, BatchLoader, Share
from data.source import DataSource
from training.optimizers import Updates

if TYPE_CHECKING:
    from training.resolve import Run


# ------------------------------------------------------------------------------------------------
# The interface that the loop asks of the hardware side; a backend is one folder that gives it.


InitializeModule = Callable[[nn.Module, str], None]
"""A function that allocates and fills a module on the meta device; it takes its name in the
model."""


def pass_seed(seed: int, pass_index: int, stream: int) -> int:
    """Return the dropout seed of one forward pass: a 56-bit hash of the run's seed, the pass's
    number and the stream that draws."""
    digest = hashlib.sha256(f"{seed}/{pass_index}/{stream}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


@dataclass(frozen=True)
class State:
    """Holds what a checkpoint keeps of a backend: tensors, by names and shapes of the plain model.

    Each is whole, or a ``training.checkpoints.state.ShardedTensor`` of this process's part. What
    a checkpoint holds is read into them in place.
    """

    is_copy: ClassVar[bool] = False
    """Whether the tensors are copies on the host, which the next steps leave as they are."""
    model: dict[str, torch.Tensor]
    """The weights by their names."""
    optimizer: dict[str, dict[str, torch.Tensor]] | None
    """By the weight's name: AdamW's "step", "exp_avg" and "exp_avg_sq", Lion's "exp_avg", Muon's
    "momentum_buffer"; only of weights that train. None if it was not asked for."""
    step: dict[str, torch.Tensor]
    """What else the next step depends on: tensors on the CPU, by names of the backend's own."""
    ema: dict[str, torch.Tensor] | None = None
    """The moving average of the weights by their names; None if there is none, or it was not asked
    for. Where a backend takes up a state without, its average begins with the weights."""


class Backend(Protocol):
    """Places a plain model on devices and runs its steps there.

    Tensors that a backend returns live on the device; reading one is ``read``'s job.
    """

    is_main: bool
    """Whether this process prints and writes the reports."""
    rank: int
    """Which part of the images of each global batch this process puts on its devices."""
    world_size: int
    """How many such parts there are; several processes may share one, each with other rows."""
    image_rows: range
    """The rows of each image, of a volume the slices, that this process puts on its devices."""
    device_count: int
    compiles: bool
    """Whether the first step of a kind takes long, because it is compiled."""

    def describe(self) -> str:
        """Return one line that says which devices, sharding and precision were chosen."""

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        """Fill, shard and place the model, one unit after the other."""

    def shard_frozen(self, run: Run, model: nn.Module, initialize: InitializeModule) -> nn.Module:
        """Fill, shard and place ``model``, that of ``run``, beside the one that is trained.

        It is to be used only: it has no optimizer and no EMA, and ``state`` knows nothing of it.
        To be called once at most.
        """

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        """Make what updates the sharded model, with its state allocated; parameters that are not
        in ``updates`` must have come to ``shard`` without ``requires_grad``."""

    def loader(
        self, open_share: Callable[[Share], BatchLoader], images: int, *, reads_rows: bool
    ) -> BatchLoader:
        """Open a loader of what ``put`` takes of global batches of ``images`` images.

        ``open_share`` opens one of a share of each batch; ``reads_rows``: it reads no more of an
        image than the rows that it is asked for.
        """

    def put(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy this process's share of a global batch to the devices: ``image_rows`` of its images,
        and their labels."""

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        """Put a small tensor of the CPU whole on every device."""

    def begin_step(self, pass_index: int) -> None:
        """Seed dropout for this forward pass: from ``--seed`` and the pass's number since the start
        of training, whatever ran before."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the loss's gradients; with ``is_last`` they are complete afterwards."""

    def optimizer_step(
        self, lr: float, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip to the global norm (0 or less: don't), update, drop gradients, end the step.

        ``loss`` is the step's, over all replicas. If it or the norm is not finite, weights and the
        optimizer's state stay as they are, on all replicas alike. Returns the norm before
        clipping, and the counts of steps skipped so (``training.optimizers``) since the
        start of this process.
        """

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Let the model compute with the moving average of its weights (``--model_ema``) inside."""

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over all replicas of a per-replica mean."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all replicas of a per-replica sum."""

    def end_step(self) -> None:
        """Hand what was recorded to the device; eager backends have nothing to do."""

    def wait(self) -> None:
        """Wait until the device is idle."""

    def read(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, list[float]]]:
        """Begin to read the values of small tensors, without stopping the device or this thread."""

    def state(self, *, with_optimizer: bool = True) -> State:
        """Hand over the weights and, if asked for, all else that the next step depends on."""

    def take(self, state: State) -> None:
        """Go on from what ``state`` gave, after other values were read into it."""

    def barrier(self) -> None:
        """Wait until every process is here."""

    def largest_of_all(self, value: int) -> Callable[[], int]:
        """Begin to find the largest value of all processes; return what waits for it."""

    def counters(self) -> dict[str, int]:
        """Return running counts worth logging: compilations, transfers, ..."""

    def memory(self) -> dict[str, int]:
        """Return bytes of device memory (used, peak, limit); {} where the device tells none."""

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on the first device of parameters, of optimizer state and, if there are
        any, of the EMA and the teacher."""

    def rounding(self) -> float:
        """Return by what share a number may be rounded in the coarsest numbers that a step uses: of
        matrix products, of gradients while they are summed, of gathered weights, of moments."""

    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of one device at this precision; None where it is unknown."""


# ------------------------------------------------------------------------------------------------


def train_loader(data: DataSource, backend: Backend, batch_size: int) -> BatchLoader:
    """Return the loader of training images, of global batches of ``batch_size``."""
    open_share = functools.partial(data.train_loader, batch_size)
    return backend.loader(open_share, batch_size, reads_rows=data.reads_rows)


def val_loader(data: DataSource, backend: Backend, batch_size: int) -> BatchLoader:
    """Return the loader of validation images, of global batches of ``batch_size``."""
    open_share = functools.partial(data.val_loader, batch_size)
    return backend.loader(open_share, batch_size, reads_rows=data.reads_rows)
