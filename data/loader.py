"""Samplers and loaders: which images a process loads, in which order, with which loader processes.

- A sampler determines the images of each global batch and their order.
- A ``BatchLoader`` is what the training loop reads. ``DatasetLoader`` reads a dataset with loader
  processes. Each reads one part of a batch at a time, so several of them work on the first batch,
  and memory holds only the parts in flight. Lost processes are replaced.
"""

import contextlib
import errno
import gc
import itertools
import math
import mmap
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from multiprocessing.util import get_temp_dir
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

from data.batch import PADDING, BadImage, Batch, Fields, SampleIndex, collate, joined
from data.files import DataFolderError, reason_of

SizeOfBatch = Callable[[int, int], int]
"""The index of a batch's size, from the epoch and the batch's number in the epoch."""


# -- the order of the images -----------------------------------------------------------


class GlobalBatchSampler(Sampler[list[SampleIndex]]):
    """Divides the same sequence of global batches over any number of loading processes.

    The order depends only on the seed and the epoch; each process loads its contiguous share of
    each global batch.

    With ``repeats``, each image is repeated consecutively with different draws, and the epoch has
    the same length as before, like timm's ``RepeatAugSampler`` when all samples are selected.
    Within a batch all first repeats come first, then all second repeats, so that repeats of an
    image are on different devices if there are enough.

    With several sizes of images or crops, each batch has one size, ``size_of``.

    Training (``shuffle=True``) drops the last incomplete batch, like PyTorch/XLA's ViT-10B example.
    Evaluation pads it with ``PADDING``.
    """

    read_together = 1
    """Minimum number of consecutive images that one loader process should read."""

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        shard: int = 0,
        shards: int = 1,
        repeats: int = 1,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """``numbers``: without ``shuffle``, the images in order; None: all images from 0."""
        if batch_size % shards:
            raise ValueError(
                f"batch size {batch_size} is not divisible by the number of processes, {shards}"
            )
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed
        self.shard, self.per_shard = shard, batch_size // shards
        self.epoch, self.first_batch, self.repeats = 0, 0, repeats
        self.numbers = range(length) if numbers is None else numbers
        self.size_of: SizeOfBatch | None = None

    def set_position(self, epoch: int, first_batch: int = 0) -> None:
        """Start the next iteration at batch ``first_batch`` of ``epoch``."""
        self.epoch, self.first_batch = epoch, first_batch

    def __len__(self) -> int:
        """Return how many global batches an epoch has."""
        full, rest = divmod(self.length, self.batch_size)
        return full if self.shuffle else full + bool(rest)

    def generator(self) -> torch.Generator:
        """Return a random generator seeded only by the seed and the epoch."""
        seed = (self.seed * 1_000_003 + self.epoch) % 2**63  # the seeds that a generator accepts
        return torch.Generator().manual_seed(seed)

    def shuffled(self, generator: torch.Generator) -> torch.Tensor:
        """Return the image indices in a random order drawn only from ``generator``."""
        return torch.randperm(self.length, generator=generator)

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        repeats, first = self.repeats, self.shard * self.per_shard
        order = self.shuffled(self.generator()) if self.shuffle else self.numbers
        for number in range(self.first_batch, len(self)):
            places = range(number * self.batch_size, (number + 1) * self.batch_size)
            # A stable sort: within one repeat the order stays.
            by_repeat = sorted(places, key=lambda place: place % repeats)
            size = self.size_of(self.epoch, number) if self.size_of else 0
            samples: list[SampleIndex] = []
            for place in by_repeat[first : first + self.per_shard]:
                position, repeat = divmod(place, repeats)
                image = int(order[position]) if position < self.length else PADDING
                samples.append(SampleIndex(self.epoch * repeats + repeat, image, size))
            yield samples


WINDOW = 64
"""Number of groups whose runs ``RunSampler`` shuffles together."""


