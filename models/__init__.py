"""Vision Transformers as plain ``nn.Module``s; no backend, no trainer."""

import sys
from types import ModuleType


class UnusedModule(ModuleType):
    """Stands for a module that a package imports and no run uses: its names can be imported, and
    are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


# Before timm is imported anywhere: this part of it, for its own training script, imports Weights &
# Biases wherever that is installed.
sys.modules.setdefault("timm.utils.summary", UnusedModule("timm.utils.summary"))
