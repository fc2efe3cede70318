"""The small run of the self-check: the user's flags and devices, with a tiny model and batch."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from data.loader import PADDING, Batch, BatchShard, Key, Sample, numbered
from data.packing import patch_coord_of
from data.source import DatasetRequest, DataSource, Split, max_masked
from models.config import ModelError
from models.initialize import allocate
from models.registry import open_model
from training.backend import Backend, dataset_request, train_loader
from training.errors import UsageError
from training.feature import SmallSizes
from training.objectives.config import LossConfig
from training.resolve import Run, extended, model_flags

# -- Images, labels and first weights, the same everywhere ----------------------------------------


def _generator(*parts: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


class _Images(Split):
    """Noise, different for each index, with labels in rotation."""

    def __init__(
        self, request: DatasetRequest, length: int, dtype: torch.dtype, classes: int
    ) -> None:
        super().__init__(request, "train", [index % classes for index in range(length)])
        self.dtype = dtype

    def digest(self) -> str:
        return ""  # the same in all processes with the same flags

    def load_sample(self, number: int, epoch: int, index: int) -> torch.Tensor:
        generator = _generator(self.seed, "image", number)
        if self.dtype != torch.uint8:
            return torch.randn(self.shape, generator=generator)
        noise = torch.randint(256, self.shape, generator=generator, dtype=torch.uint8)
        if crops := self.request.crops:  # the last bytes are the mask
            patches = math.prod(crops.grid)
            masked = 1 + number % max_masked(crops.grid, crops.mask_ratio)
            noise[-patches:] = torch.randperm(patches, generator=generator) < masked
        return noise


class _Sequences(_Images):
    """The same in sequences, each of ``_IN_SEQUENCE`` images of different grids of patches."""

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        layout, prefix = self.request.pack_layout, self.request.pack.prefix  # type: ignore[union-attr]
        assert layout
        columns = 1 + (index // _SIDE) % _SIDE
        tokens = layout.tokens_of(
            [
                patch_coord_of(1 + (index + image) % _SIDE, columns, prefix)
                for image in range(_IN_SEQUENCE)
            ]
        )
        generator = _generator(self.seed, "sequence", index)
        shape = (layout.request.tokens, layout.patch_bytes)
        patches = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        labels = [int(self.labels[(index + image) % len(self)]) for image in range(_IN_SEQUENCE)]
        images = self.request.config.batch_size * _IN_SEQUENCE
        row = layout.pack(patches, *tokens, images)
        return row, [*labels, PADDING], []


UPDATES = 3
"""Number of updates compared; one extra batch tests resuming."""


def batches(run: Run, backend: Backend | None, *, places: bool) -> Iterator[Batch]:
    """Return a process's share of each global batch, as of real ones; without ``backend``: all.

    ``places``: with each image's place in the global batch instead of its label.
    """
    sizes = run.model.sizes
    length = run.config.data.batch_size * (UPDATES + 1)
    config = replace(run.config.data, num_workers=0)
    dtype = getattr(torch, config.image_dtype(len(sizes.input_shape) - 1))
    request = replace(dataset_request(run), config=config)
    kind = _Sequences if request.pack else _Images
    images = kind(request, length, dtype, sizes.num_classes)
    source = DataSource("made up", {"train": images, "val": images})
    if backend is None:
        loader, first = source.train_loader(config.batch_size, BatchShard()), 0
    else:
        loader = train_loader(source, backend, config.batch_size)
        first = backend.batch_shard * (config.batch_size // backend.batch_shards)
    for batch in loader.epoch(0):
        yield numbered(batch, first) if places else batch


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
_IN_SEQUENCE, _SIDE = 3, 3
"""Images of a sequence, which has a place for one more; the most rows, and columns, of one."""


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
    if packing := run.model.packing:
        tokens = _SIDE * _SIDE + min(packing.prefix, 3)  # a class token, two registers
        small |= {
            "token_budget": _IN_SEQUENCE * tokens + 1,  # and padding
            "max_images_per_sequence": _IN_SEQUENCE + 1,
        }
    for name, value in (("reg_tokens", 2), ("num_reg_tokens", 2), ("init_values", _LAYER_SCALE)):
        if settings.get(name):
            small[name] = value

    # The same features, for that model.
    small_sizes = SmallSizes(width, heads, _DEPTH, _CLASSES, patch, tuple(grid), images=rows)
    config = replace(run.config, loss=LossConfig())
    for feature in config.active_features():
        config = feature.shrink(config, small_sizes)
    try:
        model = extended(open_model(run.model.name, run.model.overrides | small), config)
    except ModelError as error:
        text = f"--self_check cannot shrink --model {run.model.name}"
        raise UsageError(f"{text}: {error.with_flag_names(model_flags())}") from None
    small_run = replace(run, config=config, model=model, backend_config=run.backend_config.shrunk())
    if model.packing:
        small_run = small_run.with_data(max_tokens_per_image=model.packing.tokens)
    return small_run.with_data(
        grad_accum_steps=passes, micro_batch_size=None, batch_size=batch_size, aug_repeats=1
    )
