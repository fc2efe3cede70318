"""``--self_check``: the user's flags on the user's devices, proven on a small model in seconds."""
