"""The GPU backend: PyTorch's FSDP2 or NVIDIA's Megatron-FSDP, a process a device."""
