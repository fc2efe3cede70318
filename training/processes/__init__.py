"""The processes of a run: how they start, exchange values, and stop."""
