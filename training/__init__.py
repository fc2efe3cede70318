"""Everything the backends share: arguments, the one loop, metrics, checkpoints."""
