"""Marks of single cases of a test, and tables of cases."""

from collections.abc import Iterable

import pytest

from xla_fsdp.tpu import NEWER_LIBRARY, NEWER_LIBTPU

NEEDS_NEWER_LIBTPU = pytest.mark.skipif(
    not NEWER_LIBRARY.exists(), reason=f"libtpu {NEWER_LIBTPU} is not here: make tpu-compiler"
)


def with_newer_libtpu(*values: object):
    """A long case for which the newer TPU compiler must have been fetched."""
    return pytest.param(*values, marks=[pytest.mark.long, NEEDS_NEWER_LIBTPU])


def long(*values: object):
    """A case for ``make test-long`` alone."""
    return pytest.param(*values, marks=pytest.mark.long)


def spread(rows: Iterable, columns: Iterable, every: int) -> list[tuple]:
    """One of so many pairs of a table, in diagonals: some of each row, and of each column."""
    columns = list(columns)
    return [
        (row, column)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
        if (i + j) % every == 0
    ]
