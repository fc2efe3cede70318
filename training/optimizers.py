"""What the optimizers of all backends share, independent of how parameters are sharded.

In this order: how each parameter is updated (AdamW, Lion or Muon), Muon's arithmetic, the moving
average of the weights (EMA), stochastic rounding to bf16, and the count of skipped steps.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from timm.optim.muon import DEFAULT_NS_STEPS, get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor

from models.timm_private import MUON_COEFFICIENTS, is_suitable_for_muon
from training.feature_table import added_parameters

if TYPE_CHECKING:
    from models.spec import ModelSpec
    from training.config import EmaConfig, OptimizerConfig

# -- How each parameter is updated ----------------------------------------------------------------
#
# By its name and shape in the plain model, as timm's ``param_groups_layer_decay``,
# ``param_groups_weight_decay`` and ``Muon`` decide it.


@dataclass(frozen=True)
class Update:
    """How one parameter is updated."""

    rule: str
    """A choice of ``--optimizer``."""
    weight_decay: float
    lr_scale: float = 1.0
    """The factor of the learning rate."""
    matrix: tuple[int, int] | None = None
    """Rows and columns of the matrix that Muon treats the parameter as; None for other rules."""
    factor: Literal["last_layer", "backbone"] | None = None
    """The field of ``StepRates`` that also multiplies its learning rate."""


Updates = Mapping[str, Update]
"""How each trained parameter is updated, by its name in the plain model. Others are frozen."""


def updates_of(config: OptimizerConfig, model: ModelSpec, *, heads_first: bool = False) -> Updates:
    """Return how ``config`` updates each parameter of ``model``. Learning rates are scaled by
    ``layer_decay`` to the power of the number of layers between the parameter's layer and the last
    one. ``heads_first``: ``StepRates.backbone`` also scales that of the backbone."""
    shapes = {name: parameter.shape for name, parameter in model.meta.named_parameters()}
    without_decay = undecayed(shapes, config.no_decay or (), model.no_weight_decay)
    last = max(model.layers.values())
    updates: dict[str, Update] = {}
    factors: dict[str, Literal["last_layer", "backbone"]] = {}
    if heads_first:
        heads = (*model.head_prefixes, *added_parameters())
        factors = {name: "backbone" for name in shapes if not name.startswith(heads)}
    factors |= dict.fromkeys(model.last_layers, "last_layer")
    for name, shape in shapes.items():
        if name in model.frozen or (config.linear_probe and not name.startswith("head.")):
            continue
        rule, matrix = config.optimizer, None
        if rule == "muon" and is_suitable_for_muon(shape):
            matrix = (shape[0], math.prod(shape[1:]))
        elif rule == "muon":
            rule = "adamw"
        updates[name] = Update(
            rule,
            weight_decay=0.0 if name in without_decay else config.weight_decay,
            lr_scale=config.layer_decay ** (last - model.layers[name]),
            matrix=matrix,
            factor=factors.get(name),
        )
    return updates


def all_by_adamw(model: ModelSpec, weight_decay: float) -> Updates:
    """Return AdamW with the same settings for every parameter of a model that is trained."""
    names = (name for name, _ in model.meta.named_parameters() if name not in model.frozen)
    return {name: Update("adamw", weight_decay) for name in names}


def undecayed(
    shapes: Mapping[str, torch.Size], kinds: Collection[str], embeddings: Collection[str]
) -> set[str]:
    """Return the names of the parameters without weight decay: those of these ``kinds``.

    "biases": names that end with "bias"; "norms": other parameters of one dimension, such as the
    scales of norms and layers; "embeddings": names that match one of the patterns ``embeddings``.
    timm excludes all three from weight decay.
    """
    names = set()
    for name, shape in shapes.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in embeddings):
            kind = "embeddings"
        elif name.endswith("bias"):
            kind = "biases"
        else:
            kind = "norms" if len(shape) <= 1 else ""
        if kind in kinds:
            names.add(name)
    return names


# -- Muon's arithmetic for unsharded matrices, by timm's functions ---------------------------------

MOMENTUM = 0.95
"""The momentum of the gradients; timm's default."""


def ns_dtype(precision: str) -> torch.dtype:
    """Return the dtype that matrices are orthogonalized in: bf16 as in timm, or fp32."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def orthogonalized(matrices: Tensor, eps: float) -> Tensor:
    """Return nearly orthogonalized matrices, (..., rows, columns) with at most one leading
    dimension, computed with the default number of Newton-Schulz iterations of
    ``timm.optim.Muon``."""
    return zeropower_via_newtonschulz(
        matrices, DEFAULT_NS_STEPS, MUON_COEFFICIENTS, eps=eps, dtype=matrices.dtype
    )


def lr_factor(matrix: tuple[int, int]) -> float:
    """Return the factor of a matrix's learning rate: 0.2 times the square root of its longer side,
    the default of ``timm.optim.Muon``, which makes updates about as large as AdamW's."""
    return get_lr_scale(torch.Size(matrix))


