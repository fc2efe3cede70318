"""Starts the program on many machines: TPU pods, GPU nodes, Slurm, GKE."""
