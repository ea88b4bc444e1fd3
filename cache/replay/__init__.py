"""Replay of request traces through eviction policies, with policies for comparison."""

from __future__ import annotations

from .policies import ARC, FIFO, LFU, S3FIFO, Belady, NextTurn
from .run import ORACLES, Result, compare, replay
from .traces import Trace, hints_of, load_trace

__all__ = [
    "ARC",
    "FIFO",
    "LFU",
    "ORACLES",
    "S3FIFO",
    "Belady",
    "NextTurn",
    "Result",
    "Trace",
    "compare",
    "hints_of",
    "load_trace",
    "replay",
]
