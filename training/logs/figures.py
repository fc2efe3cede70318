"""Figures by matplotlib, which is imported where one is drawn: it takes a second, and may fail."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from data.files import reason_of, replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pyplot() -> ModuleType:
    """Return matplotlib.pyplot, which draws into files whatever backend the environment names.

    Notebooks set MPLBACKEND to a package of theirs, which programs that they start may not have.
    """
    os.environ["MPLBACKEND"] = "Agg"  # matplotlib refuses a name that it does not know on import
    import matplotlib

    matplotlib.use("Agg")  # it may have been imported before
    import matplotlib.pyplot as plt

    return plt


@contextlib.contextmanager
def drawing(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say why if ``path`` cannot be drawn inside, and continue: its numbers are in tables, too."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - matplotlib, a font, a full disk
        say(f"warning: {path} cannot be drawn ({reason_of(error)})")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the path's suffix, and close it. Raises OSError."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:] or "png", dpi=110)
    pyplot().close(figure)
    replace_file(path, content.getvalue())
