"""What flags are made of: a parser that complains in one line, and types with bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Ends on a wrong argument with one line, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


class Formatter(argparse.HelpFormatter):
    """Adds the default to every help text that does not give one itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "default" in text or action.default is argparse.SUPPRESS:
            return text
        if action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction):
            return f"{text} (default: off)"
        if action.default is None:
            return text
        return f"{text} (default: %(default)s)"


def bounded(kind: type, low: float, high: float, *, open_high: bool = False) -> Callable:
    """An argparse type: a finite number from ``low`` to ``high`` (or below it)."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{_shown(text)!r} is not {name}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{_shown(text)!r} is not a finite number")
        if not low <= value <= high or (open_high and value == high):
            limit = "below" if open_high else "at most"
            raise argparse.ArgumentTypeError(
                f"{_shown(text)} must be at least {low} and {limit} {high}"
            )
        return value + 0  # -0.0 becomes 0.0

    return convert


def _shown(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


_MOST, _LARGEST = 10**9, 10**4  # what nobody needs more of

positive = bounded(int, 1, _MOST)
count = bounded(int, 0, _MOST)
seed = bounded(int, 0, 2**63 - 1)  # PyTorch's generators take 64 bits
rate = bounded(float, 0, 1, open_high=True)
fraction = bounded(float, 0, 1)
number = bounded(float, -1e30, 1e30)  # in fp32's range
non_negative = bounded(float, 0, _LARGEST)
positive_number = bounded(float, 1e-12, _LARGEST)
seconds = bounded(float, 0, 1e8)


def channels(text: str) -> int:
    """An argparse type: images have three channels, or one."""
    if text not in ("1", "3"):
        raise argparse.ArgumentTypeError(f"{_shown(text)!r} is neither 3 (RGB) nor 1 (grey)")
    return int(text)


_ZERO_NAMES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def zero_strategy(text: str) -> int:
    """An argparse type: Megatron-FSDP's sharding strategies, by number or name."""
    if text in _ZERO_NAMES:
        return _ZERO_NAMES.index(text)
    if text in ("0", "1", "2", "3"):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is none of 0, 1, 2, 3, {', '.join(_ZERO_NAMES)}")


def step_range(text: str) -> tuple[int, int]:
    """An argparse type: FIRST:LAST, steps counted from 1, both included."""
    first, colon, last = text.partition(":")
    try:
        steps = positive(first), positive(last)
    except argparse.ArgumentTypeError:
        steps = 1, 0
    if not colon or steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"{_shown(text)!r} is not FIRST:LAST, two steps from 1 on")
    return steps
