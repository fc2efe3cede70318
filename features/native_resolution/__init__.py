"""Native resolution: sequences of several images, each whole and of any size."""
