"""What the policy was told and has not worked off yet: noting it costs a request that only hits next to nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...table import Ids
from .endings import Ending

Numbers = npt.NDArray[Any]

RELEASED = -1
NOBODY = np.array(-1)
"""As an array it takes two thirds of the time that a number takes."""


class Notes:
    """Hits and releases.

    Args:
        code: Of each block, serial of its last user and place in its chain, -1 for none; brought up to date here.
        place_bits: Low bits of a code that are the place.

    Attributes:
        log: Hits and releases that `code` does not know of yet, in their order: blocks as bytes or, of long requests
            whose blocks are consecutive, as a slice.
        times: Of the hits among them, `RELEASED` for the others.
        chains: Blocks of each request that has ended.
        blocks: The same as bytes: to join many takes a tenth of the time that many small arrays take.
        counts: How often they were used, int32 as bytes.
        endings: What the ends of these requests say.
        used: Codes that blocks had when they were hit, for all hits that `code` knows of.
        used_sizes: How many blocks each of these hits has.
        used_at: When these hits were.
        places: Blocks in all notes.
    """

    def __init__(self, code: Numbers, place_bits: int) -> None:
        self._code = code
        self._place_bits = place_bits
        self.log: list[Any] = []
        self.times: list[int] = []
        self.chains: list[Ids] = []
        self.blocks: list[bytes] = []
        self.counts: list[bytes] = []
        self.endings: list[Ending] = []
        self.used: list[Numbers] = []
        self.used_sizes: list[int] = []
        self.used_at: list[int] = []
        self.places = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 12 * self.places  # a hit has its codes, a release its blocks twice and their counts

    def catch_up(self, now: int) -> None:
        """Brings `code` up to date at the number of the next request: together it takes a third of the time."""
        log, times = self.log, self.times
        if not log:
            return
        self.log, self.times = [], []
        code, used_sizes = self._code, self.used_sizes
        index = np.frombuffer(b"".join([blocks for blocks in log if type(blocks) is bytes]), np.int32).astype(np.intp)
        ended = times.count(RELEASED)
        serial, at, hit = now - ended, 0, 0
        used = np.empty(self.places if ended < len(times) else 0, np.int64)
        for blocks, time in zip(log, times, strict=True):
            if type(blocks) is bytes:
                size = len(blocks) // 4
                part: Any = index[at : at + size]
                at += size
            else:
                part, size = blocks, blocks.stop - blocks.start
            if time == RELEASED:
                start = serial << self._place_bits
                code[part] = np.arange(start, start + size)
                serial += 1
            else:
                used[hit : hit + size] = code[part]
                hit += size
                used_sizes.append(size)
                code[part] = NOBODY
        if hit:
            self.used.append(used[:hit])
            self.used_at += [time for time in times if time != RELEASED]
