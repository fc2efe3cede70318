"""How often to save: Young's formula, with what a run has measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.goodput.account import Account


@dataclass(frozen=True)
class Suggestion:
    """How often to write a checkpoint, and what that rests on."""

    save_s: float
    """How long training stands for a checkpoint, the mean."""
    mtbf_s: float
    """The mean time between failures; where none was seen, the time that none was seen in."""
    failures: int

    @property
    def interval_s(self) -> float:
        """Return Young's first-order optimum, sqrt(2 * cost of a checkpoint * MTBF).

        J. W. Young, "A first order approximation to the optimum checkpoint interval",
        Communications of the ACM 17(9), 1974; J. T. Daly's higher-order estimate (Future Generation
        Computer Systems 22, 2006) is less by about the cost of one checkpoint.
        """
        return math.sqrt(2 * self.save_s * self.mtbf_s)

    @property
    def waste(self) -> float:
        """Return the share of time that saving and lost work then cost together, to first order."""
        return self.save_s / self.interval_s + self.interval_s / (2 * self.mtbf_s)


def suggest(account: Account) -> Suggestion | None:
    """Return a suggestion; None for a run that has written no checkpoint or taken no steps."""
    if not account.saves or not account.steps:
        return None
    save_s = sum(account.saves) / len(account.saves)
    return Suggestion(save_s, account.running_s / max(1, account.failures), account.failures)
