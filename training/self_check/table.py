"""The lines of a self-check, printed as they are found, by one process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

PASS, FAIL, SKIP = "pass", "FAIL", "skip"
_NAME_WIDTH = 20


@dataclass
class Table:
    """``silent`` in all processes but the first; the figures may be the first one's alone."""

    silent: bool
    failed: int = 0
    passed: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        if not self.silent:
            print(text, flush=True)

    def line(self, good: bool | None, name: str, text: str) -> None:
        """Print a line; ``good`` is None where nothing could be told."""
        verdict = SKIP if good is None else PASS if good else FAIL
        self.failed += verdict == FAIL
        self.passed += verdict == PASS
        self.say(f"{verdict}  {name:{_NAME_WIDTH}} {text}")

    def within(self, name: str, found: float, allowed: float, text: str) -> None:
        """Print a line for a figure that should be 0; ``text`` says what it is of."""
        good = found <= allowed  # not a number: no
        relation = "at most" if good else "more than"
        self.line(good, name, f"{found:.1e} ({relation} {allowed:.1e}) {text}")

    def end(self) -> None:
        seconds = time.perf_counter() - self._began
        checks = f"{self.passed + self.failed} checks, {seconds:.0f} s"
        if self.failed:
            self.say(f"self check FAILED: {self.failed} of {checks}")
        else:
            self.say(f"self check passed: {checks}")


def size_of(count: float) -> str:
    """Bytes for a person to read."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
