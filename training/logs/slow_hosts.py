"""Names the process that the others wait for, and says whether it reads or computes slowly.

In synchronous training all processes take the same time for a step, as the others wait for the
slowest one. So each measures what it does without waiting for another: the seconds that a step
waited for images to be read, and ``Backend.own_seconds``, in which it computes. Both are intervals
of its own clock; clocks of two hosts are never compared. At a log step the processes exchange those
of the newest steps, on the hosts, and all find the same answer.
"""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median_low

from training.processes import exchange

STEPS = 20
"""For how many steps in a row a process must be slow to be named."""
_SENT = STEPS + 4
"""Steps that are exchanged: of the newest ones, not all processes may know their time yet."""
_RATIO = 1.1
"""A process is slow in a step if its own time is longer than the median's by this factor."""
_LEAST_SHARE = 0.5
"""The least share of a step that its own time must be: what is shorter, something else hides."""

Seconds = tuple[float, float]
"""What a process did itself in a step: seconds of waiting for images, and of computing."""


class SlowHosts:
    """Compares the processes of a run; with one process it does nothing."""

    def __init__(self) -> None:
        """All processes must call this."""
        self._hosts = exchange.gather(socket.gethostname())
        self._waits: deque[float] = deque()
        """Of steps whose seconds of computing are not known yet."""
        self._newest: deque[Seconds] = deque(maxlen=_SENT)
        self._count = 0
        """How many steps' seconds are known."""
        self._named: set[int] = set()

    def stepped(self, read_s: float, computed: Sequence[float]) -> None:
        """Note a step's seconds of waiting for images to be read, and the seconds of computing of
        steps, this or earlier ones, that were not known before: each once, in order."""
        if len(self._hosts) == 1:
            return
        self._waits.append(read_s)
        for seconds in computed:
            self._newest.append((self._waits.popleft(), seconds))
            self._count += 1

    def compare(self, step_s: float, say: Callable[[str], None]) -> dict[str, float]:
        """Return what a log step records of the slowest process; name those that are slow.

        ``step_s``: the seconds of a step, as this process has measured them since the last log
        step. {} with one process, or before times are known. All processes must call this.
        """
        if len(self._hosts) == 1:
            return {}
        found = exchange.gather([self._count, list(self._newest), step_s])
        last = min(count for count, _, _ in found)
        first = max([last - STEPS, *(count - len(newest) for count, newest, _ in found)])
        if last <= first:
            return {}
        steps = [
            [(read, computed) for read, computed in newest[first - count : last - count or None]]
            for count, newest, _ in found
        ]
        longest = max(seconds for _, _, seconds in found)
        # Reading and computing may overlap on a device of its own: a step is never longer.
        own = [[min(sum(seconds), longest) for seconds in each] for each in steps]
        medians = [median_low(of_step) for of_step in zip(*own, strict=True)]
        slow = {
            process
            for process, seconds in enumerate(own)
            if len(seconds) == STEPS
            and all(
                mine > _RATIO * median and mine > _LEAST_SHARE * longest
                for mine, median in zip(seconds, medians, strict=True)
            )
        }
        reading = [fmean(read for read, _ in each) for each in steps]
        computing = [fmean(computed for _, computed in each) for each in steps]
        means, median = [fmean(seconds) for seconds in own], fmean(medians)
        for process in sorted(slow):
            more_reading = reading[process] - median_low(reading)
            more_computing = computing[process] - median_low(computing)
            reads = more_reading > more_computing
            say(
                f"warning: {exchange.name(process, self._hosts[process])} is slow: "
                f"{means[process]:.3f} s of each of the last {STEPS} steps are its own, the median "
                f"is {median:.3f} s; it "
                + (
                    f"reads slowly, {reading[process]:.3f} s a step"
                    if reads
                    else f"computes slowly, {computing[process]:.3f} s a step"
                )
            )
        for process in sorted(self._named - slow):
            say(f"note: {exchange.name(process, self._hosts[process])} is no longer slow")
        self._named = slow
        slowest = max(range(len(means)), key=means.__getitem__)
        return {
            "slowest_process": slowest,
            "slowest_ratio": means[slowest] / median if median else 1.0,
            "slowest_own_s": means[slowest],
            "slowest_read_s": reading[slowest],
        }
