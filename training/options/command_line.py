"""The command line of a small program beside the training itself."""

from __future__ import annotations

import argparse
from typing import NoReturn

from config_fields import not_empty


class OneLineParser(argparse.ArgumentParser):
    """A parser that ends on a wrong argument with one line and exit code 2."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)
        self.register("type", None, not_empty)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")
