"""From a dataset to batches: which images a process loads, in which order, and by which processes.

- A ``Share`` is the part of each global batch that one process loads.
- A sampler decides which images make up each global batch, and in which order.
- A ``BatchLoader`` is what the training loop reads. ``DatasetLoader`` reads a dataset with loader
  processes. Each reads one part of a batch at a time: so the first batch is not the work of one
  process, and no more is in memory than the parts in flight. Lost processes are replaced.
"""

import contextlib
import errno
import gc
import itertools
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

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

from data.files import DataFolderError, reason_of

PADDING = -1
"""The index of padding in place of an image, and the label that data sources give it."""

Key = tuple[int, ...]
"""What a dataset is indexed by: epoch and image index, and the number of the bucket, or of the size
of the batch's images or crops, if there are several; of sequences of images (``data/packing.py``),
epoch, images in the global batch, and the indices of the sequence's images."""

SizeOfBatch = Callable[[int, int], int]
"""The number of the size that a batch has, by the epoch and the batch's number in it."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""A batch on the CPU: images (share, channels, rows, width), of volumes (share, channels, slices,
height, width), of packed crops or sequences (share, bytes); labels (share,) int64, of sequences
(share, images). Images are uint8, or normalised fp32."""


def numbered(batch: Batch, first: int) -> Batch:
    """Return a batch with the images' numbers, from ``first`` on, in place of labels but
    padding."""
    images, labels = batch
    numbers = torch.arange(first, first + len(labels), dtype=labels.dtype)
    return images, torch.where(labels == PADDING, PADDING, numbers)


BadImage = tuple[str, str, int]
"""The path of an image that cannot be read, the reason in one line, and its label."""

Sample = tuple[torch.Tensor, int | list[int], list[BadImage]]
"""An image and its label, or a sequence of images and theirs, and the unreadable images that were
replaced."""