# -- The moving average of the weights (EMA) ------------------------------------------------------

UPDATES = "ema_updates"
"""The name in ``State.step`` of the number of EMA updates."""
_WARMUP_POWER = 2 / 3  # timm's default


def share_of_first(config: EmaConfig, updates: int) -> float:
    """Return the fraction of the EMA after this many ``updates`` that the weights of the first
    update still are, from 0 to 1; see ``WeightAverage.update``."""
    decay = config.model_ema_decay
    if not config.model_ema_warmup:
        return decay ** max(updates - 1, 0)
    share = 1.0
    for update in range(2, updates + 1):
        share *= min(decay, 1 - update**-_WARMUP_POWER)
        if share < 1e-6:  # after 120 updates, whatever the decay
            break
    return share


class WeightAverage:
    """An fp32 EMA of each parameter, with its layout, by timm's formula (``ModelEmaV3``)."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        config: EmaConfig,
        updates: Tensor,
    ) -> None:
        """Start ``values``, which may be the parameters of another model, at ``weights``;
        ``updates`` is a scalar 0.0 on the device."""
        self._weights, self.values, self._config = dict(weights), dict(values), config
        self.updates = updates
        """The number of updates averaged so far."""
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Set the average to the current weights."""
        for name, weights in self._weights.items():
            self.values[name].copy_(weights * 1.0)  # XLA would share the weights themselves

    @torch.no_grad()
    def update(self, skipped: Tensor, newest: Tensor | float | None = None) -> None:
        """Update the average after a step; no change if the step was ``skipped`` (1.0, else 0.0).

        ``newest``: the fraction that the newest weights contribute. None: 1 in the first update,
        then 1 - decay; with warmup, n^(-2/3) in update n if that is larger.
        """
        takes = 1 - skipped.to(self.updates.device)  # with --cpu_offload the host
        self.updates.add_(takes)
        if newest is None:
            newest = torch.full_like(self.updates, 1 - self._config.model_ema_decay)
            if self._config.model_ema_warmup:
                newest = torch.maximum(newest, self.updates.clamp(min=1) ** -_WARMUP_POWER)
            newest = torch.where(self.updates > 1, newest, 1.0)
        newest = newest * takes
        for name, weights in self._weights.items():
            self._lerp(self.values[name], weights, newest)

    @contextlib.contextmanager
    def in_place_of_weights(self, exchanged: Callable[[], None]) -> Iterator[None]:
        """Let the model compute with the average inside. ``exchanged`` is called after weights and
        average are swapped, at the start and at the end."""

        def exchange() -> None:
            with torch.no_grad():
                for name, weights in self._weights.items():
                    self._swap(self.values[name], weights)
            exchanged()

        exchange()
        try:
            yield
        finally:
            exchange()

    @staticmethod
    def _lerp(average: Tensor, weights: Tensor, share: Tensor) -> None:
        average.lerp_(weights, share)

    @staticmethod
    def _swap(average: Tensor, weights: Tensor) -> None:
        old = weights.detach().clone()
        weights.copy_(average)
        average.copy_(old)


# -- Stochastic rounding to bf16 ------------------------------------------------------------------
#
# Numbers are rounded up or down at random, so that nothing is lost on average. A moving average
# that keeps 99.9 % of itself changes by less than half of bf16's spacing: with rounding to nearest
# it would never change. The random bits are a hash of an entry's index and a key: this needs no
# generator, whose state would have to be saved, and each device computes the bits of its own
# entries.

_DISCARDED = 0xFFFF
"""The bits of an fp32 number that bf16 drops."""
_LARGEST = torch.finfo(torch.bfloat16).max
_MURMUR = (-2048144789, -1028477387)
"""The factors of MurmurHash3's last step, by which each bit of a number changes each bit of its
hash with about equal chance (0x85EBCA6B and 0xC2B2AE35 as int32)."""
_KEY_STRIDE = -1640531527
"""Between the keys of successive steps: 2**32 divided by the golden ratio, as int32."""
_RUN = 1 << 12
"""The longest range computed at once, along a dimension."""
Bitcast = Callable[[Tensor, torch.dtype], Tensor]
"""Returns the numbers of a dtype that have the same bits."""


def key_of(seed: int, *names: object) -> int:
    """Return the key of a run's ``seed`` and of these names, as an int32 number."""
    return zlib.crc32(repr((seed, names)).encode()) - 2**31


