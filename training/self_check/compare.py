"""How far what was found is from what should be, and how far rounding alone may take it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from training.self_check.content import UPDATES
from training.self_check.reference import Outcome, Tensors

_BF16 = torch.finfo(torch.bfloat16).eps / 2
"""Half the distance from 1.0 to the next number: by such a share a value may be rounded."""
_EXACT = {"loss": 2e-5, "state": 2e-4}
"""Allowed in fp32, where other orders of summing show."""
_TIMES = 3.0
"""What is allowed is so many times as much as plain PyTorch's own rounding makes."""
_MOST = 0.3
"""Nothing allowed may hide a factor of 2."""
_SMALL = 0.1
"""A tensor whose values are smaller than this share of the typical one is measured against that:
some gradients are zero but for rounding, as of a bias that is the same for all keys."""


@dataclass(frozen=True)
class Distance:
    """How far some tensors are from others, relative: of all together, and of the worst one."""

    whole: float
    worst: float
    name: str = ""
    """Of the worst one."""


def distance(found: Tensors, expected: Tensors, start: Tensors | None = None) -> Distance:
    """Compare two sets of tensors; with ``start``, how far they have moved from there."""
    moved = {n: e - start[n] if start else e for n, e in expected.items()}
    off = {name: _square(found[name] - value) for name, value in expected.items()}
    size = {name: _square(value) for name, value in moved.items()}
    typical = sum(size.values()) / sum(value.numel() for value in moved.values())
    worst, name = 0.0, ""
    for each, value in moved.items():
        against = max(size[each], _SMALL**2 * typical * value.numel())
        relative = math.sqrt(off[each] / against)
        if not relative <= worst:  # also where it is not a number
            worst, name = relative, each
    return Distance(math.sqrt(sum(off.values()) / sum(size.values())), worst, name)


def _square(tensor: torch.Tensor) -> float:
    return tensor.double().square().sum().item()


def apart(found: list[float], expected: list[float]) -> float:
    """Return the largest relative distance of numbers."""
    each = [abs(f - e) / max(abs(e), 1e-9) for f, e in zip(found, expected, strict=True)]
    return max(x if math.isfinite(x) else math.inf for x in each)


@dataclass(frozen=True)
class Tolerances:
    """What is allowed where values are rounded by ``rounding``.

    ``plain`` is computed in fp32, ``rounded`` the same all in bf16: what lies between them is what
    rounding makes of this very model, and less of it is expected of finer numbers.
    """

    rounding: float
    plain: Outcome
    rounded: Outcome

    def loss(self) -> float:
        return min(_MOST, max(_EXACT["loss"], 8 * self.rounding))

    def norm(self) -> float:
        """Return what is allowed of the norm, which is not as far off as the gradient itself."""
        return max(self.state(update, "exp_avg", None).whole for update in (1, UPDATES))

    def state(self, update: int, kind: str, start: Tensors | None) -> Distance:
        rounded, plain = self.rounded.states[update][kind], self.plain.states[update][kind]
        far = distance(rounded, plain, start)
        return Distance(self._scaled(far.whole), self._scaled(far.worst))

    def _scaled(self, of_bf16: float) -> float:
        return min(_MOST, max(_EXACT["state"], _TIMES * of_bf16 * self.rounding / _BF16))
