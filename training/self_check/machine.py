"""What the machines can do: talking to each other, decoding images, telling of their memory."""

from __future__ import annotations

import socket
import time

import torch
import torch.distributed as dist

from data.errors import DataFolderError
from data.loading.share import Share
from data.source import DataSource
from training.backend import Backend
from training.hosts import processes
from training.options.resolve import Run
from training.self_check.table import Table, size_of

_MFU = 0.5
"""Of a step that is as fast as steps get."""
_SECONDS = 6.0
_SHARE = 16
"""Images a batch and process: first batches come soon."""


def check_hosts(backend: Backend, table: Table) -> None:
    """Try a collective each way between the processes: sum, largest, and everyone's own value."""
    count, rank = processes.count(), processes.rank()
    total = torch.tensor([float(rank + 1), 1.0])
    if dist.is_initialized():
        dist.all_reduce(total)
    largest = backend.largest_of_all(rank)()
    ranks, hosts = zip(*processes.gather([rank, socket.gethostname()]), strict=True)
    good = total.tolist() == [count * (count + 1) / 2, count] and largest == count - 1
    good &= ranks == tuple(range(count))
    text = f"sum, largest and gather over {count} process(es) on {len(set(hosts))} host(s)"
    table.line(all(processes.gather(good)), "hosts", text)


def check_memory(asked: Run, run: Run, backend: Backend, table: Table) -> None:
    """Compare a device's memory with the least that the run of ``asked`` takes of it.

    ``run`` is the small one: of its state a device holds the same share.
    """
    of = [each.model.parameter_count for each in (asked, run)]
    state = sum(backend.state_bytes().values()) * of[0] / of[1]
    text = f"weights and AdamW of the whole model: about {size_of(state)} a device"
    told = backend.memory()
    told = processes.gather(told)[0]
    if not told.get("limit"):
        table.line(None, "memory", f"{text}; it does not tell what it has")
        return
    text += "".join(f", {name} {size_of(value)}" for name, value in told.items())
    table.line(state < told["limit"], "memory", text)


def check_decoding(run: Run, data: DataSource, backend: Backend, table: Table) -> None:
    """Compare the images a second that the loader gives with what the devices could take."""
    if not data.decodes:
        table.line(None, "data", "not read: --fake_data")
        return
    found = _measure(data)
    all_found = processes.gather(str(found) if isinstance(found, DataFolderError) else found)
    problem = next((each for each in all_found if isinstance(each, str)), None)
    if problem:
        table.line(False, "data", problem)
        return
    speed = sum(each for each, _ in all_found)
    workers = all_found[0][1]
    text = f"{speed:,.0f} images/s decoded by {len(all_found)} x {workers} workers"
    peak = backend.peak_flops()
    if peak is None:
        table.line(None, "data", f"{text}; the peak of these devices is not known")
        return
    needed = _MFU * peak * backend.device_count / run.model.train_flops_per_image
    text += f", the devices take {needed:,.0f} at {_MFU:.0%} of their peak"
    table.line(speed >= needed, "data", text)


def _measure(data: DataSource) -> tuple[float, int] | DataFolderError:
    """Return the images a second of this process, all of them reading at once, from the first batch
    on, and its loader processes."""
    share = min(_SHARE, data.train_length // processes.count())
    host = socket.gethostname()
    of_host = processes.gather(host).count(host)
    mine = Share(processes.rank(), processes.count(), of_host=of_host)
    loader = data.train_loader(share * processes.count(), mine)
    images, epoch = 0, 0
    began = end = 0.0
    try:
        # Each worker has batches of its own under way: what is ready at the start is not counted.
        left = 2 * max(1, loader.workers)
        while not began or time.perf_counter() < began + _SECONDS:
            for loaded, _ in loader.epoch(epoch):
                end = time.perf_counter()
                if began:
                    images += len(loaded)
                    if end > began + _SECONDS:
                        break
                left -= 1
                if left == 0:
                    began = end
            epoch += 1
    except DataFolderError as error:
        return error
    return images / (end - began), loader.workers