class RunSampler(GlobalBatchSampler):
    """Random order in which one read of a group serves several images.

    A group (a row group of a parquet file) can only be read whole. Groups are shuffled, and so are
    the images of each group, which are then split into runs of ``run_length`` images. The runs of
    each ``WINDOW`` consecutive groups are shuffled. The order does not depend on batches or
    processes.
    """

    def __init__(self, groups: Sequence[int], run_length: int, batch_size: int, **how: Any) -> None:
        """``groups``: number of images per group; images are numbered across all groups."""
        super().__init__(sum(groups), batch_size, **how)
        self._groups, self._run_length = groups, run_length
        # Runs are not aligned with the parts of processes: long parts cut few of them.
        self.read_together = max(run_length, 64)

    def shuffled(self, generator: torch.Generator) -> torch.Tensor:
        groups = self._groups
        firsts = torch.tensor([0, *groups]).cumsum(0)[:-1]
        order = torch.randperm(len(groups), generator=generator).tolist()
        shuffled = []
        for start in range(0, len(order), WINDOW):
            runs: list[torch.Tensor] = []
            for group in order[start : start + WINDOW]:
                rows = firsts[group] + torch.randperm(groups[group], generator=generator)
                runs += rows.split(self._run_length)
            shuffled += [runs[i] for i in torch.randperm(len(runs), generator=generator).tolist()]
        return torch.cat(shuffled)


# -- loaders ---------------------------------------------------------------------------


class BatchLoader(Protocol):
    """Provides batches of one process's share, epoch by epoch, from any position. Yielding the same
    tensors again tells the device side that nothing has to be copied."""

    prefetch_depth: int
    """Number of batches to load ahead of the step; 0 for a source that must not run
    concurrently."""

    @property
    def fields(self) -> Fields:
        """Return what a sample of a batch consists of."""

    def __len__(self) -> int:
        """Return how many global batches an epoch has."""

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch number ``epoch``, starting at ``first_batch``."""

    @property
    def workers(self) -> int:
        """Return the number of loader processes of this process."""

    def bad_images(self) -> list[BadImage]:
        """Return the unreadable images in this process's share found since the last call."""


@dataclass
class ConstantLoader:
    """Yields the same batch repeatedly, optionally with a different last batch of each epoch."""

    batches: int
    """Number of batches per epoch."""
    batch: Batch
    fields: Fields
    last: Batch | None = None
    prefetch_depth: int = 0
    workers: int = 0

    def __len__(self) -> int:
        return self.batches

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        for number in range(first_batch, self.batches):
            yield self.last if self.last and number + 1 == self.batches else self.batch

    def bad_images(self) -> list[BadImage]:
        return []


_MAX_PART = 64  # images that a loader process reads at a time
_MAX_WORKERS = 32
"""Upper limit of the default: at 1,000 images/s per worker, more than the chips of any host need so
far."""
_MAX_RESTARTS = 3
"""Number of times lost processes are replaced without loading a batch in between."""


