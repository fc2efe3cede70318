"""The sources of images: a source is one file, and all give batches through a ``BatchLoader``."""
