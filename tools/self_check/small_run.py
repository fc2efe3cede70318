"""The small run of the self-check: the user's flags and devices, with a tiny model and batch."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from data.batch import PADDING, Batch, BatchShard, Fields, Sample, SampleIndex
from data.source import DatasetRequest, DataSource, Split
from models.config import ModelError
from models.initialize import allocate
from models.registry import open_model
from training.backend import Backend
from training.data import dataset_request
from training.errors import UsageError
from training.feature import SmallSizes
from training.objectives.config import LossConfig
from training.resolve import Run, extended, model_flags
from training.step import train_loader

# -- Images, labels and first weights, the same everywhere ----------------------------------------


def _generator(*parts: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


class _Noise(Split):
    """Noise, different for each index, with labels in rotation."""

    def __init__(self, request: DatasetRequest, length: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        labels = [index % request.num_classes for index in range(length)]
        super().__init__(request, "train", labels)
        self._whole = self.fields
        """What a sample consists of, where ``fields`` may have some of its rows."""

    def digest(self) -> str:
        return ""  # the same in all processes with the same flags

    def __getitem__(self, at: SampleIndex) -> Sample:
        generator = _generator(self.seed, "image", at.index)
        sample = self.request.view.noise(self.request, self._whole, at.index, generator)
        if target := self.fields.get("target"):
            first, labels = sample.get("target", torch.zeros(target.shape)), target.full()
            count = int((first != PADDING).sum())
            labels.view(-1)[:count] = torch.tensor(
                [int(self.labels[(at.index + image) % len(self)]) for image in range(count)]
            )
            sample["target"] = labels
        if self.partial_rows:
            for name, value in sample.items():
                if (rows := self.fields[name].rows) is not None:
                    sample[name] = value.narrow(rows, self.rows.start, len(self.rows))
        return Sample(sample, [])


UPDATES = 3
"""Number of updates compared; one extra batch tests resuming."""


def batches(run: Run, backend: Backend | None, *, positions: bool) -> Iterator[Batch]:
    """Return a process's shard of each global batch, as of real ones; without ``backend``: all.

    ``positions``: with each sample's place in the global batch.
    """
    batch_size = run.config.data.batch_size
    request = _request(run)
    images = _Noise(request, batch_size * (UPDATES + 1), _dtype(request))
    source = DataSource("made up", {"train": images, "val": images})
    if backend is None:
        loader, first = source.train_loader(batch_size, BatchShard()), 0
    else:
        loader = train_loader(source, backend, batch_size)
        first = backend.batch_shard * (batch_size // backend.batch_shards)
    for batch in loader.epoch(0):
        if positions:
            count = len(next(iter(batch.values())))
            batch = batch | {"position": torch.arange(first, first + count)}
        yield batch


def fields_of(run: Run) -> Fields:
    """Return the fields of a training sample of the run."""
    request = _request(run)
    return request.view.fields(request, _dtype(request), is_train=True)


def _request(run: Run) -> DatasetRequest:
    labels = run.config.objective.uses_labels
    config = replace(run.config.data, num_workers=0)
    return replace(dataset_request(run, labels=labels), config=config)


def _dtype(request: DatasetRequest) -> torch.dtype:
    return getattr(torch, request.config.image_dtype(len(request.size)))


@torch.no_grad()
def first_weights(seed: int, module: nn.Module, name: str) -> None:
    """Allocate on CPU and fill what is on meta below ``module`` so that every parameter matters.

    With the values that a training starts with, some gradients are zero, or drown in rounding:
    behind a head of zeros, or of queries and keys whose scores are all alike.
    """
    for full_name, part in allocate(module, name):
        for key, parameter in part.named_parameters(prefix=full_name, recurse=False):
            noise = torch.randn(parameter.shape, generator=_generator(seed, "weight", key))
            own_name = key.rpartition(".")[2]
            if own_name in ("pos_embed", "cls_token", "reg_token", "mask_token", "latent"):
                values = 0.5 * noise
            elif parameter.dim() > 1:
                values = noise / math.sqrt(parameter[0].numel())
            elif own_name == "gamma":  # a layer's scale
                values = 0.5 + 0.1 * noise
            else:
                values = 0.1 * noise + (1.0 if own_name == "weight" else 0.0)
            parameter.copy_(values)


# -- The sizes ------------------------------------------------------------------------------------

_GRID, _PATCH = 4, 4
_DEPTH = 3
"""Blocks: a first one, a last one, and one that is neither."""
_CLASSES = 11
"""Divisible by few numbers of devices: some parameters are sharded unevenly or not at all."""
_HEADS = 2
_HEAD_WIDTH = 8
_WIDTH = 32
_MICRO_BATCHES = 3
_ROWS, _FEW_ROWS, _FROM_REPLICAS = 4, 2, 8
"""Images a replica and pass; the smaller number from so many replicas on."""
_ROWS_OF_MULTIPLES = 32
"""For FP8, whatever its plan."""
_LAYER_SCALE = 0.1


def shrink(run: Run) -> Run:
    """Return the small run instead of ``run``: the same choices, on the same devices.

    Without what depends on random numbers: dropout of all kinds. Without losses of labels other
    than the cross-entropy, which ask nothing of the devices. Features say what else is left out.
    """
    data, mesh = run.config.data, run.mesh
    passes = min(data.grad_accum_steps, _MICRO_BATCHES)
    limit = _ROWS if mesh.batch_shards < _FROM_REPLICAS else _FEW_ROWS
    rows, multiple = min(data.global_micro_batch_size // mesh.batch_shards, limit), 1
    if run.backend_config.product_multiple > 1:
        rows = multiple = _ROWS_OF_MULTIPLES
    batch_size = mesh.batch_shards * passes * rows

    # The model with fewer and narrower blocks, of the same kind.
    sizes, settings = run.model.sizes, run.model.settings
    tensor, domain = mesh.tensor, mesh.domain
    heads = tensor if tensor > 1 else min(sizes.num_heads, _HEADS)
    if run.config.sharding.domain_attention == "ulysses":  # which divides heads over "domain"
        heads = math.lcm(heads, domain)
    # All devices hold a shard of each large parameter, as of the real model's.
    step = math.lcm(heads * _HEAD_WIDTH, mesh.devices, multiple)
    width = step * -(-_WIDTH // step)
    part = math.lcm(tensor, multiple)
    hidden = part * max(1, round(width * settings["mlp_ratio"] / part))
    patch = min(settings["patch_size"], _PATCH)
    # As many dimensions, and a row of patches at least for each device that shares an image.
    grid = [min(count, _GRID) for count in sizes.grid]
    grid[0] = max(grid[0], domain)
    small: dict[str, Any] = {name: 0.0 for name in settings if name.endswith("_rate")}
    small |= {
        "img_size": tuple(count * patch for count in grid),
        "patch_size": patch,
        "embed_dim": width,
        "num_heads": heads,
        "depth": min(sizes.depth, _DEPTH),
        "mlp_ratio": (hidden + 0.5) / width,  # timm rounds down
        "num_classes": _CLASSES,
    }
    for name, value in (("reg_tokens", 2), ("num_reg_tokens", 2), ("init_values", _LAYER_SCALE)):
        if settings.get(name):
            small[name] = value

    # The same features, for that model.
    small_sizes = SmallSizes(width, heads, _DEPTH, _CLASSES, patch, tuple(grid), images=rows)
    config = replace(run.config, loss=LossConfig())
    for feature in config.active_features:
        config = feature.shrink(config, small_sizes)
    small |= config.added_arguments()
    try:
        model = extended(open_model(run.model.name, run.model.overrides | small), config)
    except ModelError as error:
        text = f"--self_check cannot shrink --model {run.model.name}"
        raise UsageError(f"{text}: {error.with_flag_names(model_flags())}") from None
    small_run = replace(run, config=config, model=model, backend_config=run.backend_config.shrunk())
    return small_run.with_data(
        grad_accum_steps=passes, micro_batch_size=None, batch_size=batch_size, aug_repeats=1
    )
