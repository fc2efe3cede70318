"""Which values of a flag are tried: those of a table, or the one that the user gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from training.errors import UsageError
from training.options.config import RunConfig
from training.options.flag_rules import flat
from training.plan.config import PlanConfig
from training.plan.prices import Price


def combinations(
    choices: Mapping[str, tuple[Any, ...]], config: RunConfig, own: Any
) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of these fields.

    A field whose flag was given stays as it is, unless it is "auto". Raises
    UsageError for a ``--grad_ckpt`` that the table does not have, of which no arithmetic is known.
    """
    asked = flat(config, own)
    values = {
        name: (asked[name],) if name in config.given and asked[name] != "auto" else tried
        for name, tried in choices.items()
    }
    policies = choices["grad_ckpt"]
    if values["grad_ckpt"][0] not in policies:
        raise UsageError(
            f"--plan knows --grad_ckpt {', '.join(policies)}, not {asked['grad_ckpt']}"
        )
    for combination in product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def check_prices(prices: Mapping[str, Price], kinds: tuple[str, ...], asked: PlanConfig) -> None:
    """Raise UsageError if a file of prices names none of the kinds of chips that are planned."""
    if not set(kinds) & set(prices):
        raise UsageError(f"--price {asked.price} has none of {', '.join(kinds)}")
