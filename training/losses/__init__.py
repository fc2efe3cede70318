"""What a model is shown of a batch, and what loss its answers have."""
