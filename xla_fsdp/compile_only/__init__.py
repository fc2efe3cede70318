"""Whether a model fits a TPU slice, and how fast it could be, told by the TPU compiler."""
