"""The versions of packages whose private names are used, against those that are installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str | None:
    """Return the version of a package as pip knows it, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def warn_of_others(*written_for: Mapping[str, str]) -> None:
    """Say on stderr, in one line, which installed packages are not of the version ``written_for``.

    It maps packages to versions as the requirements files pin them. What a wheel was built for
    ("2.9.0+cu128") is no difference, and neither is a package that is not installed.
    """
    others = [
        f"{package} is {found}, not {expected}"
        for versions in written_for
        for package, expected in versions.items()
        if (found := installed_version(package)) is not None and found.partition("+")[0] != expected
    ]
    if others:
        print(
            f"run_vit_training.py: warning: {', '.join(others)}, for which this program's use of "
            "private functions was written: what fails oddly may be that",
            file=sys.stderr,
            flush=True,
        )
