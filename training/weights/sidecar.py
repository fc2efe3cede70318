"""A JSON file next to public weights that describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.errors import UsageError
from training.files import read_object


class Sidecar(NamedTuple):
    """Such a file, and its content."""

    file: Path
    content: Mapping[str, Any]

    def refusal(self, key: str, value: Any, why: str) -> UsageError:
        """Return the error for the value of a key."""
        text = repr(value)
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        return UsageError(f"{self.file} has {key} {shown}{why}")

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the object of a key, {} without one. Raises UsageError for anything else."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refusal(key, value, ", which is not a JSON object")
        return value or {}


_SHOWN = 60
"""Characters of a value in a message."""


def read_sidecar(file: Path) -> Sidecar:
    """Read a JSON file next to weights; {} if there is none. Raises UsageError if it cannot be
    read."""
    try:
        return Sidecar(file, read_object(file))
    except FileNotFoundError:
        return Sidecar(file, {})
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{file}, which describes the weights, cannot be read ({reason}): repair or remove it"
        ) from None
