"""``--plan``: which slice or how many GPUs, and which flags, train a model at what cost."""
