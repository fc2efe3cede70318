"""Which product of attention a TPU computes, and the Pallas kernels of flash attention."""
