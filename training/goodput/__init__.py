"""``python -m training.goodput RUN_DIR``: the share of wall time that went to useful steps."""
