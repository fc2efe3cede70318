"""Weights that training, or the use of a model, begins with."""
