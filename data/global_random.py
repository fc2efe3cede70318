"""Lets timm draw at random from numbers that a run can draw again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed, inside, the generators of Python's ``random`` and of NumPy that whole programs share.

    timm draws from both of them. Afterwards they are as they were. ``seed`` is below 2**32.
    """
    python, numpys = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
