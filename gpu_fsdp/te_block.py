"""TransformerEngine's TransformerLayer in place of timm's block, weights mapped both ways."""

from __future__ import annotations

import argparse

from models.config import VitConfig
from training.errors import UsageError


def check(args: argparse.Namespace, config: VitConfig) -> None:
    """Raises UsageError where TransformerEngine, or this model in it, cannot run."""
    if args.fp8 != "none" and args.block != "te":
        raise UsageError("--fp8 needs --block te")
