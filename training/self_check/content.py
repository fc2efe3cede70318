"""What the small run computes with: images, labels and first weights, the same everywhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from data.loading.loader import Batch, Sample
from data.loading.share import Share
from data.source import SplitSource, WholeImages
from models.meta import allocate
from training.backend import Backend
from training.loaders import train_loader
from training.options.resolve import Run
from training.validation import wanted_images


def _generator(*what: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, what)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


class _Images(WholeImages):
    """Noise, another one for each index, with labels that go round."""

    def __init__(
        self, length: int, shape: tuple[int, ...], dtype: torch.dtype, classes: int, seed: int
    ) -> None:
        self._shape, self.dtype, self._seed = shape, dtype, seed
        self.labels = [index % classes for index in range(length)]

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        return ""  # the same for all who have the same flags

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        _, index = key
        generator = _generator(self._seed, "image", index)
        if self.dtype == torch.uint8:
            image = torch.randint(256, self._shape, generator=generator, dtype=torch.uint8)
        else:
            image = torch.randn(self._shape, generator=generator)
        return image, self.labels[index], []


UPDATES = 3
"""That are compared. There is one batch more, to go on with."""


def batches(run: Run, backend: Backend | None = None) -> Iterator[Batch]:
    """Return a process's share of each global batch, divided as real ones are; None: all of it."""
    sizes = run.model.sizes
    length = run.config.data.batch_size * (UPDATES + 1)
    config = replace(run.config.data, num_workers=0)
    dtype = getattr(torch, config.image_dtype(len(sizes.input_shape) - 1))
    images = _Images(length, sizes.input_shape, dtype, sizes.num_classes, run.config.seed)
    wanted = replace(wanted_images(run), config=config)
    source = SplitSource(wanted, "made up", images, images, None)
    if backend is None:
        return source.train_loader(config.batch_size, Share()).epoch(0)
    return train_loader(source, backend, config.batch_size).epoch(0)


class FirstWeights:
    """An ``InitializeModule`` whose values make every parameter matter.

    With those that a training begins with, some gradients are zero, or drown in rounding: behind
    a head of zeros, or of queries and keys whose scores are all alike.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @torch.no_grad()
    def __call__(self, module: nn.Module, name: str) -> None:
        """Allocate on CPU and fill what is on meta below ``module``."""
        for full_name, part in allocate(module, name):
            for key, parameter in part.named_parameters(prefix=full_name, recurse=False):
                parameter.copy_(self._values(key, parameter))

    def _values(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(parameter.shape, generator=_generator(self._seed, "weight", name))
        own_name = name.rpartition(".")[2]
        if own_name in ("pos_embed", "cls_token", "reg_token", "latent"):
            return 0.5 * noise
        if parameter.dim() > 1:
            return noise / math.sqrt(parameter[0].numel())
        if own_name == "gamma":  # a layer's scale
            return 0.5 + 0.1 * noise
        return 0.1 * noise + (1.0 if own_name == "weight" else 0.0)
