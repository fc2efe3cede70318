"""Attention on TPUs: which implementation a block uses, and the Pallas kernels."""
