"""Attention in SPMD programs: calls of the kernels of ``tpu_attention``, tokens over devices."""
