"""Holds what one start of a run has from its first step to its last, for all who do its work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from training.backend import Backend
from training.hosts.stopping import StopRequest
from training.hosts.watchdog import Watchdog
from training.logs.bad_images import BadImages
from training.logs.reports import Reports


@dataclass(frozen=True)
class Session:
    """Holds the backend of a run, and who is told what happens on it."""

    backend: Backend
    reports: Reports
    stop: StopRequest
    watchdog: Watchdog
    bad_images: BadImages
    last_step: int
    """The number of the step that the run ends with."""
    _shapes: set[torch.Size] = field(default_factory=set, init=False)

    def is_first(self, images: torch.Tensor) -> bool:
        """Tell whether a step is the first of this start; where steps are compiled, whether it is
        the first with images of this shape. To be asked once a step."""
        first = not self._shapes or (self.backend.compiles and images.shape not in self._shapes)
        self._shapes.add(images.shape)
        return first

    @contextlib.contextmanager
    def first_run(self, what: str, is_first: bool) -> Iterator[None]:
        """Run ``what`` inside; if the first of its kind compiles, say so and wait for it."""
        if not (is_first and self.backend.compiles):
            yield
            return
        self.watchdog.rest()  # a compilation may take minutes
        with self.reports.compiling(what):
            yield
            self.backend.wait()
