"""What a trained model is used for: naming what images show, and measuring how well it does."""
