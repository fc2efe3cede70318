"""``python3 -m training.show_augmentations`` is now ``python3 -m tools.show_augmentations``."""

import sys

sys.exit("training.show_augmentations has moved: python3 -m tools.show_augmentations")
