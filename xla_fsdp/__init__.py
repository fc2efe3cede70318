"""The PyTorch/XLA backend: SPMD FSDP, or nested FSDP with a process a device."""

import os
import sys

from models import UnusedModule

# Before torch_xla is imported anywhere: its partitioner warns of its own deprecation at
# every compilation.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# The same: it imports its export to StableHLO, and with that PyTorch's Inductor, for a second of
# each start. No run uses them.
sys.modules.setdefault("torch_xla.stablehlo", UnusedModule("torch_xla.stablehlo"))
