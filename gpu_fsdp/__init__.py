"""What is NVIDIA's alone: Megatron-FSDP and TransformerEngine's blocks, over ``torch_fsdp``."""
