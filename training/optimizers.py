"""Finds and counts, on the device, the steps whose loss or gradient norm is not finite.

Nothing is read by the host: a backend computes these beside the step and hands the counts out, the
loop reads them with a log step's loss.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from timm.optim.muon import DEFAULT_NS_STEPS, get_lr_scale, zeropower_via_newtonschulz

from models.spec import ModelSpec
from models.timm_private import MUON_COEFFICIENTS, is_suitable_for_muon
from training.config import OptimizerConfig

# ------------------------------------------------------------------------------------------------
# How each parameter is updated: by which rule, how fast, with which decay, or not at all.
#
# It follows from a parameter's name and shape in the plain model alone, whatever backend shards it.
# Groups are timm's: ``timm.optim.param_groups_layer_decay``, ``param_groups_weight_decay`` and the
# rule by which ``timm.optim.Muon`` leaves a parameter to AdamW.


Rule = Literal["adamw", "lion", "muon"]
MOMENTS: dict[Rule, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}
"""What each rule keeps of a parameter, in tensors like it, by the names in PyTorch's and timm's
optimizers and in checkpoints."""


@dataclass(frozen=True)
class Update:
    """Says how one parameter is updated."""

    rule: Rule
    weight_decay: float
    lr_scale: float = 1.0
    """What the learning rate is multiplied by."""
    matrix: tuple[int, int] | None = None
    """Rows and columns of the matrix that Muon takes the parameter for; None with other rules."""


Updates = Mapping[str, Update]
"""How each parameter that trains is updated, by its name in the plain model; those that are not
there keep their values."""


def updates_of(config: OptimizerConfig, model: ModelSpec) -> Updates:
    """Return how ``config`` updates each parameter of ``model``."""
    shapes = {name: parameter.shape for name, parameter in model.meta.named_parameters()}
    scales = lr_scales(model.layers, config.layer_decay)
    without = undecayed(shapes, config.no_decay or (), model.no_weight_decay)
    return {
        name: _update(
            config.optimizer,
            shape,
            0.0 if name in without else config.weight_decay,
            scales[name],
        )
        for name, shape in shapes.items()
        if not config.linear_probe or name in model.head_parameters
    }


def all_by_adamw(model: ModelSpec, weight_decay: float) -> Updates:
    """Return the updates of a model whose parameters are all treated alike."""
    return {name: Update("adamw", weight_decay) for name, _ in model.meta.named_parameters()}


def _update(optimizer: Rule, shape: torch.Size, weight_decay: float, lr_scale: float) -> Update:
    if optimizer == "muon":
        if is_suitable_for_muon(shape):
            return Update("muon", weight_decay, lr_scale, (shape[0], math.prod(shape[1:])))
        optimizer = "adamw"
    return Update(optimizer, weight_decay, lr_scale)


def lr_scales(layers: Mapping[str, int], layer_decay: float) -> dict[str, float]:
    """Return what each parameter's learning rate is multiplied by, given its layer's number.

    It is ``layer_decay`` to the power of how many layers lie between it and the last one.
    """
    last = max(layers.values())
    return {name: layer_decay ** (last - layer) for name, layer in layers.items()}


def undecayed(
    shapes: Mapping[str, torch.Size], kinds: Collection[str], embeddings: Collection[str]
) -> set[str]:
    """Return the parameters that are not decayed: those of these ``kinds``.

    "biases": whose names end with it; "norms": all others of one dimension, such as the scales of
    norms and of layers; "embeddings": whose names match one of the patterns ``embeddings``. All
    three together are what timm does not decay.
    """

    def kind(name: str, shape: torch.Size) -> str:
        if any(fnmatch.fnmatch(name, pattern) for pattern in embeddings):
            return "embeddings"
        if name.endswith("bias"):
            return "biases"
        return "norms" if len(shape) <= 1 else ""

    return {name for name, shape in shapes.items() if kind(name, shape) in kinds}


# ------------------------------------------------------------------------------------------------
# Rounds numbers to bf16 up or down at random, so that on average nothing is lost.
#
# A moving average that keeps 99.9 % of itself changes by less than half of what bf16 can tell
# apart: rounded to the nearest number it would stay where it is for ever. The random bits are a
# hash of where a number is and of a key: they need no generator, whose state would have to be
# kept and whose other draws would change, and are as many on each device as the device has
# numbers.


_DISCARDED = 0xFFFF
"""The bits of an fp32 number that bf16 has not."""
_LARGEST = torch.finfo(torch.bfloat16).max
_FACTORS = (-2048144789, -1028477387)
"""Of MurmurHash3's last step, by which each bit of a number changes each bit of its hash with
about equal chance (0x85EBCA6B and 0xC2B2AE35 as int32)."""
_STEP = -1640531527
"""What keys of one tensor are apart: 2**32 divided by the golden ratio, as int32."""
_RUN = 1 << 12


def random_bits(
    shape: Sequence[int], device: torch.device, key: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """Return 32 random bits for each entry of a tensor, int32, on the device.

    They follow from the entry's place, from ``key`` and from the number of the ``step``: scalars on
    the device, the one int32, the other whole.
    """
    seed = hashed(key + step.to(torch.int32) * _STEP)
    return hashed(_places(shape, device) + seed)


def key_of(seed: int, *names: object) -> int:
    """Return the key of a run's ``seed`` and of what has these names, as an int32 number."""
    return zlib.crc32(repr((seed, names)).encode()) - 2**31


