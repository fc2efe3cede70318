"""Checkpoint folders: what is in them, reading them safely, which to resume, which to keep."""
