"""Exchange values between the processes of a run, fail together, and check that they agree.

Uses PyTorch's default process group, which every backend creates if there are several processes.
Messages are JSON, so received data is never executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from training.errors import RunFailed, UsageError, installed_version
from training.flags import by_field

if TYPE_CHECKING:
    from data.source import DataSource
    from training.backend import Backend
    from training.resolve import Run


def count() -> int:
    """Return the number of connected processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process among them, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def silence_gloo() -> Iterator[None]:
    """Silence stdout, where gloo prints a line for each new group (PyTorch 2.9)."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the JSON values of all processes of a group (None: the default one), by rank; all must
    call it."""
    if count() == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count())]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, padded, group)
    return [
        json.loads(bytes(text[: int(size)].tolist()))
        for text, size in zip(texts, sizes, strict=True)
    ]


def gather_rows(rows: np.ndarray, to: int = 0) -> np.ndarray:
    """Return the rows of all processes, by rank, in the process with the rank ``to``, and none in
    the others; all must call it."""
    if count() == 1:
        return rows
    content = rows.tobytes()
    sizes = all_gather_object(len(content))
    mine = np.zeros(max(1, *sizes), np.uint8)
    mine[: len(content)] = np.frombuffer(content, np.uint8)
    parts = [torch.zeros(len(mine), dtype=torch.uint8) for _ in sizes] if rank() == to else None
    dist.gather(torch.from_numpy(mine), parts, to)
    found = [part[:size].numpy() for part, size in zip(parts or (), sizes, strict=False)]
    whole = np.concatenate(found) if found else mine[:0]
    return whole.view(rows.dtype).reshape(-1, *rows.shape[1:])


