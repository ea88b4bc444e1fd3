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
        log: Hits and releases that `code` does not know of yet, in their order: bytes of their blocks.
        times: Of the hits among them, `RELEASED` for the others.
        chains: Blocks of each request that has ended.
        counts: How often they were used.
        endings: What the ends of these requests say.
        used: Codes that blocks had when they were hit, for each hit that `code` knows of.
        used_at: When these hits were.
        places: Blocks in all notes.
    """

    def __init__(self, code: Numbers, place_bits: int) -> None:
        self._code = code
        self._place_bits = place_bits
        self.log: list[bytes] = []
        self.times: list[int] = []
        self.chains: list[Ids] = []
        self.counts: list[Numbers] = []
        self.endings: list[Ending] = []
        self.used: list[Numbers] = []
        self.used_at: list[int] = []
        self.places = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 20 * self.places

    def catch_up(self, now: int) -> None:
        """Brings `code` up to date at the number of the next request: together it takes a third of the time."""
        log, times = self.log, self.times
        if not log:
            return
        self.log, self.times = [], []
        code, used, used_at = self._code, self.used, self.used_at
        index = np.frombuffer(b"".join(log), np.int32).astype(np.intp)
        serial, at = now - times.count(RELEASED), 0
        for blocks, time in zip(log, times, strict=True):
            end = at + len(blocks) // 4
            part = index[at:end]
            if time == RELEASED:
                start = serial << self._place_bits
                code[part] = np.arange(start, start + end - at)
                serial += 1
            else:
                used.append(code[part])
                used_at.append(time)
                code[part] = NOBODY
            at = end
