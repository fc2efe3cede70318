"""Marks of single cases of a test."""

import pytest


def long(*values: object):
    """A case for ``make test-long`` alone."""
    return pytest.param(*values, marks=pytest.mark.long)
