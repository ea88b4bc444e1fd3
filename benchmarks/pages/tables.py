"""Tables of pages as data: `tables.ini` has a section for each table, and a line for each of its columns."""

from __future__ import annotations

import configparser
import os
import string
from collections.abc import Callable
from dataclasses import dataclass
from operator import sub, truediv
from pathlib import Path

from ..harness.tables import RESULTS, Row, number, read_rows
from .markdown import commits, measured, newest_triton, short_time, table, with_rows

UNITS = {"us": 1, "ms": 1e3, "s": 1e6}


def _read() -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # heads keep their capitals
    parser.read(Path(__file__).with_suffix(".ini"), encoding="utf-8")
    return {name: dict(parser[name]) for name in parser.sections()}


SECTIONS = _read()
WORDS = SECTIONS.pop("words")
"""What values of rows are called on pages."""


def fill(template: str, row: Row, keep_empty: bool = False) -> str:
    """Return a text with columns of a row.

    Args:
        template: A column, with a format if it is a number ("ratio:.2f"), or a text with columns in braces. A column
            may also be a quotient or a difference ("{hits / tokens:.3f}"). Formats besides Python's: a unit of time
            ("us", "ms", "s"), "words" (see `WORDS`), "short" (the part before a comma), "options" (JSON in words),
            and "if VALUE" or "unless VALUE", which print nothing and decide whether the text is empty.
        row: The values.
        keep_empty: Whether the text stays if one of its columns is empty. Otherwise it is empty too.
    """
    text = ""
    for literal, column, form, _ in string.Formatter().parse(template if "{" in template else f"{{{template}}}"):
        text += literal
        if column is None:
            continue
        value, (test, _, wanted) = _value(column, row), (form or "").partition(" ")
        if not value and not keep_empty:
            return ""
        if test in ("if", "unless"):
            if (value == wanted) != (test == "if"):
                return ""
            continue
        text += _shown(value, form or "")
    return text


def _value(text: str, row: Row) -> str:
    """Return a column, a number, or what a sign makes of two of them; empty if one of them is empty."""
    if text in row:
        return row[text]
    signs: dict[str, Callable[[float, float], float]] = {" - ": sub, " / ": truediv}
    for sign, operate in signs.items():
        left, found, right = text.partition(sign)
        if found:
            values = _value(left, row), _value(right, row)
            return str(operate(*map(float, values))) if all(values) else ""
    if isinstance(number(text), str):
        raise KeyError(f"tables.ini: got column {text!r}, needs one of {', '.join(row)}")
    return text


def _shown(value: str, form: str) -> str:
    if form in UNITS:
        return short_time(float(value) * UNITS[form])
    if form == "words":
        return WORDS.get(value, f"`{value}`")
    if form == "short":
        return value.partition(",")[0]
    if form == "options":
        return value.strip("{}").replace('"', "") or "plain"
    return format(number(value), form) if form else value


@dataclass(frozen=True)
class Table:
    """A table of a file's rows: a section of `tables.ini`, whose first lines explain the settings."""

    columns: tuple[tuple[str, str], ...]
    rows: str
    said: str = "rows"
    before: str = ""
    more: str = ""
    packages: str = "torch"
    beside: str = ""
    needs: str = ""
    newest: str = ""

    @classmethod
    def of(cls, section: dict[str, str]) -> Table:
        """Return the table of a section."""
        settings = {name.removeprefix("@"): text for name, text in section.items() if name.startswith("@")}
        return cls(tuple((head, cell) for head, cell in section.items() if head[0] != "@"), **settings)

    def render(self, page: Path, *arguments: str) -> str:
        """Return the table with its conditions."""
        source = Path(os.path.normpath(RESULTS / "cpu" / self.rows.format(*arguments)))
        rows = newest_triton(read_rows(source)) if self.newest else read_rows(source)
        if not rows:
            return f"Not measured yet: {source.name}."
        found, columns = rows, list(self.columns)
        if self.beside:
            same, column = self.beside.split(" / ")
            found, columns = beside(rows, same, column), _for_each(rows, column, columns)
        found = [row for row in found if not self.needs or row[self.needs]]
        cells = [[fill(cell, row).replace("|", "\\|") for _, cell in columns] for row in found]
        used = [at for at in range(len(columns)) if any(line[at] for line in cells)]
        heads = [columns[at][0].partition(" >") for at in used]
        sides = "".join("r" if sign else "l" for _, sign, _ in heads)
        names = [fill(head, rows[0]) if "{" in head else head for head, _, _ in heads]
        lines = table(names, sides, [[line[at] for at in used] for line in cells]) if used else []
        facts = rows[0] | ({"commits": commits(source, rows)} if "{commits}" in self.more else {})
        before, more = (fill(text, facts, keep_empty=True) if text else "" for text in (self.before, self.more))
        if self.said == "rows":
            return with_rows(lines, page, source, more and f"{more} ")
        if self.said == "nowhere":
            return "\n".join(lines)
        conditions = f"{before} {measured(page, source, rows, self.packages.split(), more)}".lstrip()
        parts = [conditions, "", *lines] if self.said == "above" else [*lines, "", conditions]
        return "\n".join(parts) if lines else conditions


def beside(rows: list[Row], same: str, column: str) -> list[Row]:
    """Return one line for all rows that have the same values in the columns `same`.

    A line has its first row's columns, and those of each of its rows as "value.column".
    """
    lines: dict[tuple[str, ...], Row] = {}
    empty = {f"{row[column]}.{name}": "" for row in rows for name in rows[0]}
    for row in rows:
        line = lines.setdefault(tuple(row[name] for name in same.split()), row | empty)
        line |= {f"{row[column]}.{name}": value for name, value in row.items()}
    return list(lines.values())


def _for_each(rows: list[Row], column: str, columns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a table's columns. A head that begins with "*" becomes a column for each value; "*" in its cell is it."""
    values = {row[column]: row for row in rows}
    ordered = sorted(values, key=lambda value: (isinstance(number(value), str), number(value)))
    found = []
    for head, cell in columns:
        if head.startswith("*"):
            found += [(fill(head[1:], values[value]), cell.replace("*", value)) for value in ordered]
        else:
            found.append((head, cell))
    return found


TABLES = {name: Table.of(section) for name, section in SECTIONS.items()}