def broadcast_bytes(content: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the bytes that the first process of a group passes; all must call it."""
    if count() == 1:
        return content
    size = all_gather_object(len(content), group)[0]
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8) if rank() == 0 else None
    tensor = torch.empty(size, dtype=torch.uint8) if sent is None else sent
    dist.broadcast(tensor, 0, group)
    return content if sent is not None else tensor.numpy().tobytes()


def broadcast_object(value: Any) -> Any:
    """Return the JSON value of the first process; all must call it."""
    return all_gather_object(value)[0]


def name(number: int | None = None, host: str | None = None) -> str:
    """Return the name of a process in messages, "process 3 on node1"; by default this one."""
    number = rank() if number is None else number
    return f"process {number} on {host or socket.gethostname()}"


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise, in all processes, a UsageError or RunFailed that one of them raises inside; an OSError
    becomes a UsageError. The body must not contain a collective call."""
    problem: str | None = None
    exit_code: int | None = None
    try:
        yield
    except UsageError as error:
        problem = str(error)
    except RunFailed as error:
        problem, exit_code = str(error), error.exit_code
    except OSError as error:  # of a disk or storage: the others must not wait forever
        what = f"cannot use {error.filename}: " if error.filename else ""
        problem = f"{what}{error.strerror or error}"
    outcomes = all_gather_object([problem, exit_code, socket.gethostname()])
    failed = [number for number, (text, _, _) in enumerate(outcomes) if text is not None]
    if failed:
        text, exit_code, host = outcomes[failed[0]]
        if len(failed) < len(outcomes):
            text = f"{name(failed[0], host)}: {text}"
        raise UsageError(text, agreed=True) if exit_code is None else RunFailed(text, exit_code)


def tag_errors_with_rank(body: Callable[..., None], *args: Any) -> None:
    """Call ``body`` in one of several processes; tag an error of this one alone with its name."""
    try:
        body(*args)
    except UsageError as error:
        if not error.agreed and count() > 1:
            error.process = name()
        raise


# -- what must be the same in all processes of a run ----------------------------------------------

_PACKAGES = "torch torch_xla megatron-fsdp transformer-engine timm torchvision numpy".split()
_FREE_FLAGS = {"num_workers", "index_dir", "local_ckpt_dir", "rebuild_index", "step_timeout_s"}
"""Flags that may differ between hosts, as they do not change results."""
_CODE = (
    "run_vit_training.py config_fields.py tpu_machines.py "
    "features training models data tpu_attention xla_fsdp torch_fsdp gpu_fsdp"
)


def versions() -> dict[str, str | None]:
    """Return the versions of packages that affect results; None if not installed."""
    return {name: installed_version(name) for name in _PACKAGES}


def check_alike(run: Run, data: DataSource, hint: str = "") -> None:
    """Raise UsageError in all processes if two of them would train differently. ``hint``: what else
    may help than to start all in the same way."""
    names = by_field(type(run.config), type(run.backend_config))
    mine: dict[str, Any] = {
        names[field].names[0]: value
        for field, value in run.values.items()
        if field not in _FREE_FLAGS
    }
    mine |= {f"the version of {name}": value for name, value in versions().items()}
    mine["the version of Python"] = platform.python_version()
    root, code = Path(__file__).resolve().parents[2], xxhash.xxh3_64()
    for part in _CODE.split():
        path = root / part
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            code.update(str(file.relative_to(root)).encode())
            code.update(file.read_bytes())
    mine["the program's code, by checksum"] = code.hexdigest()
    mine |= data.fingerprint()
    (first_host, first), *others = all_gather_object([socket.gethostname(), mine])
    for number, (host, other) in enumerate(others, 1):
        for what in [*first, *(other.keys() - first.keys())]:
            values = [first.get(what), other.get(what)]
            if values[0] == values[1]:
                continue
            prefix = ""
            if all(isinstance(value, list) for value in values):  # the first elements that differ
                pairs = enumerate(zip_longest(*values))
                place, values = next((n, [*pair]) for n, pair in pairs if pair[0] != pair[1])
                prefix = f"number {place} is "
            raise UsageError(
                f"the processes of this run differ in {what}: {prefix}{values[0]!r} for "
                f"{name(0, first_host)}, {prefix}{values[1]!r} for {name(number, host)}: start "
                "all of them with the same command, code, packages and data" + hint,
                agreed=True,
            )


# -- an interval of time -------------------------------------------------------------------------


class MinutesInterval:
    """Measures minutes by the clock of the first process. No process waits for the answer, which is
    read one step later."""

    def __init__(self, backend: Backend, minutes: float) -> None:
        """Start the first interval; with ``minutes`` 0, it never ends."""
        self._backend, self._seconds = backend, 60 * minutes
        self._answer: Callable[[], int] = lambda: 0
        self.restart()

    def restart(self) -> None:
        """Start the next interval; all processes must call this after the same step."""
        self._answer()  # so that no collective is pending
        self._answer = lambda: 0
        self._since = time.monotonic()

    def over(self) -> bool:
        """Return True if the interval is over; all processes must call this after each step."""
        if not self._seconds:
            return False
        here = self._backend.is_main and time.monotonic() - self._since >= self._seconds
        if count() == 1:
            return here
        is_over, self._answer = bool(self._answer()), self._backend.all_reduce_max(int(here))
        return is_over


# -- slow hosts ----------------------------------------------------------------------------------
#
# In synchronous training, a step takes the same time in all processes, as the others wait for the
# slowest one. So each process measures its own time: the seconds that a step waited for images to
# be read, and the seconds of computing, ``Backend.local_compute_seconds``. Both are intervals of
# its own clock; clocks of different hosts are never compared. At a log step the processes exchange
# the medians over the latest steps, on the hosts, and all come to the same conclusion.

_STEPS = 20
"""The number of latest steps over which the medians of processes are compared."""
_RATIO = 1.1
"""A process is slow if its own time exceeds the median of all by this factor."""
_LEAST_SHARE = 0.5
"""The minimum fraction of a step for its own time; shorter times are hidden by device compute."""


class SlowHosts:
    """Reports the process that the others wait for, and whether it reads or computes slowly. Does
    nothing with a single process."""

    def __init__(self) -> None:
        """All processes must call this."""
        self._hosts = all_gather_object(socket.gethostname())
        self._read: deque[float] = deque(maxlen=_STEPS)
        self._computed: deque[float] = deque(maxlen=_STEPS)
        self._named: set[int] = set()

    def stepped(self, read_s: float, computed: Sequence[float]) -> None:
        """Note the seconds that a step waited for images to be read, and newly known seconds of
        computing, of this or earlier steps, each once, in order."""
        self._read.append(read_s)
        self._computed.extend(computed)

    def compare(self, step_s: float, say: Callable[[str], None]) -> dict[str, float]:
        """Return what a log step records about the slowest process, {} before times are known;
        report slow processes. ``step_s``: the seconds per step measured by this process. All
        processes must call this."""
        if len(self._hosts) == 1:
            return {}
        known = len(self._computed)
        medians = [median_low(self._read), median_low(self._computed)] if known else [0.0, 0.0]
        by_process = all_gather_object([*medians, known, step_s])
        if not all(known for _, _, known, _ in by_process):
            return {}
        longest = max(step_s for *_, step_s in by_process)
        # Reading and computing may overlap, but a step is never longer than measured.
        totals = [min(read + computed, longest) for read, computed, *_ in by_process]
        median = median_low(totals)
        usual_read = median_low(read for read, *_ in by_process)
        usual_computed = median_low(computed for _, computed, *_ in by_process)
        slow = set()
        for process, (read, computed, known, _) in enumerate(by_process):
            seconds = totals[process]
            if known < _STEPS or seconds <= max(_RATIO * median, _LEAST_SHARE * longest):
                continue
            slow.add(process)
            doing, part_s = "computes", computed
            if read - usual_read > computed - usual_computed:
                doing, part_s = "reads", read
            say(
                f"warning: {name(process, self._hosts[process])} is slow: over the last {_STEPS} "
                f"steps, its own time is {seconds:.3f} s per step, the median of all processes "
                f"{median:.3f} s; it {doing} slowly, {part_s:.3f} s per step"
            )
        for process in sorted(self._named - slow):
            say(f"note: {name(process, self._hosts[process])} is no longer slow")
        self._named = slow
        slowest = max(range(len(totals)), key=totals.__getitem__)
        return {
            "slowest_process": slowest,
            "slowest_ratio": totals[slowest] / median if median else 1.0,
            "slowest_own_s": totals[slowest],
            "slowest_read_s": by_process[slowest][0],
        }
