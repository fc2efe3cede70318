"""The interface of a backend: place the model, run steps, give access to the state.

Each backend is a package that implements ``Backend``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from data.batch import Batch, BatchShard, Fields
    from data.loader import BatchLoader
    from training.optimizers import Updates
    from training.resolve import Run
    from training.schedule import StepRates


Tensors = Mapping[str, torch.Tensor]
ScanBody = Callable[[Tensors, Tensors], Tensors]
"""A function (state, given) -> next state, with the names, shapes and dtypes of the state."""
InitializeModule = Callable[[nn.Module, str], None]
"""A function (module, name in the model) that allocates and fills a module on the meta device."""


def micro_batch_seed(seed: int, micro_batch_index: int, stream: int) -> int:
    """Return the dropout seed of one forward pass: a 56-bit hash of the run's seed, the pass number
    and the random stream."""
    digest = hashlib.sha256(f"{seed}/{micro_batch_index}/{stream}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def evaluation_seed(seed: int, batch_index: int, stream: int) -> int:
    """Return the seed of the random numbers of one batch of an evaluation: the same in each
    evaluation, and none of training."""
    return micro_batch_seed(seed, -1 - batch_index, stream)


def scan_eagerly(body: ScanBody, state: Tensors, shared: Tensors, stacked: Tensors) -> Tensors:
    """``Backend.scan`` as a loop in Python."""
    for slices in zip(*stacked.values(), strict=True):
        state = body(state, {**shared, **dict(zip(stacked, slices, strict=True))})
    return state


@dataclass(frozen=True)
class StepInputs:
    """All that differs between two training steps."""

    first_micro_batch: int
    """The number of micro-batches before this step since the start of training."""
    micro_batches: list[Batch]
    """This process's part of each micro-batch, on the devices, with ``Objective.host_inputs``."""
    rates: StepRates
    rope_factors: torch.Tensor | None = None
    """``StepRates.rope_factors``, (2,), on the devices."""


@dataclass(frozen=True)
class State:
    """A backend's tensors in a checkpoint, with the names and shapes of the plain model.

    Each is a whole tensor, or a ``training.checkpoints.state.ShardedTensor`` with this process's
    part. Loading a checkpoint writes into them in place.
    """

    is_copy: ClassVar[bool] = False
    """Whether the tensors are copies on the host that later steps do not change."""
    model: dict[str, torch.Tensor]
    """The weights by name."""
    optimizer: dict[str, dict[str, torch.Tensor]] | None
    """By weight name: AdamW's "step", "exp_avg" and "exp_avg_sq", Lion's "exp_avg", Muon's
    "momentum_buffer"; only for trained weights. None if not requested."""
    step: dict[str, torch.Tensor]
    """What else the next step depends on: CPU tensors, under names that the backend chooses."""
    ema: dict[str, torch.Tensor] | None = None
    """The EMA of the weights by name; None without one, or if not requested. A backend that loads a
    state without it starts the EMA at the weights."""
    gram: dict[str, torch.Tensor] | None = None
    """The weights of a frozen model that follows the teacher, by name; None without one. A backend
    that loads a state without it leaves that model unchanged."""


class Profiler(Protocol):
    """Records what this process and its devices do between ``start`` and ``stop``."""

    folder: Path
    """Where ``stop`` writes."""

    def start(self) -> None: ...

    def step(self, number: int) -> AbstractContextManager:
        """Name what happens inside as a step of training."""

    def span(self, name: str) -> AbstractContextManager:
        """Name what this thread does inside; nothing, outside of ``start`` and ``stop``."""

    def stop(self) -> None:
        """Wait for the devices, and write what was recorded."""


