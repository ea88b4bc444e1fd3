"""Functions that several commands share: the choice of a device, progress bars and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .triton_ops._core.runtime import INTERPRET

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


def choose_device(device: Any = None) -> torch.device:
    """Return the device that `device` names. None: a GPU if there is one and TRITON_INTERPRET is not set, else the CPU.

    Raises:
        ValueError: The device is neither a CPU nor a GPU that PyTorch can use.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() and not INTERPRET else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: got {device!r}, needs cpu or cuda") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device!r}, needs cpu or cuda")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: got {device!r}, but this machine has {torch.cuda.device_count()} GPUs for PyTorch")
    return found


def new_progress(console: Console) -> Progress:
    """Return a progress bar with a count of steps, the elapsed time and a description."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console)


def new_table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """Return a table without rows. Columns of texts come first, then columns of numbers, aligned to the right."""
    from rich.table import Table

    # With the default paddings, the columns of `pc replay` do not fit into 80 characters.
    table = Table(*texts, title=title, title_justify="left", collapse_padding=True, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
