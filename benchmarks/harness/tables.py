"""Files of rows: CSV with a line of column names; a value that was read is text."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, or none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> int | float | str:
    """Return the number that a text says, or the text if it is none."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def replaced(path: Path, rows: Iterable[Mapping[str, object]], key: Sequence[str]) -> list[Mapping[str, object]]:
    """Return a file's rows and new rows, which replace those with the same values in the columns of `key`.

    New rows take the place of the first row that they replace, or follow the last one. A column that a row lacks counts
    as empty.
    """
    found: dict[tuple[str, ...], list[Mapping[str, object]]] = {}
    for new in (False, True):
        replacing: set[tuple[str, ...]] = set()
        for row in rows if new else read_rows(path):
            place = tuple(str(row.get(name, "")) for name in key)
            if new and place not in replacing:
                replacing.add(place)
                found[place] = []
            found.setdefault(place, []).append(row)
    return [row for same in found.values() for row in same]


def write_rows(path: Path, rows: Iterable[Mapping[str, object]], first: Iterable[str] = ()) -> None:
    """Replace a file by rows, and create the folders above it.

    Args:
        path: The file.
        rows: At least one row, unless columns are given; a value that a row lacks is empty.
        first: The first columns; others follow in the order of the rows.

    Raises:
        ValueError: There are no rows and no columns; the file is unchanged.
    """
    rows = list(rows)
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    if not columns:
        raise ValueError("rows: got none, needs at least one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
