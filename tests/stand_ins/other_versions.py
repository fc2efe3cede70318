"""run_vit_training.py where every package is of a version that nobody has tried."""

import sys

import run_vit_training
from training import errors

if __name__ == "__main__":
    errors.installed_version = lambda package: "99.0.0"
    sys.exit(run_vit_training.main())
