"""Image sources. A source is one file; all give batches through ``BatchLoader``."""
