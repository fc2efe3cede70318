"""Trained weights: find them, read what describes them, and adapt them to a model."""
