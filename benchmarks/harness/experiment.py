"""A benchmark with a command line: its options, its rows, and the columns that identify a row."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .conditions import conditions, use_threads
from .tables import RESULTS, replaced, write_rows


def option(default: Any = None, help: str = "", choices: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """Return the arguments of argparse's `add_argument`; the default gives the type and the number of values."""
    given: dict[str, Any] = {"default": default, "help": help}
    if default is False:
        given["action"] = "store_true"
    elif isinstance(default, list | tuple):
        given |= {"nargs": "*", "type": type(default[0]) if default else str}
    elif default is not None:
        given["type"] = type(default)
    if choices:  # not argparse's own `choices`, which refuse the default of a positional argument with several values
        given |= {"type": _one_of(choices), "metavar": f"{{{','.join(choices)}}}"}
    return given | more


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a function that checks a value of an option."""

    def check(value: str) -> str:
        if value not in choices:
            raise argparse.ArgumentTypeError(f"got {value!r}, needs one of {', '.join(choices)}")
        return value

    return check


@dataclass(frozen=True)
class Experiment:
    """A benchmark that writes rows into a file of the CPU's results.

    Attributes:
        file: Name of the file of rows, below the CPU's results; or a function from the parsed options to the name.
        rows: Generator from the parsed options to rows. Its module's docstring is the help, unless `help` is given.
        options: `option(...)` by name, as `add_argument` takes the names.
        key: Columns that identify a row. A new row replaces the old row with the same values as soon as it is measured,
            and other rows stay. Without a key, all rows replace the file when the last one is measured.
        packages: Distributions whose versions the rows name.
        conditions: Whether rows get the conditions of the measurement as further columns; those of the option
            `--device` if there is one, else of the CPU.
        help: Text of `--help`.
    """

    file: str | Callable[[argparse.Namespace], str]
    rows: Callable[[argparse.Namespace], Iterable[Mapping[str, object]]]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    key: Sequence[str] = ()
    packages: Sequence[str] = ()
    conditions: bool = True
    help: str | None = None

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options of a command line; `--output` is the path of the rows."""
        said = self.help or sys.modules[self.rows.__module__].__doc__
        parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, given in self.options.items():
            parser.add_argument(name, **given)
        parser.add_argument("--output", type=Path, help="file of rows; default: the one that pages show")
        parsed = parser.parse_args(arguments)
        if parsed.output is None:
            parsed.output = RESULTS / "cpu" / (self.file if isinstance(self.file, str) else self.file(parsed))
        return parsed

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run the command line: measure, print each row, and write it."""
        given = self.parse(arguments)
        given.output.parent.mkdir(parents=True, exist_ok=True)  # an error comes before the work
        use_threads()
        kind, found = getattr(given, "device", "cpu"), list[Mapping[str, object]]()
        for row in self.rows(given):
            print(*row.values(), flush=True)
            found.append({**row, **(conditions(kind, *self.packages) if self.conditions else {})})
            if self.key:
                write_rows(given.output, replaced(given.output, found, self.key))
        if not self.key:
            write_rows(given.output, found)
