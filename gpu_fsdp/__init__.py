"""NVIDIA-specific parts over ``torch_fsdp``: Megatron-FSDP, TransformerEngine's blocks, FP8."""
