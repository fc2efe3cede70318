"""``python -m training.convert SRC DST``: weights in another form of file."""
