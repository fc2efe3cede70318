"""The objectives by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from training.backend import Backend
from training.objectives.base import Objective

if TYPE_CHECKING:
    from training.resolve import Run

OBJECTIVES = {
    "classify": "training.objectives.classify:Classification",
    "classify packed": "training.objectives.classify:PackedClassification",
    "mae": "training.objectives.mae:Reconstruction",
    "dino": "training.objectives.dino:SelfDistillation",
}
"""Module and class of each objective, by name, imported on use; "packed": for sequences of several
images."""


def open_objective(
    run: Run, backend: Backend, say: Callable[[str], None] = lambda line: None
) -> Objective:
    """Return the objective of ``run``. Must be called before the first step is recorded."""
    chosen = run.config.objective.objective + (" packed" if run.model.packing else "")
    module, _, name = OBJECTIVES[chosen].partition(":")
    return cast(Objective, getattr(import_module(module), name)(run, backend, say))
