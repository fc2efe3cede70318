"""Use a trained model: evaluate it, predict with it, compute and judge its features."""
