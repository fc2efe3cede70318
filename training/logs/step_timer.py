"""The throughput of training, measured between two log steps."""

import time
from dataclasses import dataclass, field


@dataclass
class StepTimer:
    """Measures the throughput between two log steps, by the host's clock."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    waited: float = 0.0
    """The seconds spent waiting for batches."""
    flops: float = 0.0
    """The FLOPs of the steps, as counted for MFU."""

    def restart(self) -> None:
        self.started, self.steps, self.waited = time.perf_counter(), 0, 0.0
        self.flops = 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self.started
