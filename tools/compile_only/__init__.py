"""``--compile_only``: compile the training step with the TPU compiler, without a TPU."""
