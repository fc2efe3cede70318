"""What a run tells of itself: to people, and in files for later."""
