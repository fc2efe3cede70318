"""``--compile_only``: what the TPU compiler says of the training step, without a TPU."""
