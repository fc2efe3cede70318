"""Domain parallelism on GPUs: the rows of an image over several processes."""
