"""Knows how timm's policies of augmentation are written; imports nothing heavy."""

from __future__ import annotations

import argparse
import re

_WHOLE, _NUMBER = r"\d{1,4}", r"\d{1,4}(\.\d{1,9})?"
_POLICY = re.compile(
    rf"""
    (original|originalr|v0|v0r|3a) (-mstd{_NUMBER})*
    | rand (-(m|n|mmax|inc){_WHOLE} | -(p|mstd){_NUMBER} | -t(weights|3a|3aw))*
    | augmix (-(m|w|d|b){_WHOLE} | -(a|mstd){_NUMBER})*
    """,
    re.VERBOSE,
)


def policy(text: str) -> str:
    """Read, as an argparse type, what ``timm.data.auto_augment`` takes.

    timm itself passes over what it cannot read: "rand-magnitude9" would be taken for "rand".
    """
    if not _POLICY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no policy of timm's: give one such as 3a, original, v0, "
            "rand-m9-mstd0.5-inc1 or augmix-m3-w3"
        )
    return text
