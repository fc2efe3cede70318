"""The PyTorch/XLA backend: SPMD FSDP, or nested FSDP with one process per device."""
