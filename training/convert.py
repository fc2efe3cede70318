"""``python3 -m training.convert`` is now ``python3 -m tools.convert``."""

import sys

sys.exit("training.convert has moved: python3 -m tools.convert")
