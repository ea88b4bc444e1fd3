"""Helpers of pages: links, tables, and the conditions under which rows were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..harness.conditions import ADAPTERS, has_changed
from ..harness.registry import ROOT, operators
from ..harness.tables import RESULTS, Row

CHARTS = ROOT / "docs" / "images"
OF_CACHE = ("agents", "manager", "traffic")
"""Files of rows that measure the cache alone."""


def devices() -> list[str]:
    """Return the folders of results, the CPU's last."""
    found = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
    return [name for name in found if name != "cpu"] + [name for name in found if name == "cpu"]


def link(page: Path, target: Path) -> str:
    """Return the relative path from a page to a file of the tree."""
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    return up + target.relative_to(ROOT).as_posix()


def chart(page: Path, name: str) -> str:
    """Return the relative path from a page to a chart, on the site too."""
    path = CHARTS / name
    if page.parent in path.parents:
        return path.relative_to(page.parent).as_posix()
    if ROOT / "docs" in page.parents:
        return "../" * (len(page.relative_to(ROOT / "docs").parts) - 1) + f"images/{name}"
    return link(page, path)


def line(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def table(heads: Sequence[str], sides: str, lines: Iterable[Iterable[str]]) -> list[str]:
    """Return a table, line by line.

    Args:
        heads: Heads of the columns.
        sides: A letter a column: l for text, r for numbers.
        lines: Cells of each.
    """
    assert len(heads) == len(sides)
    rule = "".join(f"|{'---' if side == 'l' else '--:'}" for side in sides) + "|"
    return [line(heads), rule, *map(line, lines)]


def all_of(rows: Iterable[Row], column: str) -> str:
    """Return the distinct values of a column."""
    return ", ".join(sorted({row[column] for row in rows}))


def folders_of(name: str) -> Sequence[str]:
    """Return the folders with the code that a file of rows measures, by its name."""
    if name in operators():
        return ("triton_ops",)
    if name in OF_CACHE:
        return ("cache",)
    adapter = next((adapter for adapter in ADAPTERS if name.startswith(f"{adapter}_")), "huggingface")
    return ("triton_ops", "cache", "integrations", f"integrations/{adapter}")


def commits(source: Path, rows: Sequence[Row]) -> str:
    """Return the commits of rows, and whether what they measure has changed since."""
    folders = folders_of(source.stem)
    changed = " (the measured code has changed since)" if any(has_changed(row, folders) for row in rows) else ""
    return f"commit {all_of(rows, 'commit')}{changed}"


def measured(
    page: Path, source: Path, rows: Sequence[Row], packages: Sequence[str] = ("torch",), more: str = ""
) -> str:
    """Return the conditions of rows, with a link to them."""
    first = rows[0]
    versions = "".join(f", {package} {first[package]}" for package in packages)
    said = f"{first['device']}{versions}, {first['date']}, {commits(source, rows)}{more}"
    return f"{said}; [rows]({link(page, source)})."


def with_rows(lines: Sequence[str], page: Path, source: Path, said: str = "") -> str:
    """Return lines with a link to the rows below them."""
    return "\n".join([*lines, "", f"{said}[Rows]({link(page, source)})"])


def by_version(version: str) -> tuple[int, ...]:
    """Return a sort key for versions: 3.10 comes after 3.9."""
    return tuple(map(int, version.split(".")))


def newest_triton(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the newest version of triton among them."""
    newest = max((row["triton"] for row in rows), key=by_version, default="")
    return [row for row in rows if row["triton"] == newest]


def short_time(microseconds: float) -> str:
    """Return a time with three digits: "14.3 us", "2.1 ms", "1.02 s"."""
    for limit, factor, unit in ((1e3, 1.0, "us"), (1e6, 1e-3, "ms"), (float("inf"), 1e-6, "s")):
        if microseconds < limit:
            return f"{microseconds * factor:.3g} {unit}"
    raise ValueError(f"microseconds: got {microseconds}")
