"""Training objectives: the interface, its implementations, and their flags."""
