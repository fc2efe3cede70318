"""Reports of a run: for people, and in files for later use."""
