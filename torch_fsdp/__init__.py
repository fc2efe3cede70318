"""FSDP2 on any device that PyTorch knows: CUDA, the CPU with gloo, others; a process a device."""
