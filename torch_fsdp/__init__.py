"""FSDP2 on any PyTorch device (CUDA, the CPU with gloo, others), one process per device."""
