"""Checkpoint folders: their format, safe reading, and which ones to resume or remove."""
