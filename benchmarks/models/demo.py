"""Take rows that `pc demo` wrote into the tree, with the conditions they were measured under: make results."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..harness.experiment import Experiment, option
from ..harness.tables import Row, read_rows


def rows(given: argparse.Namespace) -> list[Row]:
    """Return the rows of a file."""
    return read_rows(given.file)


main = Experiment("demo.csv", rows, {"file": option(type=Path)}).main
