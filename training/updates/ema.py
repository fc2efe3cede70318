"""The moving average of the weights (EMA): timm's formula, and what a resumed run says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

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
