"""What a model is trained for: the interface, its implementations, and their flags."""
