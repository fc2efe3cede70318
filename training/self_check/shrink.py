"""The user's run made small: the same flags and form, a model and a batch of seconds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from models.errors import ModelError
from models.registry import open_model
from models.spec import ModelSpec
from training.errors import UsageError
from training.options.loss_config import LossConfig
from training.options.resolve import MODEL_FLAG, Run

_GRID, _PATCH = 4, 4
_DEPTH = 3
"""Blocks: a first one, a last one, and one that is neither."""
_CLASSES = 11
"""Divisible by hardly any number of devices: some parameters are sharded unevenly or not at all."""
_HEADS = 2
_HEAD_WIDTH = 8
_WIDTH = 32
_MICRO_BATCHES = 3
_ROWS, _FEW_ROWS, _FROM_REPLICAS = 4, 2, 8
"""Images a replica and pass; the smaller number from so many replicas on."""
_ROWS_OF_MULTIPLES = 32
"""For FP8, whatever its recipe."""
_LAYER_SCALE = 0.1


def shrink(run: Run) -> Run:
    """Return the small run in the place of ``run``: the same choices, on the same devices.

    What depends on random numbers is left out: dropout of all kinds, mixed images. So are other
    losses than the cross-entropy, which ask nothing of the devices.
    """
    data, mesh = run.config.data, run.mesh
    passes = min(data.grad_accum_steps, _MICRO_BATCHES)
    most = data.pass_size // mesh.batch_parts
    rows = min(most, _ROWS if mesh.batch_parts < _FROM_REPLICAS else _FEW_ROWS)
    if run.own.product_multiple > 1:
        rows = _ROWS_OF_MULTIPLES
    config = replace(run.config, loss=LossConfig())
    small = replace(run, config=config, model=_small_model(run), own=run.own.shrunk())
    batch_size = mesh.batch_parts * passes * rows
    return small.with_data(grad_accum_steps=passes, batch_size=batch_size, aug_repeats=1)


def _small_model(run: Run) -> ModelSpec:
    """Return the model with fewer and narrower blocks, of the same kind."""
    sizes, settings = run.model.sizes, run.model.settings
    tensor, domain, devices = run.mesh.tensor, run.mesh.domain, run.mesh.devices
    multiple = 1 if run.own.product_multiple == 1 else _ROWS_OF_MULTIPLES
    heads = tensor if tensor > 1 else min(sizes.num_heads, _HEADS)
    if run.config.sharding.domain_attention == "ulysses":  # which divides heads over "domain"
        heads = math.lcm(heads, domain)
    # All devices hold a part of each large parameter, as of the real model's.
    step = math.lcm(heads * _HEAD_WIDTH, devices, multiple)
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
        "mlp_ratio": (hidden + 0.5) / width,  # of which timm takes the whole part
        "num_classes": _CLASSES,
    }
    for name, value in (("reg_tokens", 2), ("num_reg_tokens", 2), ("init_values", _LAYER_SCALE)):
        if settings.get(name):
            small[name] = value
    try:
        return open_model(run.model.name, run.model.overrides | small)
    except ModelError as error:
        reason = error.told(MODEL_FLAG)
        raise UsageError(
            f"--self_check cannot make --model {run.model.name} small: {reason}"
        ) from None
