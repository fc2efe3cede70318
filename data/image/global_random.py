"""Lets timm draw at random from numbers that a run can draw again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
from numpy.random.mtrand import get_bit_generator, set_bit_generator

_NUMPYS = np.random.MT19937()
"""In the place of NumPy's own: to change the two takes a tenth of the time of copying a state."""


@contextlib.contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed, inside, the generators of Python's ``random`` and of NumPy that whole programs share.

    timm draws from both of them. Afterwards they go on as they were (but that NumPy forgets the
    second of a pair of normal numbers). ``seed`` is below 2**32. Not to be used within itself.
    """
    python, numpys = random.getstate(), get_bit_generator()
    random.seed(seed)
    set_bit_generator(_NUMPYS)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        set_bit_generator(numpys)
