"""Write scikit-learn's bundled handwritten digits as an image folder: real data, no download.

    python -m data.digits datasets/digits

1,797 grey 8x8 images of the UCI Optical Recognition of Handwritten Digits set
(E. Alpaydin, C. Kaynak, 1998), shipped inside scikit-learn: four fifths to
train/<digit>/, one fifth to val/<digit>/, as PNG.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 8
MAX_VALUE = 16  # scikit-learn's grey levels run from 0 to 16


def write_digits(root: str | os.PathLike[str]) -> Path:
    """Write the tree below ``root`` unless it is there; returns the path.

    Written to a neighbouring name first and renamed, so that an interrupted run
    leaves no half-filled tree. Each class is split by a fixed shuffle.
    """
    from sklearn.datasets import load_digits

    root = Path(root)
    if root.is_dir():
        return root
    digits = load_digits()
    pixels = np.round(digits.images * (255 / MAX_VALUE)).astype(np.uint8)
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    rng = np.random.default_rng(0)
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(digits.target == digit))
        val_count = round(len(members) / 5)
        for split, indices in (("val", members[:val_count]), ("train", members[val_count:])):
            folder = partial / split / str(digit)
            folder.mkdir(parents=True)
            for index in indices:
                Image.fromarray(pixels[index]).save(folder / f"{index:04d}.png")
    partial.rename(root)
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the digits image folder.")
    parser.add_argument("root", nargs="?", default="datasets/digits", help="where to write")
    try:
        print(f"digits: {write_digits(parser.parse_args().root)}")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: {error.filename}: {error.strerror}\n")


if __name__ == "__main__":
    main()
