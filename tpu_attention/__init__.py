"""Attention on TPUs by Pallas kernels, for every backend: the kernels, and what chooses them."""
