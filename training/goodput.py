"""``python3 -m training.goodput`` is now ``python3 -m tools.goodput``."""

import sys

sys.exit("training.goodput has moved: python3 -m tools.goodput")
