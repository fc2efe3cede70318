"""What is asked of a run, and what is decided of it before a device starts."""
