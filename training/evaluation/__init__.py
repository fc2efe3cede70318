"""Use a trained model: evaluate it, predict with it, compute and evaluate its features."""
