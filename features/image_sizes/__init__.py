"""Training images of several sizes: ``--buckets``, ``--image_size_schedule``."""
