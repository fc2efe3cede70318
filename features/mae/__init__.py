"""Masked autoencoding: MAE (``--objective mae``)."""
