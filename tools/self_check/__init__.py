"""``--self_check``: compare a small run with the user's flags with plain PyTorch."""
