"""Files of rows: CSV with a line of column names, where every value is text once it is read."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """Rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> int | float | str:
    """A value as the number that it says; as text where it says none."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def replaced(path: Path, rows: Iterable[Mapping[str, object]], key: Sequence[str]) -> list[Mapping[str, object]]:
    """Rows of a file without those that have the same values in the columns of `key` as the new ones, then these."""
    rows = list(rows)
    measured = {tuple(str(row[name]) for name in key) for row in rows}
    return [*(row for row in read_rows(path) if tuple(row[name] for name in key) not in measured), *rows]


def write_rows(path: Path, rows: Iterable[Mapping[str, object]], first: Iterable[str] = ()) -> None:
    """Writes rows in place of what a file holds, and the folders that lead to it.

    Args:
        path: Of the file.
        rows: At least one, unless columns are given; a value that a row lacks is empty.
        first: Columns that come before the others, which follow as they turn up in the rows.

    Raises:
        ValueError: No rows and no columns; the file is as it was.
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
