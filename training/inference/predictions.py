"""What a model takes each image for: its place among the classes, read without stopping devices."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from data.loading.sampler import PADDING
from training.backend import Backend

TOP = 5
"""How many of the likeliest classes may hold the label where top-5 accuracy is meant."""


def classes_before(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return for each image how many classes its logits, (images, classes), put before its label.

    0: the label is what ``argmax`` says, up to 4: it is among the five likeliest. Of equal logits
    the first class counts as the likeliest; a logit that is not a number comes before all, so
    that a model that has diverged is right about nothing. No sorting, no gathering: each device
    compares its own images' logits, whatever these are sharded over.
    """
    classes = torch.arange(logits.shape[-1], device=logits.device)
    label = labels.clamp(min=0)[:, None]  # padding has some place, too, which does not count
    own = torch.where(classes == label, logits, 0.0).sum(dim=-1, keepdim=True)
    first_of_equals = (logits == own) & (classes < label)
    return (~(logits <= own) | first_of_equals).sum(dim=-1)


class Predictions:
    """Collects each image's label, its likeliest class and the label's place, over all devices.

    A batch's are three numbers an image, read some batches later: of 21,000 classes as of ten.
    """

    def __init__(self, backend: Backend, batch_size: int) -> None:
        """Take the number of images of a global batch, padding included."""
        self._backend, self._batch_size, self._parts = backend, batch_size, 1
        mine = F.one_hot(torch.tensor(backend.rank), backend.world_size).float()
        # On the device, so that all processes run one program, of which only this differs.
        self._mine = backend.constant(mine)
        self._found: list[np.ndarray] = []

    def of_batch(
        self, logits: torch.Tensor, labels: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """Return what ``add`` takes, whole on every device; no class's number is beyond fp32's
        exact ones."""
        here = torch.stack([labels, logits.argmax(dim=-1), before]).float()
        self._parts = self._batch_size // labels.shape[0]  # 1 where a program's tensors are global
        if self._parts > 1:
            here = self._mine[:, None, None] * here
        return self._backend.sum(here)

    def add(self, values: list[float]) -> None:
        """Add a batch, as it was read from the devices."""
        parts = np.array(values, dtype=np.int64).reshape(self._parts, 3, -1)
        found = parts.transpose(1, 0, 2).reshape(3, -1)
        self._found.append(found[:, found[0] != PADDING])

    def all(self) -> np.ndarray:
        """Return labels, likeliest classes and ``classes_before``: (3, images), int64."""
        return np.concatenate(self._found, axis=1) if self._found else np.zeros((3, 0), np.int64)
