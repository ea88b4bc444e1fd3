"""Request traces replayed through eviction policies, and the policies that are there to be compared with."""

from __future__ import annotations

from .policies import ARC, FIFO, LFU, S3FIFO, Belady
from .run import Result, compare, replay
from .segmented import Segmented
from .traces import Trace, hints_of, load_trace

__all__ = [
    "ARC",
    "FIFO",
    "LFU",
    "S3FIFO",
    "Belady",
    "Result",
    "Segmented",
    "Trace",
    "compare",
    "hints_of",
    "load_trace",
    "replay",
]
