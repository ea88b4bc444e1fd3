"""What a caller who knows whether a conversation goes on would say, from the trace's own future."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .traces import Trace


def continued(trace: Trace) -> npt.NDArray[np.bool_]:
    """Of each request, whether a later one goes on from it: asks for the last block but one, which is never partial."""
    last_use: dict[int, int] = {}
    for number, ids in enumerate(trace.requests):
        last_use.update(dict.fromkeys(ids.tolist(), number))
    ends = [int(ids[-2:][0]) if ids.size else -1 for ids in trace.requests]
    return np.array([last_use.get(end, -1) > number for number, end in enumerate(ends)], np.bool_)


def hints_of(trace: Trace, hints: str, seed: int = 0) -> list[float]:
    """What `free(..., returns=)` is told after each request.

    Args:
        trace: The requests.
        hints: "oracle", which gives 0 or 1, or the area under the ROC curve that a noisy bit shall have, 0.5 to 1: the
            bit is wrong for that share of both kinds, and what is told is how often it is right.
        seed: Of the noise.

    Raises:
        ValueError: Neither.

    Examples:
        >>> from pc.cache.replay import Trace, hints_of
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> hints_of(trace, "oracle")
        [1.0, 0.0, 1.0, 0.0, 0.0]
    """
    truth = continued(trace)
    if hints == "oracle":
        return [float(goes_on) for goes_on in truth]
    try:
        auc = float(hints)
    except ValueError:
        auc = 0.0
    if not 0.5 <= auc <= 1:
        raise ValueError(f"hints: got {hints!r}, needs oracle or an area under the curve of 0.5 to 1")
    said = truth ^ (np.random.default_rng(seed).random(truth.size) >= auc)
    base = float(truth.mean()) if truth.size else 0.0
    yes = auc * base / max(auc * base + (1 - auc) * (1 - base), 1e-12)
    no = (1 - auc) * base / max((1 - auc) * base + auc * (1 - base), 1e-12)
    return [yes if bit else no for bit in said.tolist()]
