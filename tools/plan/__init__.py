"""``--plan``: find the slices and flags to train a model, with their time and cost."""
