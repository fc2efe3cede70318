"""Loads datasets with processes of its own, which read parts of batches and are replaced if lost.

A part is what one process reads at a time: so the first batch is not one process's work, and no
more is in memory than the parts on the way.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate
from tqdm import tqdm

from data.files import DataFolderError

# ------------------------------------------------------------------------------------------------
# Which part of each global batch one process loads.


@dataclass(frozen=True)
class Share:
    """Says which images of each global batch one process loads, and which rows of them.

    A row is a position along the first spatial axis: of an image's height, of a volume's slices.
    """

    rank: int = 0
    world_size: int = 1
    """The images are those of part ``rank`` of so many equal parts of each global batch."""
    rows: range | None = None
    """The rows of each image, next to each other; None: all of them."""
    loads: bool = True
    """Whether the images are read here. Where not, other processes hand them over: the batches
    hold no images and no labels, and there are as many of them."""
    of_host: int = 1
    """How many processes there are on this host, which share its cores."""

    def shape_of(self, batch_size: int, image_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the images that are loaded of a global batch of ``batch_size``."""
        channels, height, *others = image_shape
        count = batch_size // self.world_size if self.loads else 0
        return (count, channels, height if self.rows is None else len(self.rows), *others)


# ------------------------------------------------------------------------------------------------
# The interface by which the training loop reads any data source.


Batch = tuple[torch.Tensor, torch.Tensor]
"""A batch on the CPU: images (share, channels, rows, width), labels (share,) int64; of volumes
(share, channels, slices, height, width). Images are uint8, or fp32 that was normalised."""

BadImage = tuple[str, str, int]
"""The path of an image that cannot be read, the reason in one line, and its label."""

Sample = tuple[torch.Tensor, int, list[BadImage]]
"""An image, its label, and what was found to be broken on the way to it."""


class BatchLoader(Protocol):
    """Gives batches of one process's share, epoch by epoch, from any position.

    A source that gives the same tensor objects again tells the device side that
    nothing has to be copied.
    """

    prefetch_depth: int
    """How many batches to have ahead of the step; 0 for a source that must not run beside it."""

    def __len__(self) -> int:
        """Return how many global batches an epoch has."""

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """Yield the batches of the epoch numbered ``epoch`` from ``first_batch`` on."""

    @property
    def workers(self) -> int:
        """Return how many loader processes read for this process."""

    def bad_images(self) -> list[BadImage]:
        """Return what was found broken in this process's share since the last call."""


