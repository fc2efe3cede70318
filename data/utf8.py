"""File names and text in UTF-8, in every locale."""

import os
import sys


def use_utf8() -> None:
    """Read and write file names and text as UTF-8 whatever the locale is, so that a name is the
    same on all machines: start Python again, in its UTF-8 mode, if the locale has another encoding.
    The standard streams keep theirs."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        if sys.stdout is not None:
            os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def encodable(text: str) -> str:
    """Return ``text`` with the characters escaped that stdout's encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
