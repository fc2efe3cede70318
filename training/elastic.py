"""Elastic jobs: a launcher may start the same command on several numbers of slices or nodes."""

import os
from collections.abc import Callable

from training.errors import UsageError


def check_elastic(variable: str, noun: str, flag: str, resolve: Callable[[int], object]) -> None:
    """Resolve the run on every number of slices or nodes that its launcher may start it on.

    ``variable``: the environment variable in which the launcher passes these numbers, MIN:MAX;
    ``flag``: what the user has set, before these numbers. Raises UsageError, which names the
    number.
    """
    least, _, most = os.environ.get(variable, "").partition(":")
    for count in range(int(least), int(most) + 1) if most else ():
        try:
            resolve(count)
        except UsageError as error:
            raise UsageError(f"with {count} {noun} ({flag}{least}:{most}): {error}") from None
