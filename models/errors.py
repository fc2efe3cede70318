"""The one error that asking for a model can end with."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ARGUMENT = re.compile(r"<(\w+)>")


class ModelError(Exception):
    """The model that was asked for cannot be: one line that says why, or what to change.

    Arguments of the model stand in the text as ``<img_size>``; ``told`` writes them as a user
    knows them, ``str()`` by their own names.
    """

    def told(self, names: Mapping[str, str]) -> str:
        """Return the line with each argument's name replaced by its entry in ``names``, if any."""
        return _ARGUMENT.sub(lambda match: names.get(match[1], match[1]), self.args[0])

    def __str__(self) -> str:
        return self.told({})
