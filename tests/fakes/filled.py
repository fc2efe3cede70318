"""A model with its first weights, whole in this process's memory."""

from torch import nn

from models.spec import ModelSpec

# Arguments of timm's that make any of its models small.
SMALL = {
    "img_size": 32,
    "patch_size": 8,
    "depth": 3,
    "embed_dim": 48,
    "num_heads": 2,
    "num_classes": 7,
}


def filled(spec: ModelSpec, seed: int = 0) -> nn.Module:
    """The model on the CPU, filled unit by unit as a backend does it."""
    model = spec.build()
    for name, unit in spec.units(model):
        spec.initialize(unit, name, seed=seed)
    return model
