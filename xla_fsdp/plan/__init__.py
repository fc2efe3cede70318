"""Which TPU slice, mesh and flags for a training: an analytic model, then the TPU compiler."""
