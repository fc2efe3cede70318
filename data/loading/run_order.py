"""An order of images that lie in groups, such that a group is read for several images at once.

Of a group (a row group of a parquet file) one image cannot be read without the others. In a random
order of all images each one would cost the reading of a group, a hundred images or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from data.loading.sampler import GlobalBatchSampler

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
