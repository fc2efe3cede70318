import pytest

from data.digits import write_digits
from tests.cli import DIGITS


@pytest.fixture(scope="session", autouse=True)
def digits():
    """The embedded data set, also where `make data` was not run."""
    if not DIGITS.exists():
        DIGITS.parent.mkdir(exist_ok=True)
        write_digits(DIGITS)
    return DIGITS
