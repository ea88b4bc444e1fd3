"""Takes rows that `pc demo` wrote into the tree, with the conditions they were measured under: make results."""

from __future__ import annotations

import sys
from pathlib import Path

from ..harness.conditions import conditions
from ..harness.tables import RESULTS, read_rows, write_rows


def main() -> None:
    """Take over the rows of a file."""
    write_rows(RESULTS / "cpu" / "demo.csv", [row | conditions("cpu") for row in read_rows(Path(sys.argv[1]))])