def random_bits(shape: Sequence[int], device: torch.device, key: Tensor, step: Tensor) -> Tensor:
    """Return 32 random bits for each entry of a tensor, int32, on the device. They follow from the
    entry's index, ``key`` (int32) and the number of the ``step``, scalars on the device."""
    # Flat indices, modulo 2**32, computed from the indices along each dimension. A single arange
    # would be a constant in the compiled program, as large as the whole tensor and the same on all
    # devices.
    index = torch.zeros((), dtype=torch.int32, device=device)
    for size in shape:
        if size <= _RUN:
            along = torch.arange(size, dtype=torch.int32, device=device)
        else:
            starts = torch.arange(-(-size // _RUN), dtype=torch.int32, device=device) * _RUN
            run = torch.arange(_RUN, dtype=torch.int32, device=device)
            along = (starts.unsqueeze(-1) + run).flatten()[:size]
        index = index.unsqueeze(-1) * size + along
    return hashed(index + hashed(key + step.to(torch.int32) * _KEY_STRIDE))


def to_bf16(x: Tensor, bits: Tensor, same_bits: Bitcast = Tensor.view) -> Tensor:
    """Round fp32 numbers to one of their two bf16 neighbors, the nearer one more often.

    ``bits``: random int32, of which the lower 16 are used. Numbers that bf16 represents exactly and
    non-finite ones are unchanged; numbers above bf16's maximum become that.
    """
    x_bits = same_bits(x, torch.int32)
    noise = torch.where(x.abs() < _LARGEST, bits & _DISCARDED, 0)
    rounded = same_bits((x_bits + noise) & ~_DISCARDED, torch.float32)
    # NaN with its lower bits cut off could become infinite.
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def upper(bits: Tensor) -> Tensor:
    """Return the half of the random bits that ``to_bf16`` does not use."""
    return _shifted_right(bits, 16)


def round_moments(
    moments: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    key: Tensor,
    same_bits: Bitcast = Tensor.view,
) -> None:
    """Write AdamW's new moments in fp32, ``exact``, into those in bf16, at random by ``key`` and
    the step's number. A skipped step changes nothing: its moments are bf16 numbers."""
    mean = exact["exp_avg"]
    bits = random_bits(mean.shape, mean.device, key, exact["step"])
    moments["exp_avg"].copy_(to_bf16(mean, bits, same_bits))
    moments["exp_avg_sq"].copy_(to_bf16(exact["exp_avg_sq"], upper(bits), same_bits))


def hashed(x: Tensor) -> Tensor:
    """Return a hash of each int32 number, as int32; different numbers have different hashes."""
    first, second = _MURMUR
    x = (x ^ _shifted_right(x, 16)) * first
    x = (x ^ _shifted_right(x, 13)) * second
    return x ^ _shifted_right(x, 16)


def _shifted_right(x: Tensor, count: int) -> Tensor:
    """Shift bits right by ``count``, with zeros from the left."""
    # Not ``>>``, which torch_xla 2.9 turns into a division, rounded towards zero.
    places = torch.full((), count, dtype=torch.int32, device=x.device)
    return torch.bitwise_right_shift(x, places) & ((1 << (32 - count)) - 1)


# -- Steps that are skipped because loss or gradient norm is not finite ---------------------------
#
# Counted on the device: a backend computes these along with the step, and the loop reads the counts
# together with the loss of a log step, the sum of losses at the end of an epoch.

COUNTS = ("total", "in_a_row", "longest_row", "before_first")
"""The names of the elements of the counts, float32 (4,), initially zeros. The last one counts the
steps before the first skipped one."""


def not_finite(loss: Tensor, norm: Tensor) -> Tensor:
    """Return 1.0 if either scalar is infinite or not a number, else 0.0, as float32."""
    both = torch.stack([loss.detach().float(), norm.detach().float()])
    return 1.0 - torch.isfinite(both).all().float()


def count_skipped(counts: Tensor, skipped: Tensor) -> Tensor:
    """Return the counts after one more step, a new tensor (4,); ``skipped`` is 1.0 or 0.0."""
    total, row, longest, before_first = counts.unbind()
    total, row = total + skipped, (row + 1) * skipped
    before_first = before_first + (total == 0).float()
    return torch.stack([total, row, torch.maximum(longest, row), before_first])


def add_loss(sums: Tensor, loss: Tensor, skipped: Tensor) -> Tensor:
    """Return the sum of losses and the number of steps in it after one more step, a new tensor
    (2,); a step with ``skipped`` 1.0 does not count."""
    counts = 1.0 - skipped
    step = torch.stack([loss.detach().float(), torch.ones_like(counts)])
    return sums + torch.where(counts > 0, step, 0.0)  # no product: the loss may be NaN
