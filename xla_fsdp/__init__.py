"""The PyTorch/XLA backend: SPMD FSDP, or nested FSDP with a process a device."""
