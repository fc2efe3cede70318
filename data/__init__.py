"""Sources of images: each is one file, and all give batches through a ``BatchLoader``."""
