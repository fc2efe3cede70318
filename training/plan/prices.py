"""What hardware costs for an hour: read from a small file that anyone can replace."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import UsageError

SHIPPED = Path(__file__).with_name("prices.toml")


@dataclass(frozen=True)
class Price:
    """What one chip costs for an hour, and where the figure is from."""

    per_hour: float
    """US dollars."""
    date: str
    source: str

    def __str__(self) -> str:
        return f"${self.per_hour:.2f} ({self.date}; {self.source})"


def read_prices(name: str | None) -> dict[str, Price]:
    """Return the price of each kind of chip that a file names, of the shipped file for None.

    A name that ends in ".json" is read as JSON, any other as TOML. Raises UsageError.
    """
    path = Path(name) if name else SHIPPED
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--price {path} cannot be read: {reason}") from None
    try:
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"--price {path} is no {kind}: {str(error).splitlines()[0]}") from None
    if not isinstance(tables, Mapping) or not tables:
        raise UsageError(f"--price {path} names no chip: a table for each, as in {SHIPPED.name}")
    return {kind: _price(path, kind, table) for kind, table in tables.items()}


def _price(path: Path, kind: str, table: Any) -> Price:
    value = table.get("price") if isinstance(table, Mapping) else None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not 0 <= number < math.inf:
        raise UsageError(f'--price {path}: "{kind}" needs a "price", dollars an hour of one chip')
    told = {name: str(table.get(name, f"no {name}")) for name in ("date", "source")}
    return Price(float(number), told["date"], told["source"])
