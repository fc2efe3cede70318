"""Optional parts of the program, each in one place (``training/feature.py``)."""