@dataclass(frozen=True)
class Share:
    """Which images of each global batch one process loads, and which of their rows: positions along
    the first spatial axis, an image's height, a volume's slices."""

    shard: int = 0
    shards: int = 1
    """The images are shard number ``shard`` of ``shards`` equal ones of each global batch."""
    rows: range | None = None
    """The contiguous rows of each image; None: all of them."""
    loads: bool = True
    """False: other processes hand over the images. The batches, as many, then hold no images."""
    of_host: int = 1
    """How many training processes share the cores of this host."""

    def shape_of(self, batch_size: int, image_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the images that are loaded of a global batch of ``batch_size``."""
        count = batch_size // self.shards if self.loads else 0
        if self.rows is None:
            return (count, *image_shape)
        channels, _, *others = image_shape
        return (count, channels, len(self.rows), *others)


# -- the order of the images -----------------------------------------------------------


class GlobalBatchSampler(Sampler[list[Key]]):
    """Divides the same sequence of global batches over any number of loading processes.

    The order depends on the seed and the epoch alone; a process loads its contiguous share of each
    global batch. Yields lists of (draw, image index): augmentations are drawn by the number of the
    draw, which is the epoch.

    With ``repeats`` each image stands that many times in a row, each time with another draw, and
    the epoch is no longer than before: timm's ``RepeatAugSampler`` with a selection of all that
    fit. Within a batch all first repeats come first, then all second ones: so the repeats of an
    image are on different devices if there are enough.

    With several sizes of images or crops each batch has one; its number, ``size_of``, ends each
    key.

    Training (``shuffle=True``) drops the last short batch, as PyTorch/XLA's ViT-10B example does.
    Evaluation fills it up with ``PADDING``.
    """

    read_together = 1
    """Consecutive images that one loader process should read at least."""

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
        """``numbers``: without ``shuffle``, the images in their order; None: from 0 on."""
        if batch_size % shards:
            raise ValueError(f"batch size {batch_size} is not divisible by {shards} processes")
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed
        self.shard, self.share = shard, batch_size // shards
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
        """Return a random generator that depends on the seed and the epoch alone."""
        seed = (self.seed * 1_000_003 + self.epoch) % 2**63  # the seeds that a generator accepts
        return torch.Generator().manual_seed(seed)

    def shuffled(self, generator: torch.Generator) -> torch.Tensor:
        """Return the indices of the images in a random order drawn from ``generator`` alone."""
        return torch.randperm(self.length, generator=generator)

    def __iter__(self) -> Iterator[list[Key]]:
        repeats, first = self.repeats, self.shard * self.share
        order = self.shuffled(self.generator()) if self.shuffle else self.numbers
        for number in range(self.first_batch, len(self)):
            places = range(number * self.batch_size, (number + 1) * self.batch_size)
            # A stable sort: within one repeat the order stays.
            by_repeat = sorted(places, key=lambda place: place % repeats)
            keys: list[Key] = []
            for place in by_repeat[first : first + self.share]:
                position, repeat = divmod(place, repeats)
                image = int(order[position]) if position < self.length else PADDING
                keys.append((self.epoch * repeats + repeat, image))
            if self.size_of:
                size = self.size_of(self.epoch, number)
                keys = [(*key, size) for key in keys]
            yield keys


WINDOW = 64
"""The number of groups whose runs ``RunSampler`` mixes with each other."""


class RunSampler(GlobalBatchSampler):
    """Trains on images in a random order in which one reading of a group serves several of them.

    A group (a row group of a parquet file) can only be read whole. The groups are in random order,
    and so are the images of each, which are cut into runs of ``run_length`` images. The runs of
    each ``WINDOW`` consecutive groups are shuffled. The order does not depend on batches or
    processes.
    """

    def __init__(self, groups: Sequence[int], run_length: int, batch_size: int, **how: Any) -> None:
        """``groups``: how many images each group has; images are numbered through all groups."""
        super().__init__(sum(groups), batch_size, **how)
        self._groups, self._run_length = groups, run_length
        # Runs do not start where a process's part does: in a long part few of them are cut.
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
    """Gives batches of one process's share, epoch by epoch, from any position. One that yields the
    same tensors again shows the device side that nothing has to be copied."""

    prefetch_depth: int
    """How many batches to load ahead of the step; 0 for a source that must not run beside it."""

    def __len__(self) -> int:
        """Return how many global batches an epoch has."""

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """Yield the batches of the epoch numbered ``epoch`` from ``first_batch`` on."""

    @property
    def workers(self) -> int:
        """Return how many loader processes read for this process."""

    def bad_images(self) -> list[BadImage]:
        """Return the unreadable images found in this process's share since the last call."""


@dataclass
class ConstantLoader:
    """Yields the same batch again and again, and perhaps another one at the end of an epoch."""

    batches: int
    """How many there are in an epoch."""
    batch: Batch
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
"""The most chosen: at 1,000 images/s each, more than the chips of any host need so far."""
_MAX_RESTARTS = 3
"""How often lost processes are replaced without a batch in between."""


def default_workers(processes: int) -> int:
    """Return how many loader processes each of the training ``processes`` of a host should have:
    one for each core that they may use, less one for each training process."""
    cores = len(os.sched_getaffinity(0))
    return min(max(1, cores // processes - 1), _MAX_WORKERS)


class DatasetLoader:
    """Loads a map-style dataset, of a ``Sample`` for each ``Key``, with loader processes that live
    for the whole run."""

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, workers: int) -> None:
        self._dataset, self._sampler, self.workers = dataset, sampler, workers
        # Without workers, transforms would share this process's random state with the step.
        self.prefetch_depth = 2 if workers else 0
        share_of_worker = min(-(-sampler.share // max(workers, 1)), _MAX_PART)
        size = max(share_of_worker, sampler.read_together) if workers else sampler.share
        self._parts = _Parts(sampler, min(size, sampler.share))
        self._bad: dict[str, BadImage] = {}  # by path; filled in the thread that prefetches
        self._reported = 0
        """How many of them ``bad_images`` has returned."""
        self._loader = self._start()

    def __len__(self) -> int:
        return len(self._sampler)

    def _start(self) -> DataLoader:
        if self.workers and multiprocessing.get_start_method() == "forkserver":
            # A backend chooses it whose threads may hold locks, which a process forked from this
            # one would wait for. Loader processes are forked from the server, which is started
            # here unless it runs: as they do, it must outlive a signal that stops training.
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
        parts_per_batch = -(-self._sampler.share // self._parts.size)
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
                    images, labels = zip(*parts, strict=True)
                    parts = []
                    next_batch, failures = next_batch + 1, 0
                    if len(images) == 1:
                        yield images[0], labels[0]
                    else:
                        yield torch.cat(images), torch.cat(labels)
            except (RuntimeError, OSError, EOFError) as error:  # as the DataLoader raises them
                if self.workers and isinstance(error, OSError) and error.errno in _EXHAUSTED:
                    raise _transfer_error(error) from None
                failures += 1
                if not self.workers or failures > _MAX_RESTARTS:
                    raise
                tqdm.write(
                    f"a loader process was lost, all {self.workers} are restarted: "
                    f"{str(error).splitlines()[0]}",
                    file=sys.stderr,
                )
                self._loader = self._start()

    def bad_images(self) -> list[BadImage]:
        images = list(self._bad.values())[self._reported :]
        self._reported += len(images)
        return images


_Part = tuple[Batch, list[BadImage]] | DataFolderError
"""A part of a batch, with the unreadable images among it, or why it cannot be loaded: raised in a
loader process, the message would be wrapped in a traceback."""


@dataclass
class _Parts(Sampler[list[Key]]):
    """Divides each batch of a sampler into consecutive parts of up to ``size`` images."""

    sampler: GlobalBatchSampler
    size: int

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in self.sampler:
            for first in range(0, len(batch), self.size):
                yield batch[first : first + self.size]


@dataclass
class _PartDataset(Dataset):
    """Reads parts of batches of a dataset of ``Sample``."""

    samples: Dataset

    def __getitem__(self, keys: list[Key]) -> _Part:
        try:
            if hasattr(self.samples, "__getitems__"):  # PyTorch's name for reading several at once
                samples = self.samples.__getitems__(keys)
            else:
                samples = [self.samples[key] for key in keys]
            images, labels, bad = zip(*samples, strict=True)
        except DataFolderError as error:
            return error
        return (torch.stack(images), torch.tensor(labels)), list(itertools.chain(*bad))


@dataclass
class _Sent:
    """What a loader process sends to its parent, which receives ``part`` itself, or the reason if
    it cannot be sent: a queue's thread would print that, and the parent would wait forever.

    The images are in anonymous memory, and the parent receives its open file. PyTorch would put
    them in /dev/shm, which is small in containers (64 MB in Docker's), and a process that writes to
    a full one is killed.
    """

    part: _Part

    def __reduce__(self) -> tuple[Callable, tuple]:
        if isinstance(self.part, DataFolderError):
            return DataFolderError, self.part.args
        (images, labels), bad = self.part
        try:
            with open(os.memfd_create("images"), "wb") as memory:
                memory.write(images.numpy().data)
                memory.flush()
                file = DupFd(memory.fileno())
        except Exception as error:  # noqa: BLE001 - sent to the parent, whatever it is
            return DataFolderError, _transfer_error(error).args
        return _receive, (file, images.shape, images.dtype, labels.numpy(), bad)


def _receive(
    file: Any, shape: tuple[int, ...], dtype: torch.dtype, labels: np.ndarray, bad: list[BadImage]
) -> _Part:
    with open(file.detach(), "rb+") as opened:
        memory = mmap.mmap(opened.fileno(), 0)
    images = torch.frombuffer(memory, dtype=dtype).reshape(shape)
    return (images, torch.from_numpy(labels)), bad


_EXHAUSTED = (errno.ENOSPC, errno.EMFILE, errno.ENFILE)
"""What keeps the parent from starting loader processes, and from receiving anything."""


def _transfer_error(error: Exception) -> DataFolderError:
    return DataFolderError(
        f"loader processes cannot hand over images ({reason_of(error)}): they need open files "
        "(ulimit -n), a socket in the temporary folder, and a little room in /dev/shm for locks: "
        "provide these, or use --num_workers 0"
    )


def prepare_sockets() -> None:
    """Create the folder for the sockets by which the loader processes of this process, and of those
    that it starts, hand over images; multiprocessing removes it when this process ends.

    Raises DataFolderError if there can be no sockets: their paths have at most 107 bytes on Linux.
    """
    try:
        path = f"{get_temp_dir()}/listener-12345678"  # as long as multiprocessing's names
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
        os.unlink(path)
    except OSError as error:
        raise DataFolderError(
            f"loader processes need a folder for sockets ({reason_of(error)}): set TMPDIR to a "
            "folder of yours with a short path, or use --num_workers 0"
        ) from None


def _start_worker(_worker_id: int) -> None:
    """Make a loader process ignore the signals that stop training, and share its parent's memory:
    only the training process decides to stop, and needs it until its checkpoint is written."""
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
    """Yield ``put(batch)`` for each batch; a thread puts up to ``depth`` of them ahead.

    If the source yields the same tensors again, they are put once. An error of the source or of
    ``put`` is raised here, in place of its batch. ``failed`` is called with it at once, in the
    thread, while earlier batches are still to be used.

    Depth 0 uses no thread: for sources that compute in this process, whose random transforms and
    the model share PyTorch's global generator.
    """

    def put_batches() -> Iterator[Any]:
        last = on_device = None
        for batch in batches:
            if last is None or any(a is not b for a, b in zip(batch, last, strict=True)):
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
