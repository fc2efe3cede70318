"""A model with its first weights, whole in this process's memory."""

from torch import nn

from models.spec import ModelSpec


def filled(spec: ModelSpec, seed: int = 0) -> nn.Module:
    """The model on the CPU, filled unit by unit as a backend does it."""
    model = spec.build()
    for name, unit in spec.units(model):
        spec.initialize(unit, name, seed=seed)
    return model
