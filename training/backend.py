"""What the training loop asks of a backend: place the model, run steps, hand over state.

Each backend is one folder that implements ``Backend``. At the end: what a run requests of its data
source, and the loaders of what a backend puts on its devices.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import nn

from data.files import DataFolderError
from data.loader import Batch, BatchLoader, Share
from data.packing import PackRequest
from data.size_schedule import SizeSchedule
from data.source import ANY_CLASSES, CropRequest, DatasetRequest, DataSource
from models.config import crop_pairs
from training.errors import UsageError
from training.optimizers import Updates
from training.schedule import StepRates

if TYPE_CHECKING:
    from training.resolve import Run


InitializeModule = Callable[[nn.Module, str], None]
"""A function (module, name in the model) that allocates and fills a module on the meta device."""


def pass_seed(seed: int, pass_index: int, stream: int) -> int:
    """Return the dropout seed of one forward pass: a 56-bit hash of the run's seed, the pass's
    number and the stream that draws."""
    digest = hashlib.sha256(f"{seed}/{pass_index}/{stream}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


@dataclass(frozen=True)
class State:
    """A backend's tensors in a checkpoint, by names and shapes of the plain model.

    Each is whole, or a ``training.checkpoints.state.ShardedTensor`` of this process's part.
    Loading a checkpoint writes into them in place.
    """

    is_copy: ClassVar[bool] = False
    """Whether the tensors are copies on the host, which later steps do not change."""
    model: dict[str, torch.Tensor]
    """The weights by their names."""
    optimizer: dict[str, dict[str, torch.Tensor]] | None
    """By the weight's name: AdamW's "step", "exp_avg" and "exp_avg_sq", Lion's "exp_avg", Muon's
    "momentum_buffer"; only for trained weights. None if it was not asked for."""
    step: dict[str, torch.Tensor]
    """What else the next step depends on: tensors on the CPU, by names that the backend chooses."""
    ema: dict[str, torch.Tensor] | None = None
    """The moving average of the weights (EMA) by their names; None without one, or if it was not
    asked for. A backend that loads a state without it starts the average at the weights."""
    gram: dict[str, torch.Tensor] | None = None
    """The weights of a frozen model that follows the teacher, by their names; None without one. A
    backend that loads a state without it leaves that model as it is."""


class Backend(Protocol):
    """Places a plain model on devices and runs its steps there.

    Tensors that a backend returns live on the device; only ``read`` brings them to the host.
    """

    is_main: bool
    """Whether this process prints and writes the reports."""
    batch_shard: int
    """Which part of each global batch this process puts on its devices."""
    batch_shards: int
    """The number of such parts; several processes may share one, each with other rows."""
    image_rows: range
    """The rows of each image (slices of a volume) that this process puts on its devices."""
    shards: tuple[int, ...]
    """The shards of the state that this process holds, by numbers from 0 on: processes of other
    replicas that hold the same have the same numbers."""
    device_count: int
    teacher: nn.Module | None
    """The first model that ``shard_frozen`` has returned."""
    compiles: bool
    """Whether the first step of a kind takes long, because it is compiled."""

    def describe(self) -> str:
        """Return one line with the devices, sharding and precision chosen."""

    # Model and optimizer.

    def shard(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> nn.Module:
        """Fill, shard and place the model, one unit after the other; return the sharded model."""

    def shard_frozen(
        self,
        run: Run,
        model: nn.Module,
        initialize: InitializeModule,
        *,
        follows_teacher: bool = False,
    ) -> nn.Module:
        """Fill, shard and place ``model``, the model of ``run``, beside the trained one.

        It computes as in evaluation and has no optimizer. If the objective has a teacher, that is
        the first one, before ``build_optimizer``: then its parameters are the EMA of the trained
        ones, and so are part of ``state``. Those of others are not, but for one of the same model
        that ``follows_teacher``: ``copy_teacher`` changes it.
        """

    def copy_teacher(self) -> None:
        """Give the frozen model that follows the teacher the teacher's present weights."""

    def build_optimizer(self, updates: Updates, *, betas: tuple[float, float], eps: float) -> None:
        """Make the optimizer of the sharded model, with its state allocated. Parameters that are
        not in ``updates`` must have had ``requires_grad`` off in ``shard``."""

    # Data.

    def loader(
        self, open_share: Callable[[Share], BatchLoader], images: int, *, reads_rows: bool
    ) -> BatchLoader:
        """Open a loader of what ``put`` expects of global batches of ``images`` images.

        ``open_share`` opens one for a share of each batch; ``reads_rows``: it reads only the rows
        of an image that it is asked for.
        """

    def put(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy this process's share of a global batch to the devices: ``image_rows`` of its images,
        and their labels."""

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        """Put a small CPU tensor, whole, on every device."""

    # A step.

    def begin_pass(self, pass_index: int) -> None:
        """Seed dropout for this forward pass, from ``--seed`` and the number of passes since the
        start of training."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the loss's gradients; with ``is_last`` they are complete afterwards."""

    def optimizer_step(
        self, rates: StepRates, max_norm: float, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip to the global norm (0 or less: don't), update, clear gradients, end the step.

        ``loss`` is the step's, over all replicas. If it or the norm is not finite, weights and
        optimizer state stay unchanged on all replicas. Returns the norm before clipping, and the
        counts of steps skipped for that (``training.optimizers``) since the start of this process.
        """

    def end_step(self) -> None:
        """Send the recorded graph to the device; eager backends have nothing to do."""

    def ema_weights(self) -> AbstractContextManager[None]:
        """Inside, the model computes with the EMA of its weights (``RunConfig.averages``)."""

    # Values and waiting.

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over all replicas of a per-replica mean."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all replicas of a per-replica sum."""

    def read(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, list[float]]]:
        """Start to read the values of small tensors; blocks neither the device nor this thread."""

    def read_images(self, values: Mapping[str, torch.Tensor]) -> Future[dict[str, torch.Tensor]]:
        """Send the recorded graph to the device, and start to copy to the host what ``values`` have
        of the images that this process has put there, in their order.

        Each value has an entry for each image of a batch along dimension 0.
        """

    def wait(self) -> None:
        """Wait until the device is idle."""

    def barrier(self) -> None:
        """Wait until every process is here."""

    def largest_of_all(self, value: int) -> Callable[[], int]:
        """Start to find the largest value of all processes; return a function that waits for it."""

    # State of a checkpoint.

    def state(self, *, with_optimizer: bool = True) -> State:
        """Return the weights and, if asked for, all else that the next step depends on."""

    def load_state(self, state: State) -> None:
        """Continue from what ``state`` returned, after other values were read into it."""

    # Facts.

    def counters(self) -> dict[str, int]:
        """Return running counts worth logging: compilations, transfers, ..."""

    def compile_seconds(self) -> float:
        """Return the seconds of compilation so far; 0 where they are not known."""

    def own_seconds(self) -> list[float]:
        """Return of each step whose time is known by now, in order and each once, the seconds in
        which this process computed without waiting for another one. Never waits for the device.

        With one process there may be none.
        """

    def memory(self) -> dict[str, int]:
        """Return bytes of device memory (used, peak, limit); {} where the device reports none."""

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes on the first device of parameters, of optimizer state and, if there are
        any, of the EMA and the teacher."""

    def unit_roundoff(self) -> float:
        """Return the largest unit roundoff of the dtypes a step uses: of matrix products, summed
        gradients, unsharded weights and moments."""

    def peak_flops(self) -> float | None:
        """Return the peak FLOP/s of one device at this precision; None where it is unknown."""


# -- the data of a run -----------------------------------------------------------------------------


def dataset_request(
    run: Run, *, with_train: bool = True, labels: bool = True, augment: bool = True
) -> DatasetRequest:
    """Return what a run requests of its source of images; see ``DatasetRequest``.

    Without ``augment`` they may have any number of classes: nothing is trained.
    """
    sizes, objective = run.model.sizes, run.config.objective
    channels, *size = sizes.input_shape
    crops = None
    if augment and objective.objective == "dino":
        side = objective.local_crop_size
        crops = CropRequest(
            local_size=(side, side),
            local_number=objective.local_crops,
            global_scale=objective.global_crops_scale,
            local_scale=objective.local_crops_scale,
            grid=sizes.grid,  # type: ignore[arg-type]
            mask_ratio=objective.ibot_mask_ratio,
            pairs=tuple(crop_pairs(objective.crop_sizes)),
            gram_factor=objective.gram_crop_factor,
        )
    pack, data, packing = None, run.config.data, run.model.packing
    if packing:
        assert data.max_tokens_per_image is not None  # resolved
        pack = PackRequest(
            patch=packing.patch,
            prefix=packing.prefix,
            tokens=packing.tokens,
            images=packing.images,
            max_patches=data.max_tokens_per_image - packing.prefix,
            resize=data.resize_to_budget,
            side_scale=data.side_scale,
            drop_rate=run.model.settings["patch_drop_rate"],
        )
    return DatasetRequest(
        run.config.data,
        channels,
        tuple(size),
        sizes.num_classes if augment else ANY_CLASSES,
        run.config.seed,
        with_train=with_train,
        labels=labels,
        augment=augment,
        crops=crops,
        pack=pack,
    )


@contextlib.contextmanager
def data_errors_as_usage_errors() -> Iterator[None]:
    """Turn a folder that cannot be used, found by what reads data inside, into a UsageError."""
    try:
        yield
    except DataFolderError as error:
        raise UsageError(str(error)) from None


def train_loader(
    data: DataSource, backend: Backend, batch_size: int, sizes: SizeSchedule | None = None
) -> BatchLoader:
    """Return the loader of training images, of global batches of ``batch_size``; ``sizes``: of the
    images of each step."""
    open_share = functools.partial(data.train_loader, batch_size, sizes=sizes)
    return backend.loader(open_share, batch_size, reads_rows=data.reads_rows)


def val_loader(data: DataSource, backend: Backend, batch_size: int) -> BatchLoader:
    """Return the loader of validation images, of global batches of ``batch_size``."""
    open_share = functools.partial(data.val_loader, batch_size)
    return backend.loader(open_share, batch_size, reads_rows=data.reads_rows)
