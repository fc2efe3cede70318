"""Checkpoint folders: what is in them, how they are read safely, which are resumed and removed."""
