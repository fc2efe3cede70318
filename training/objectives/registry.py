"""Opens the objective of a run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from training.backend import Backend
from training.objectives.base import Objective

if TYPE_CHECKING:
    from training.config import RunConfig
    from training.resolve import Run

_CLASSIFICATION = "training.objectives.classify:Classification"


def objective_class(config: RunConfig) -> type[Objective]:
    """Return the class of the objective that the flags choose."""
    added = (feature.objective for feature in config.active_features)
    module, _, name = next(filter(None, added), _CLASSIFICATION).partition(":")
    return cast(type[Objective], getattr(import_module(module), name))


def open_objective(
    run: Run, backend: Backend, say: Callable[[str], None] = lambda line: None
) -> Objective:
    """Return the objective of ``run``. Must be called before the first step is recorded."""
    return objective_class(run.config)(run, backend, say)
