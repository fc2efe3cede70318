"""Images that are decoded by one process of those that share them, and given to each in rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from data.loading.loader import BadImage, Batch, BatchLoader
from gpu_fsdp.domain.group import exchanged


@dataclass
class SharedImages:
    """Gives the rows of this process, of whole images that the processes of a group load together.

    The first ``sources`` of them load ``each`` images, the others none: each image is decoded
    once. What they tell each other goes through ``group``, by tensors on the CPU.
    """

    loader: BatchLoader
    group: dist.ProcessGroup
    rows: Sequence[range]
    """The rows of each process."""
    sources: int
    each: int
    """How many images of each batch a source loads."""
    prefetch_depth: int = 0
    """None: threads that are ahead of the step would end at different batches, and wait for ever.
    Workers decode ahead all the same."""

    @property
    def workers(self) -> int:
        return self.loader.workers

    def __len__(self) -> int:
        return len(self.loader)

    def bad_images(self) -> list[BadImage]:
        return self.loader.bad_images()

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        for images, labels in self.loader.epoch(epoch, first_batch):
            yield self._rows_of(images), self._all_of(labels)

    def _rows_of(self, images: torch.Tensor) -> torch.Tensor:
        given = [images[:, :, rows.start : rows.stop] for rows in self.rows]
        mine = len(self.rows[dist.get_rank(self.group)])
        return self._exchanged(given, (images.shape[1], mine, *images.shape[3:]))

    def _all_of(self, labels: torch.Tensor) -> torch.Tensor:
        return self._exchanged([labels] * len(self.rows), ())

    def _exchanged(self, given: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Give each process its part; return those of all that load, of ``shape`` each image."""
        others = len(self.rows) - self.sources
        shapes = [(self.each, *shape)] * self.sources + [(0, *shape)] * others
        return torch.cat(exchanged(given, shapes, self.group)[: self.sources])
