"""Opens the objective of a run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from training.backend import Backend
from training.feature_table import objective_feature
from training.objectives.base import Objective

if TYPE_CHECKING:
    from training.config import RunConfig
    from training.resolve import Run

_CLASSIFICATION = "training.objectives.classify:Classification"


def objective_class(config: RunConfig) -> type[Objective]:
    """Return the class of the objective that the flags choose."""
    # The feature that adds the word to --objective decides; others change classification.
    by_word = objective_feature(config.objective.objective)
    deciding = config.active_features if by_word is None else [by_word]
    added = (feature.objective for feature in deciding)
    module, _, name = next(filter(None, added), _CLASSIFICATION).partition(":")
    return cast(type[Objective], getattr(import_module(module), name))


def open_objective(
    run: Run, backend: Backend, say: Callable[[str], None] = lambda line: None
) -> Objective:
    """Return the objective of ``run``. Must be called before the first step is recorded."""
    return objective_class(run.config)(run, backend, say)
