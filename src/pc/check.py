"""The command `pc check` and its function `pc.check.run`, which compare every kernel with PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ._console import choose_device, new_table
from .triton_ops._core.runtime import INTERPRET
from .triton_ops._verify import Row, Shape, check_kernels, runs_kernels

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Row", "run"]


def run(device: Any = None, quick: bool = False, advance: Callable[[str], None] = lambda case: None) -> list[Row]:
    """Run every operator's kernels on a device and compare the results with formulas in PyTorch on the CPU.

    The error of a kernel may be at most twice the error of the same formula in the tensors' own dtype, plus one
    rounding. Operators that only move bytes must give equal bytes.

    Args:
        device: The device. None: a GPU if there is one, else the CPU.
        quick: Run only the cases that `enable_prefix_caching` runs, with usual sizes instead of a model's own.
        advance: Called with the name of each case before it runs.

    Returns:
        A row for each case, with the operator, the difference and the largest difference that rounding explains. The
        list is empty if the device runs no kernels, as on a CPU unless TRITON_INTERPRET=1 was set at import.

    Raises:
        ValueError: The device is neither a CPU nor a GPU that PyTorch can use.

    Examples:
        >>> import pc.check
        >>> rows = pc.check.run("cpu", quick=True)
        >>> all(row.ok for row in rows)
        True
    """
    found = choose_device(device)
    if not runs_kernels(found):
        return []
    return check_kernels(found, small=Shape() if quick else None, advance=advance)


def run_check(device: str | None, quick: bool) -> int:
    """Check kernels, print a table and return the exit status: 1 if a kernel is wrong, 2 for an unknown device."""
    from rich.console import Console

    console = Console()
    try:
        found = choose_device(device)
    except ValueError as error:
        console.print(f"--{error}", style="red", markup=False)
        return 2
    if not runs_kernels(found):
        about = "TRITON_INTERPRET=1 runs the kernels in Triton's interpreter" if found.type == "cpu" else (
            "Triton is not installed")  # fmt: skip
        console.print(f"PyTorch serves tensors on {found}: there is no kernel to check ({about}).")
        return 0
    begin = time.perf_counter()
    with console.status("") as status:
        # A log shows no status line, so there each case prints a line when it begins.
        rows = run(found, quick, status.update if console.is_terminal else lambda name: print(name, flush=True))
    console.print(_table(rows, found))
    wrong = [row for row in rows if not row.ok]
    for row in wrong:
        console.print(f"pc.{row.operator} is wrong: {row.case}: {row.problem}", style="red", markup=False)
    seconds = time.perf_counter() - begin
    console.print(f"{len(rows) - len(wrong)} of {len(rows)} cases are right, in {seconds:.0f} s on {_name(found)}")
    return 1 if wrong else 0


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU, in Triton's interpreter" if INTERPRET else "the CPU"


def _table(rows: list[Row], device: torch.device) -> Table:
    table = new_table(f"Kernels on {_name(device)}", ("operator", "case"), ("difference", "allowed"))
    before = None
    for row in sorted(rows, key=lambda row: row.operator):
        operator, before = (row.operator if row.operator != before else ""), row.operator
        numbers = [f"{number:.2g}" for number in (row.error, row.allowed)]
        table.add_row(operator, row.case, *numbers, style=None if row.ok else "bold red")
    return table
