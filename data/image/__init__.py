"""What becomes of one image: decoding, augmentation, resizing, how it is normalised."""
