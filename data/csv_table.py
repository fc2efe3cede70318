"""Read a table from a CSV file, as people, spreadsheets and pandas write it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from data import files
from data.files import DataFolderError, SizeLimit


@dataclass(frozen=True)
class TextTable:
    """A table in memory, whose cells are text."""

    name: str
    """The file."""
    columns: list[str]
    read: Callable[[Sequence[str]], Iterator[tuple[str, list[str]]]]
    """Yields, of each row that is not empty, where it is in the file, and its cells in some
    columns; "" for what is missing."""
    lists: Sequence[str] = ()
    """The columns whose cells were lists, and have "|" between the entries."""


def open_csv(flag: str, file: str, limit: SizeLimit) -> TextTable:
    """Return the table in a file or at a URL, in UTF-8, whose first line names the columns, with
    commas, semicolons or tabs in between. Raises DataFolderError, naming ``flag``, also while the
    table is read."""
    with files.reporting(f"{flag} {file}", "read"):
        text = files.read_bytes(file, limit=limit).decode("utf-8-sig")
        first = next((line for line in text.splitlines() if line.strip()), "")
        by_delimiter = {sign: next(csv.reader([first], delimiter=sign), []) for sign in ",;\t"}
    delimiter = max(by_delimiter, key=lambda sign: len(by_delimiter[sign]))
    names = [name.strip() for name in by_delimiter[delimiter]]

    def read(columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        places = [names.index(name) for name in columns]
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        has_header = False
        with files.reporting(f"{flag} {file}", "read"):
            for cells in lines:
                if not any(cell.strip() for cell in cells):
                    continue
                if not has_header:
                    has_header = True
                    continue
                where = f"line {lines.line_num} of {file}"
                if any(cell.strip() for cell in cells[len(names) :]):
                    raise DataFolderError(
                        f"{where} has {len(cells)} fields, but there are {len(names)} columns: "
                        "put quotes around a field that contains the delimiter"
                    )
                cells += [""] * (len(names) - len(cells))
                yield where, [cells[place].strip() for place in places]

    return TextTable(file, names, read)
