"""What compiled steps tell of steps that were not: how far the arithmetic is off, and how surely.

The logarithm of compiled over computed is taken as a sum of effects: of the generation of chips, of
each choice on that generation, and of the step itself. How large each usually is, is assumed
(``EFFECTS``); that gives for any candidate a mean and a deviation (regression with Gaussian
processes, whose kernel counts the effects that two candidates share).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_fsdp.plan.space import Candidate

EFFECTS: list[tuple[float, Callable[[Candidate], Any]]] = [
    (0.15, lambda c: 0),
    (0.15, lambda c: c.kind),
    (0.12, lambda c: (c.kind, c.grad_ckpt)),
    (0.15, lambda c: (c.kind, c.attention)),
    (0.12, lambda c: (c.kind, c.mesh.tensor)),
    (0.12, lambda c: (c.kind, c.mesh.domain)),
    (0.15, lambda c: (c.kind, c.mesh.fsdp * c.grad_accum_steps)),  # images of a device in a pass
    (0.05, lambda c: c.topology),
    (0.03, lambda c: (c.topology, c.mesh, c.grad_ckpt, c.attention)),
]
"""Deviations of the logarithm, and what candidates that share the effect have in common."""
_OWN = 0.04
"""What no other step tells of a step."""


@dataclass(frozen=True)
class Correction:
    """What a computed figure is to be multiplied by, and its relative uncertainty."""

    factor: float
    deviation: float


def corrections(
    compiled: Sequence[tuple[Candidate, float]], asked: Sequence[Candidate]
) -> list[Correction]:
    """Return the correction of each candidate asked about.

    ``compiled`` are candidates with compiled over computed.
    """
    alone = sum(deviation**2 for deviation, _ in EFFECTS) + _OWN**2
    if not compiled:
        return [Correction(1.0, math.sqrt(alone)) for _ in asked]
    known = [candidate for candidate, _ in compiled]
    among = _shared(known, known) + _OWN**2 * np.eye(len(known))
    across = _shared(asked, known)
    weights = np.linalg.solve(among, across.T)
    means = weights.T @ np.log([ratio for _, ratio in compiled])
    variances = alone - np.einsum("ij,ji->i", across, weights)
    return [
        Correction(math.exp(mean), math.sqrt(max(variance, _OWN**2)))
        for mean, variance in zip(means, variances, strict=True)
    ]


def _shared(some: Sequence[Candidate], others: Sequence[Candidate]) -> Any:
    """Return the covariance of each of some with each of the others."""
    total = np.zeros((len(some), len(others)))
    for deviation, effect in EFFECTS:
        numbers: dict[Any, int] = {}
        left = np.array([numbers.setdefault(effect(c), len(numbers)) for c in some])
        right = np.array([numbers.setdefault(effect(c), len(numbers)) for c in others])
        total += deviation**2 * (left[:, None] == right[None, :])
    return total
