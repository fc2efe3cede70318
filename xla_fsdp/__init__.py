"""The PyTorch/XLA backend: SPMD FSDP, or nested FSDP with a process a device."""

import os

# Before torch_xla is imported anywhere: its partitioner warns of its own deprecation at
# every compilation.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
