"""Everything that the backends share: flags, mesh, step, loop, reports, checkpoints."""
