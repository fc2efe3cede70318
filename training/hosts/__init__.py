"""What the processes of a run, on one host or many, tell each other, and how they start and end."""
