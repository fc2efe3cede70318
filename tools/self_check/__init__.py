"""``--self_check``: a small run of the same form, compared with plain PyTorch."""
