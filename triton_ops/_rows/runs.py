"""Runs of consecutive numbers: what a slice or one plain copy serves at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def contiguous_runs(index: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Splits an index into runs of consecutive numbers.

    Args:
        index: `[num_rows]` integers; negative ones form runs of their own.

    Returns:
        `[num_runs, 3]`: position in the index, first number (-1 for a run of negative ones), length.
    """
    values = np.asarray(index, np.int64)
    if not values.size:
        return np.empty((0, 3), np.int64)
    holes = values < 0
    together = np.where(holes[1:] | holes[:-1], holes[1:] & holes[:-1], np.diff(values) == 1)
    begins = np.concatenate(([0], np.flatnonzero(~together) + 1))
    lengths = np.diff(np.append(begins, values.size))
    return np.stack([begins, np.maximum(values[begins], -1), lengths], axis=1)
