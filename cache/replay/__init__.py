"""Request traces replayed through eviction policies, and the policies that are there to be compared with."""

from __future__ import annotations

from ..policies import POLICIES
from .arc import ARC
from .belady import Belady
from .fifo import FIFO
from .hints import hints_of
from .lfu import LFU
from .run import Result, compare, replay
from .s3fifo import S3FIFO
from .traces import Trace, load_trace

POLICIES.update(lfu=LFU, fifo=FIFO, s3fifo=S3FIFO, arc=ARC)

__all__ = ["ARC", "FIFO", "LFU", "S3FIFO", "Belady", "Result", "Trace", "compare", "hints_of", "load_trace", "replay"]