class EmptyLoader:
    """Gives batches without images, all the same: to a process that others hand its images."""

    prefetch_depth = workers = 0

    def __init__(self, batches: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Take how many ``batches`` an epoch has, and what a batch is: of 0 images."""
        self._batches = batches
        self._batch = torch.zeros(shape, dtype=dtype), torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._batches

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        for _ in range(first_batch, len(self)):
            yield self._batch

    def bad_images(self) -> list[BadImage]:
        return []


# ------------------------------------------------------------------------------------------------
# Decides which images make up each global batch, and which of them this process loads.


PADDING = -1
"""The index of an image that is not there, and the label that data sources give it."""


Key = tuple[int, ...]
"""What a dataset is asked for: epoch and image index; where there are buckets, the bucket's
number."""


class GlobalBatchSampler(Sampler[list[Key]]):
    """Divides the same sequence of global batches over any number of loading processes.

    The order depends on the seed and the epoch alone; a process takes its contiguous
    share of each global batch. So neither the number of processes nor a resume
    changes what a step trains on. Yields lists of (draw, image index): the number of the draw
    that augmentations follow from, which is the epoch.

    With ``repeats`` each image stands so many times in a row, each time with another draw, and the
    epoch, no longer than before, ends before it has been through all: timm's
    ``RepeatAugSampler`` with a selection of all that fit. Within a batch all first ones
    come first, then all second ones: so the repeats of an image are far from each other, on other
    devices where there are enough.

    Training (``shuffle=True``) drops the last short batch, as PyTorch/XLA's ViT-10B example does.
    Evaluation keeps it and fills it up with ``PADDING``, so shapes stay static and
    each image still counts once.
    """

    read_together = 1
    """How many images that follow each other one loader process had better read."""

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
    ) -> None:
        if batch_size % world_size:
            raise ValueError(f"batch size {batch_size} is not divisible by {world_size} processes")
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed
        self.rank, self.share = rank, batch_size // world_size
        self.epoch, self.first_batch, self.repeats = 0, 0, repeats

    def set_position(self, epoch: int, first_batch: int = 0) -> None:
        """Let the next iteration run through ``epoch`` from its batch ``first_batch`` on."""
        self.epoch, self.first_batch = epoch, first_batch

    def __len__(self) -> int:
        """Return how many global batches an epoch has."""
        full, rest = divmod(self.length, self.batch_size)
        return full if self.shuffle else full + bool(rest)

    def generator(self) -> torch.Generator:
        """Return a generator of random numbers that depend on the seed and the epoch alone."""
        seed = (self.seed * 1_000_003 + self.epoch) % 2**63  # what a generator takes
        return torch.Generator().manual_seed(seed)

    def shuffled(self, generator: torch.Generator) -> torch.Tensor:
        """Return the images' indices in random order, which ``generator`` alone decides."""
        return torch.randperm(self.length, generator=generator)

    def _order(self) -> torch.Tensor:
        if self.shuffle:
            return self.shuffled(self.generator())
        padding = torch.full((len(self) * self.batch_size - self.length,), PADDING)
        return torch.cat([torch.arange(self.length), padding])

    def __iter__(self) -> Iterator[list[Key]]:
        order, repeats = self._order(), self.repeats
        first = self.rank * self.share
        for batch in range(self.first_batch, len(self)):
            places = range(batch * self.batch_size, (batch + 1) * self.batch_size)
            # Stable: those of one repeat stay in their order. Of one, nothing changes.
            apart = sorted(places, key=lambda place: place % repeats)[first : first + self.share]
            yield [
                (self.epoch * repeats + place % repeats, int(order[place // repeats]))
                for place in apart
            ]


# ------------------------------------------------------------------------------------------------
# An order of images that lie in groups, such that a group is read for several images at once.
#
# Of a group (a row group of a parquet file) one image cannot be read without the others. In a
# random order of all images each one would cost the reading of a group, a hundred images or more.


WINDOW = 64
"""How many groups the images of one stretch of the order come from, mixed."""

_AT_LEAST = 64  # images that a loader process reads one after the other


def order_in_runs(
    groups: Sequence[int], run_length: int, generator: torch.Generator
) -> torch.Tensor:
    """Return a random order of the images of groups of so many images, numbered one after another.

    The groups are in random order, and the images of each; each is cut into runs of ``run_length``
    images (its last may be shorter), and the runs of ``WINDOW`` groups, which follow each other,
    are in random order again. It depends on the arguments alone, not on batches or processes.
    """
    firsts = torch.tensor([0, *groups]).cumsum(0)[:-1]
    order = torch.randperm(len(groups), generator=generator).tolist()
    found = []
    for start in range(0, len(order), WINDOW):
        runs: list[torch.Tensor] = []
        for group in order[start : start + WINDOW]:
            rows = firsts[group] + torch.randperm(groups[group], generator=generator)
            runs += rows.split(run_length)
        found += [runs[i] for i in torch.randperm(len(runs), generator=generator).tolist()]
    return torch.cat(found)


class RunSampler(GlobalBatchSampler):
    """Divides global batches over processes; in training their images are in ``order_in_runs``."""

    def __init__(self, groups: Sequence[int], run_length: int, batch_size: int, **how: Any) -> None:
        super().__init__(sum(groups), batch_size, **how)
        self._groups, self._run_length = groups, run_length
        # Runs do not begin where a process's part does: in a long part few of them are cut.
        self.read_together = max(run_length, _AT_LEAST)

    def shuffled(self, generator: torch.Generator) -> torch.Tensor:
        return order_in_runs(self._groups, self._run_length, generator)


# ------------------------------------------------------------------------------------------------


_MOST_IMAGES = 64  # of a part
_MOST_WORKERS = 32
"""That are chosen: at 1,000 images a second each, more than any host's chips take so far."""
_REPLACED = 3
"""How often in a row lost processes are replaced without a batch in between."""


def workers_of_host(processes: int) -> int:
    """Return how many loader processes each of so many training processes of a host should have.

    One a core that this process may use, but for one of each training process.
    """
    cores = len(os.sched_getaffinity(0))
    return min(max(1, cores // processes - 1), _MOST_WORKERS)


class DatasetLoader:
    """Loads a map-style dataset with worker processes that live for the whole run.

    The dataset gives a ``Sample`` for (epoch, image index), see ``GlobalBatchSampler``.
    """

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, workers: int) -> None:
        self._dataset, self._sampler, self.workers = dataset, sampler, workers
        # Without workers, transforms would share this process's random state with the step.
        self.prefetch_depth = 2 if workers else 0
        a_worker = min(-(-sampler.share // max(workers, 1)), _MOST_IMAGES)
        size = max(a_worker, sampler.read_together) if workers else sampler.share
        self._parts = _Parts(sampler, min(size, sampler.share))
        self._told: set[str] = set()
        self._bad: deque[BadImage] = deque()  # filled in the thread that prefetches
        self._loader = self._start()

    def __len__(self) -> int:
        return len(self._sampler)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        done, lost = first_batch, 0
        while done < len(self):
            try:
                for batch in self._batches(epoch, done):
                    done, lost = done + 1, 0
                    yield batch
            except (RuntimeError, OSError, EOFError) as error:  # as the DataLoader tells it
                lost += 1
                if not self.workers or lost > _REPLACED:
                    raise
                tqdm.write(
                    f"a loader process was lost, all {self.workers} are started anew: "
                    f"{str(error).splitlines()[0]}",
                    file=sys.stderr,
                )
                self._loader = self._start()

    def bad_images(self) -> list[BadImage]:
        return [self._bad.popleft() for _ in range(len(self._bad))]

    def _start(self) -> DataLoader:
        return DataLoader(
            _Loaded(self._dataset),
            sampler=self._parts,
            batch_size=None,  # the sampler's parts
            collate_fn=_as_it_is,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            worker_init_fn=_begin,
        )

    def _batches(self, epoch: int, first_batch: int) -> Iterator[Batch]:
        self._sampler.set_position(epoch, first_batch)
        parts: list[Batch] = []
        for loaded in self._loader:
            if isinstance(loaded, DataFolderError):
                raise loaded
            part, bad = loaded
            for image in bad:
                if image[0] not in self._told:
                    self._told.add(image[0])
                    self._bad.append(image)
            parts.append(part)
            if len(parts) == self._parts.a_batch:
                yield _joined(parts)
                parts = []


class _Parts(Sampler[list[Key]]):
    """Divides each batch of a sampler into parts of up to ``size`` images, one after the other."""

    def __init__(self, sampler: GlobalBatchSampler, size: int) -> None:
        self._sampler, self._size = sampler, size
        self.a_batch = -(-sampler.share // size)

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in self._sampler:
            for first in range(0, len(batch), self._size):
                yield batch[first : first + self._size]


class _Loaded(Dataset):
    """Gives parts of batches of a dataset of ``Sample``, with what was broken in them.

    A folder that cannot be used comes as a DataFolderError in a part's place: raised in a worker,
    its message would be wrapped in a traceback.
    """

    def __init__(self, samples: Dataset) -> None:
        self._samples = samples

    def __getitem__(self, keys: list[Key]) -> tuple[Batch, list[BadImage]] | DataFolderError:
        try:
            samples = [self._samples[key] for key in keys]
        except DataFolderError as error:
            return error
        images, labels = default_collate([(image, label) for image, label, _ in samples])
        return (images, labels), [entry for *_, bad in samples for entry in bad]


def _as_it_is(part: Any) -> Any:
    return part


def _joined(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    return images, labels


def _begin(_worker_id: int) -> None:
    """Let a loader process ignore the signals that stop training, and share its parent's memory.

    Ctrl-C and torchrun send them to all processes of the group, but only the training process
    decides to stop, and until its checkpoint is written it needs its loader.
    """
    gc.freeze()  # or a garbage collection would write to every object, and so copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told_by, args=(os.getppid(),), daemon=True).start()


def _end_when_told_by(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


# ------------------------------------------------------------------------------------------------
# Puts the next batches on the device while the current step runs.


_END = object()


def prefetch(
    batches: Iterator[Batch],
    put: Callable[[Batch], Any],
    depth: int,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> Generator[Any, None, None]:
    """Yield ``put(batch)`` for each batch; a thread puts up to ``depth`` of them ahead.

    If the source yields the same tensors again, they are put once. An error of the source or of
    ``put`` is raised here, in the place of its batch (torch_xla's ParallelLoader ends the epoch
    silently instead). ``failed`` is called with it at once, in the thread, while earlier batches
    are still to be used.

    Depth 0 uses no thread. It is for sources that compute in this process: their random
    transforms and the model share PyTorch's global generator.
    """

    def put_each() -> Iterator[Any]:
        last = on_device = None
        for batch in batches:
            if last is None or any(a is not b for a, b in zip(batch, last, strict=True)):
                on_device, last = put(batch), batch
            yield on_device

    if depth == 0:
        yield from put_each()
        return
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def offer(item: Any) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in put_each():
                offer(item)
                if stop.is_set():
                    return
            offer(_END)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            failed(error)
            offer(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
