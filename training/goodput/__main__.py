"""Tells what share of wall time went to useful steps; docs/files.md says what counts as what."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from config_fields import local_path
from training.errors import UsageError
from training.goodput.account import Account, account_of
from training.goodput.goodput_table import as_values, table
from training.goodput.save_interval import suggest
from training.logs.events import EVENTS_FILE, read_events
from training.options.command_line import OneLineParser

_PROGRAM = "training.goodput"
_PICTURE = "goodput.png"


def _parser() -> OneLineParser:
    parser = OneLineParser(
        _PROGRAM,
        "Tell what share of a run's wall time went to useful steps, and to what else.",
    )
    parser.add_argument(
        "runs", nargs="+", type=local_path, metavar="RUN_DIR", help="a run's --ckpt_dir"
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone (default: off)")
    parser.add_argument(
        "--picture",
        type=local_path,
        metavar="FILE",
        help=f"picture to write (default: {_PICTURE} in the first RUN_DIR)",
    )
    return parser


def _account(run: Path) -> Account:
    if not run.is_dir():
        raise UsageError(f"{run} is no folder: give a run's --ckpt_dir")
    try:
        return account_of(read_events(run))
    except FileNotFoundError:
        raise UsageError(
            f"{run} has no {EVENTS_FILE}, which runs of earlier versions did not write: resumed by "
            "this one, it has one from then on"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run / EVENTS_FILE} cannot be read: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and write the picture; return the exit code."""
    given = _parser().parse_args(argv)
    try:
        accounts = {str(run): _account(run) for run in given.runs}
        picture = given.picture or given.runs[0] / _PICTURE
        from training.goodput.goodput_picture import (
            draw,  # takes a second: a mistake is told before
        )

        try:
            draw(accounts, picture)
        except (OSError, ValueError) as error:  # ValueError: an unknown suffix
            raise UsageError(f"cannot write {picture}: {error}") from None
    except UsageError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    if given.json:
        told = [as_values(name, each, suggest(each)) for name, each in accounts.items()]
        print(json.dumps(told, indent=2))
    else:
        print("\n\n".join(table(n, each, suggest(each)) for n, each in accounts.items()))
        print(f"\npicture: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
