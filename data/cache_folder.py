"""Where a user's machine keeps what can be made again; imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the program's folder in the user's cache ($XDG_CACHE_HOME, see the XDG Base Directory
    Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vit_fsdp"
