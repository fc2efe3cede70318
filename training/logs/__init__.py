"""What a run reports of itself: to people, and in files for later."""
