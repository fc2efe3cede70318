"""The PyTorch/XLA backend: SPMD FSDP, or nested FSDP with a process a device."""

import os
import sys
from types import ModuleType

# Before torch_xla is imported anywhere: its partitioner warns of its own deprecation at
# every compilation.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


class _Unused(ModuleType):
    """A module whose names can be imported, and are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


# The same: it imports its export to StableHLO, and with that PyTorch's Inductor, for a second of
# each start. No run uses them.
sys.modules.setdefault("torch_xla.stablehlo", _Unused("torch_xla.stablehlo"))
