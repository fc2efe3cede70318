"""``--plan``: which slice, and which flags, train a model at what cost."""
