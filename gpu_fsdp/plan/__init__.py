"""Which NVIDIA GPUs, mesh and flags for a training: by arithmetic alone, nothing is compiled."""
