"""Starts the program on many machines: TPU pods, GPU nodes, Slurm, GKE."""

IN_VAIN = (2, 3, 4, 5)
"""The program's exit codes after which a restart does not help: a mistake, losses that are not
finite, a folder that is full, too many unreadable images."""