class Backend(Protocol):
    """Places a plain model on devices and runs its steps there.

    Tensors that a backend returns live on the device; only ``read`` copies them to the host.
    """

    is_main: bool
    """Whether this process prints and writes the reports."""
    batch_shard: int
    """The index of the part of each global batch that this process puts on its devices."""
    batch_shards: int
    """The number of such parts. Several processes may share one, each with different rows."""
    image_rows: range
    """The rows of each image (slices of a volume) that this process puts on its devices."""
    shards: tuple[int, ...]
    """The numbers of the state shards that this process holds, from 0. Processes of other replicas
    that hold the same shards have the same numbers."""
    device_count: int
    teacher: nn.Module | None
    """The first model that ``shard_frozen`` returned."""
    compiles: bool
    """Whether the first step of each kind takes long because it is compiled."""
    epoch_loss: torch.Tensor
    """The sum of the losses since ``begin_epoch``, and the number of steps in it; steps that are
    not finite do not count."""

    def describe(self) -> str:
        """Return one line with the devices, sharding and precision chosen."""

    # Model and optimizer.

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        """Fill, shard and place the model, unit by unit; return the sharded model."""

    def shard_frozen(
        self,
        run: Run,
        model: nn.Module,
        initialize: InitializeModule,
        *,
        follows_teacher: bool = False,
    ) -> nn.Module:
        """Fill, shard and place ``model``, the model of ``run``, in addition to the trained one.

        It runs in evaluation mode and has no optimizer. If the objective has a teacher, the teacher
        is placed first, before ``build_optimizer``: its parameters are the EMA of the trained ones,
        and part of ``state``. The parameters of other frozen models are not part of it, except for
        one of the same model that ``follows_teacher``, which ``copy_teacher`` updates.
        """

    def copy_teacher(self) -> None:
        """Copy the teacher's current weights to the frozen model that follows it."""

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        """Create the optimizer of the sharded model and allocate its state. Parameters that are not
        in ``updates`` must have had ``requires_grad`` off in ``shard``."""

    # Data.

    def loader(
        self, open_shard: Callable[[BatchShard], BatchLoader], images: int, *, reads_rows: bool
    ) -> BatchLoader:
        """Open a loader of the shares that ``put`` expects, of global batches of ``images`` images.

        ``open_shard`` opens a loader for a share of each batch; ``reads_rows``: it reads only the
        requested rows of an image.
        """

    def put(self, batch: Batch, fields: Fields) -> Batch:
        """Copy this process's shard of a global batch to the devices, with ``image_rows`` of the
        tensors whose ``fields`` have rows. Tensors that are not among ``fields`` have none."""

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        """Replicate a small CPU tensor on every device."""

    # A step.

    def run_step(
        self, compute: Callable[[StepInputs], dict[str, torch.Tensor]], inputs: StepInputs
    ) -> dict[str, torch.Tensor]:
        """Return ``compute(inputs)``, which makes a whole training step by the methods below.

        A backend may record it once for each shape of the inputs and run what it has recorded in
        later steps: nothing but the inputs may differ between steps.
        """

    def begin_epoch(self) -> None:
        """Start ``epoch_loss`` anew."""

    def begin_micro_batch(self, micro_batch_index: int) -> None:
        """Seed dropout for this forward pass, from ``--seed`` and the number of passes since the
        start of training."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Accumulate the gradients of the loss; with ``is_last`` they are complete afterwards."""

    def optimizer_step(
        self, rates: StepRates, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip to the global norm (0 or less: no clipping), update, clear gradients, end the step.

        ``loss`` is the loss of the step, over all replicas. If the loss or the norm is not finite,
        weights and optimizer state stay unchanged on all replicas. Returns the norm before
        clipping, and the counts of steps skipped for this reason (``training.optimizers``) since
        this process started.
        """

    def end_step(self) -> None:
        """Send the recorded graph to the device; eager backends do nothing."""

    # An evaluation.

    def run_evaluation(self, compute: Callable[[Any], Any], inputs: Any, batch_index: int) -> Any:
        """Return ``compute(inputs)``, trees of tensors: what a model in evaluation mode makes of a
        batch. Random numbers inside follow from ``--seed`` and ``batch_index``, the number of
        batches before it in this evaluation.

        A backend may record it once for each ``compute`` and shape of the inputs and run what it
        has recorded: nothing but the inputs, the weights and random numbers may differ between
        calls.
        """

    def ema_weights(self) -> AbstractContextManager[None]:
        """Let the model compute with the EMA of its weights (``RunConfig.averages``) inside."""

    # Values and waiting.

    replicas_here: int
    """The number of replicas whose samples this process's tensors have: one, or all of them where
    tensors are global."""

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over all replicas of a per-replica mean."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all replicas of a per-replica sum."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all replicas, (replicas, ...), given those of the replicas here,
        (replicas_here, ...). No gradient passes through it."""

    def scan(self, body: ScanBody, state: Tensors, shared: Tensors, stacked: Tensors) -> Tensors:
        """Return the state after calling ``body`` for each slice along dimension 0 of ``stacked``,
        in order. A call is given what is ``shared``, and its slice. No gradient passes through it.

        A backend may compile one call for all. So ``body`` must be hashable, read no tensors but
        its arguments, and compute the same as any other that equals it.
        """

    def read(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, list[float]]]:
        """Start reading the values of small tensors, without blocking the device or this thread."""

    def read_images(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, torch.Tensor]]:
        """Send the recorded graph to the device, and start copying to the host the entries of
        ``values`` that belong to the images that this process has put there, in order.

        Dimension 0 of each value is the images of a batch.
        """

    def wait(self) -> None:
        """Wait until the device is idle."""

    def barrier(self) -> None:
        """Wait until every process has reached this call."""

    def all_reduce_max(self, value: int) -> Callable[[], int]:
        """Start computing the maximum over all processes; return a function that waits for it."""

    # State of a checkpoint.

    def state(self, *, with_optimizer: bool = True) -> State:
        """Return the weights and, if requested, everything else that the next step depends on."""

    def load_state(self, state: State) -> None:
        """Continue from ``state``, as returned by ``state()``, after values were loaded into it."""

    # Facts.

    def profiler(self, folder: Path) -> Profiler:
        """Return a profiler of this process, which writes into ``folder``. Must be called before
        the first step is recorded."""

    def counters(self) -> dict[str, int]:
        """Return running counts worth logging: compilations, transfers, ..."""

    def compile_seconds(self) -> float:
        """Return the seconds of compilation so far; 0 if unknown."""

    def local_compute_seconds(self) -> list[float]:
        """Return, for each step whose time has become known since the last call, in order, the
        seconds that this process computed without waiting for another one. Never waits for the
        device.

        With one process the list may be empty.
        """

    def memory(self) -> dict[str, int]:
        """Return bytes of device memory (used, peak, limit); {} if the device does not report
        them."""

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on the first device of parameters, of optimizer state and, if present,
        of the EMA and the teacher."""

    def local_parameters(self) -> Iterable[tuple[Sequence[str], int]]:
        """Return the number of elements on the first device, padding included, of each tensor that
        holds parameters, and the plain model's names of these: of one unit, or the same parameter
        of several units."""

    def unit_roundoff(self) -> float:
        """Return the largest unit roundoff of the dtypes that a step uses for matrix products,
        gradient sums, unsharded weights and moments."""

    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of one device at this precision; None if unknown."""
