"""Where a user's machine keeps what can be made again; imports nothing heavy."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from data.errors import DataFolderError


def cache_folder() -> Path:
    """Return the program's folder in the user's cache ($XDG_CACHE_HOME, see the XDG Base Directory
    Specification).

    Of a user without a home, as a container's may be, it is in the temporary folder. Raises
    DataFolderError where another user has made it there.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vit_fsdp"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        folder = Path(tempfile.gettempdir()) / f"vit_fsdp-{os.getuid()}"
    if os.path.lexists(folder) and folder.lstat().st_uid != os.getuid():
        raise DataFolderError(
            f"{folder}, for a user without a home, was made by another user: set HOME or "
            "XDG_CACHE_HOME to a folder of yours"
        )
    return folder