def default_workers(processes: int) -> int:
    """Return the number of loader processes for each of the host's training ``processes``: one per
    usable core, minus one per training process."""
    cores = len(os.sched_getaffinity(0))
    return min(max(1, cores // processes - 1), _MAX_WORKERS)


class DatasetLoader:
    """Loads a map-style dataset (a ``Sample`` per ``SampleIndex``) with persistent loader
    processes."""

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, workers: int) -> None:
        self._dataset, self._sampler, self.workers = dataset, sampler, workers
        self.fields: Fields = dataset.fields  # type: ignore[attr-defined]
        # Without workers, transforms would share this process's random state with the step.
        self.prefetch_depth = 2 if workers else 0
        share_of_worker = min(-(-sampler.per_shard // max(workers, 1)), _MAX_PART)
        size = max(share_of_worker, sampler.read_together) if workers else sampler.per_shard
        self._parts = _Parts(sampler, min(size, sampler.per_shard))
        self._bad: dict[str, BadImage] = {}  # by path; filled in the thread that prefetches
        self._reported = 0
        """Number of them that ``bad_images`` has returned."""
        self._loader = self._start()

    def __len__(self) -> int:
        return len(self._sampler)

    def _start(self) -> DataLoader:
        if self.workers and multiprocessing.get_start_method() == "forkserver":
            # A backend selects this method if its threads may hold locks on which a forked process
            # would block. Loader processes are forked from the server, started here unless it is
            # running; like them, it must survive a signal that stops training.
            multiprocessing.set_forkserver_preload(["torchvision.transforms.v2"])  # with PyTorch
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # inherited
            resource_tracker.ensure_running()  # or the server starts it and unblocks SIGTERM
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            forkserver.ensure_running()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        collate: Any = _Sent if self.workers else lambda part: part
        return DataLoader(
            _PartDataset(self._dataset),
            sampler=self._parts,
            batch_size=None,  # the sampler yields parts of batches
            collate_fn=collate,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            worker_init_fn=_start_worker,
        )

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        next_batch, failures = first_batch, 0
        parts_per_batch = -(-self._sampler.per_shard // self._parts.size)
        while next_batch < len(self):
            self._sampler.set_position(epoch, next_batch)
            parts: list[Batch] = []
            try:
                for loaded in self._loader:
                    if isinstance(loaded, DataFolderError):
                        raise loaded
                    part, bad = loaded
                    for image in bad:
                        self._bad.setdefault(image[0], image)
                    parts.append(part)
                    if len(parts) < parts_per_batch:
                        continue
                    batch, parts = joined(parts), []
                    next_batch, failures = next_batch + 1, 0
                    yield batch
            except (RuntimeError, OSError, EOFError) as error:  # as the DataLoader raises them
                if self.workers and isinstance(error, OSError) and error.errno in _EXHAUSTED:
                    raise _transfer_error(error) from None
                failures += 1
                if not self.workers or failures > _MAX_RESTARTS:
                    raise
                tqdm.write(
                    f"warning: a loader process died, restarting all {self.workers}: "
                    f"{str(error).splitlines()[0]}",
                    file=sys.stderr,
                )
                self._loader = self._start()

    def bad_images(self) -> list[BadImage]:
        images = list(self._bad.values())[self._reported :]
        self._reported += len(images)
        return images


_Part = tuple[Batch, list[BadImage]] | DataFolderError
"""A part of a batch with its unreadable images, or the reason why it cannot be loaded: an exception
raised in a loader process would wrap the message in a traceback."""


@dataclass
class _Parts(Sampler[list[SampleIndex]]):
    """Divides each batch of a sampler into consecutive parts of up to ``size`` images."""

    sampler: GlobalBatchSampler
    size: int

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        for batch in self.sampler:
            for first in range(0, len(batch), self.size):
                yield batch[first : first + self.size]


@dataclass
class _PartDataset(Dataset):
    """Reads parts of batches of a dataset of ``Sample``."""

    samples: Dataset

    def __getitem__(self, indices: list[SampleIndex]) -> _Part:
        try:
            if hasattr(self.samples, "__getitems__"):  # PyTorch's name for reading several at once
                samples = self.samples.__getitems__(indices)
            else:
                samples = [self.samples[index] for index in indices]
        except DataFolderError as error:
            return error
        fields, bad = zip(*samples, strict=True)
        return collate(fields), list(itertools.chain(*bad))


@dataclass
class _Sent:
    """What a loader process sends to its parent. The parent receives ``part``, or the reason why it
    cannot be sent: otherwise a queue thread would only print the error and the parent would wait
    forever.

    The tensors are in anonymous memory whose file descriptor is sent to the parent. PyTorch would
    put them in /dev/shm, which is small in containers (64 MB in Docker by default), and a process
    that writes to a full one is killed.
    """

    part: _Part

    def __reduce__(self) -> tuple[Callable, tuple]:
        if isinstance(self.part, DataFolderError):
            return DataFolderError, self.part.args
        batch, bad = self.part
        described: list[_Described] = []
        try:
            with open(os.memfd_create("batch"), "wb") as memory:
                for name, tensor in batch.items():
                    memory.seek(-(-memory.tell() // _ALIGNMENT) * _ALIGNMENT)
                    described.append((name, memory.tell(), tuple(tensor.shape), tensor.dtype))
                    memory.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                memory.flush()
                file = DupFd(memory.fileno())
        except Exception as error:  # noqa: BLE001 - sent to the parent, whatever it is
            return DataFolderError, _transfer_error(error).args
        return _receive, (file, described, bad)


_ALIGNMENT = 64
"""Tensors start at multiples of so many bytes, as PyTorch allocates them."""
_Described = tuple[str, int, tuple[int, ...], torch.dtype]
"""A field's name, the offset of its first byte, its shape and dtype."""


def _receive(file: Any, described: list[_Described], bad: list[BadImage]) -> _Part:
    with open(file.detach(), "rb+") as opened:
        memory = mmap.mmap(opened.fileno(), 0)
    batch = {}
    for name, offset, shape, dtype in described:
        if count := math.prod(shape):
            values = torch.frombuffer(memory, dtype=dtype, offset=offset, count=count)
        else:
            values = torch.empty(0, dtype=dtype)
        batch[name] = values.view(shape)
    return batch, bad


_EXHAUSTED = (errno.ENOSPC, errno.EMFILE, errno.ENFILE)
"""Errors that keep the parent from starting loader processes, or from receiving anything."""


def _transfer_error(error: Exception) -> DataFolderError:
    return DataFolderError(
        f"loader processes cannot send images to the training process ({reason_of(error)}): they "
        "need file descriptors (ulimit -n), a socket in the temporary folder, and some space in "
        "/dev/shm; provide these, or use --num_workers 0"
    )


def prepare_sockets() -> None:
    """Create the folder for the sockets through which loader processes send images; multiprocessing
    removes it when this process ends.

    Raises DataFolderError if sockets cannot be created: their paths are limited to 107 bytes on
    Linux.
    """
    try:
        path = f"{get_temp_dir()}/listener-12345678"  # as long as multiprocessing's names
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
        os.unlink(path)
    except OSError as error:
        raise DataFolderError(
            f"loader processes cannot create a socket ({reason_of(error)}): set TMPDIR to a "
            "writable folder with a short path, or use --num_workers 0"
        ) from None


def _start_worker(_worker_id: int) -> None:
    """Make a loader process ignore stop signals, and share its parent's memory: only the training
    process decides when to stop, and it needs the loader until its checkpoint is saved."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_on_parents_signal() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)

    def exit_with_parent() -> None:
        # PyTorch checks getppid(), which is the server's with "forkserver".
        parent.join()
        os._exit(1)

    gc.freeze()  # or a garbage collection would write to every object, and so copy its page
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for watch in (exit_on_parents_signal, exit_with_parent):
        threading.Thread(target=watch, daemon=True).start()


# -- prefetching: batches are put on the device while the current step runs -------------


_END = object()


def prefetch(
    batches: Iterator[Batch],
    put: Callable[[Batch], Any],
    depth: int,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> Generator[Any, None, None]:
    """Yield ``put(batch)`` for each batch; a thread puts up to ``depth`` batches ahead.

    If the source yields the same tensors again, they are put only once. An error of the source or
    of ``put`` is raised in place of its batch; ``failed`` is called with it immediately, in the
    thread, while earlier batches are still being consumed.

    Depth 0 uses no thread: for sources that compute in this process, whose random transforms share
    PyTorch's global generator with the model.
    """

    def put_batches() -> Iterator[Any]:
        last: Batch = {}
        on_device = None
        for batch in batches:
            if not last or any(batch[name] is not last[name] for name in batch):
                on_device, last = put(batch), batch
            yield on_device

    if depth == 0:
        yield from put_batches()
        return
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def work() -> None:
        source = itertools.chain(put_batches(), [_END])
        while not stop.is_set():
            try:
                item = next(source)
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
                failed(error)
                item = error
            while not stop.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.1)
                    break
            if item is _END or isinstance(item, BaseException):
                return

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