Bitcast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""Returns the numbers of a dtype that have the same bits."""


def to_bf16(
    x: torch.Tensor, bits: torch.Tensor, same_bits: Bitcast = torch.Tensor.view
) -> torch.Tensor:
    """Round fp32 numbers to one of their two neighbours in bf16, each the likelier the nearer.

    ``bits`` are random, int32: the lower 16 are used. What bf16 has stays as it is, what is not
    finite, too; what is larger than bf16's largest number becomes that.
    """
    own = same_bits(x, torch.int32)
    noise = torch.where(x.abs() < _LARGEST, bits & _DISCARDED, 0)
    rounded = same_bits((own + noise) & ~_DISCARDED, torch.float32)
    # Cut off, something that is not a number could become infinite.
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def upper(bits: torch.Tensor) -> torch.Tensor:
    """Return the other half of random bits, those that ``to_bf16`` does not use."""
    return _shifted(bits, 16)


def hashed(x: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int32 number, as int32; different ones have different hashes."""
    first, second = _FACTORS
    x = (x ^ _shifted(x, 16)) * first
    x = (x ^ _shifted(x, 13)) * second
    return x ^ _shifted(x, 16)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Move bits ``count`` places down, with zeros from above."""
    # Not ``>>``, which torch_xla 2.9 makes a division of, rounded towards zero.
    places = torch.full((), count, dtype=torch.int32, device=x.device)
    return torch.bitwise_right_shift(x, places) & ((1 << (32 - count)) - 1)


def _places(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return each entry's place in the flattened tensor, modulo 2**32, as int32.

    It is computed of the places along each dimension: a count of all would be a constant of the
    compiled program as large as the tensor, and no part of it a device's own.
    """
    places = torch.zeros((), dtype=torch.int32, device=device)
    for size in shape:
        places = places.unsqueeze(-1) * size + _count(size, device)
    return places


def _count(size: int, device: torch.device) -> torch.Tensor:
    if size <= _RUN:
        return torch.arange(size, dtype=torch.int32, device=device)
    starts = torch.arange(-(-size // _RUN), dtype=torch.int32, device=device) * _RUN
    run = torch.arange(_RUN, dtype=torch.int32, device=device)
    return (starts.unsqueeze(-1) + run).flatten()[:size]


# ------------------------------------------------------------------------------------------------
# Muon's arithmetic for whole matrices, by timm's functions: what no sharding changes.


MOMENTUM = 0.95
"""How much of the moving average of gradients a step keeps; timm's default."""


def ns_dtype(precision: str) -> torch.dtype:
    """Return the dtype that matrices are orthogonalized in: timm's bf16 where a run computes in
    bf16, else fp32."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def orthogonalized(matrices: torch.Tensor, eps: float) -> torch.Tensor:
    """Return matrices, (..., rows, columns) with at most one dimension before, made nearly
    orthogonal by as many Newton-Schulz iterations as ``timm.optim.Muon`` makes by default."""
    return zeropower_via_newtonschulz(
        matrices, DEFAULT_NS_STEPS, MUON_COEFFICIENTS, eps=eps, dtype=matrices.dtype
    )


def lr_factor(matrix: tuple[int, int]) -> float:
    """Return what the learning rate of a matrix is multiplied by: 0.2 times the root of its longer
    side, ``timm.optim.Muon``'s default, which makes an update as long as a typical one of AdamW."""
    return get_lr_scale(torch.Size(matrix))


# ------------------------------------------------------------------------------------------------
# The moving average of the weights (EMA): timm's formula, and what a resumed run says of it.


UPDATES = "ema_updates"
"""The name, in ``State.step``, of the number of updates that the average has seen."""
_POWER = 2 / 3
"""Of the warm-up: timm's default."""


def weight_of_newest(updates: torch.Tensor, decay: float, *, warmup: bool) -> torch.Tensor:
    """Return with which weight, from 0 to 1, the newest weights go into the average.

    ``updates``, a scalar, is the number of the update, from 1 on; all is computed on its device.
    This is 1 - ``ModelEmaV3.get_decay`` of timm 1.0.31: 1 in the first update, then 1 - ``decay``;
    with ``warmup`` n^(-2/3) in update n, where that is more.
    """
    weight = torch.full_like(updates, 1 - decay)
    if warmup:
        weight = torch.maximum(weight, updates.clamp(min=1) ** -_POWER)
    return torch.where(updates > 1, weight, 1.0)


@contextlib.contextmanager
def exchanged_inside(exchange: Callable[[], None], then: Callable[[], None]) -> Iterator[None]:
    """Let weights and average be exchanged inside: ``exchange`` does it, and undoes it at the end;
    ``then`` is called after each."""
    exchange()
    then()
    try:
        yield
    finally:
        exchange()
        then()


def note_of_resume(*, keeps: bool, has: bool) -> str | None:
    """Return what a run says that resumes a checkpoint; None if all goes on as it was.

    ``keeps``: the run keeps an average; ``has``: the checkpoint has one.
    """
    if keeps and not has:
        return "note: the checkpoint has no EMA of the weights: it begins with these weights"
    if has and not keeps:
        return "note: the checkpoint's EMA of the weights is dropped: --model_ema is not given"
    return None


# ------------------------------------------------------------------------------------------------


COUNTS = ("total", "in_a_row", "longest_row")
"""The names of the elements of the counts, in their order."""


def not_finite(loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Return 1.0 if either scalar is infinite or not a number, else 0.0, as float32."""
    both = torch.stack([loss.detach().float(), norm.detach().float()])
    return 1.0 - torch.isfinite(both).all().float()


def no_counts() -> torch.Tensor:
    """Return the counts before the first step: zeros, float32 (3,), on the CPU."""
    return torch.zeros(len(COUNTS))


def count_skipped(counts: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """Return the counts after one more step, a new tensor (3,); ``skipped`` is 1.0 or 0.0."""
    total, row, longest = counts.unbind()
    row = (row + 1) * skipped
    return torch.stack([total + skipped, row, torch.maximum(longest, row)])
