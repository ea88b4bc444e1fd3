"""The event log: hits and releases that the policy was notified of but has not applied yet.

The log only saves time: logging costs a request almost nothing, and applying many requests together costs a fraction of
applying them one by one.
"""

from __future__ import annotations

import numpy as np

from ...table import Ids
from .model import Ending
from .runs import Numbers

NO_OWNER = -1


class EventLog:
    """A log of hits and releases.

    `owner` has for each block the serial of its last user and, in the low `place_bits`, the place in that user's chain;
    -1 for none. `drain` updates `owner`. Blocks and counts are int32 values stored as bytes, whose memory is reused
    sooner than that of arrays.
    """

    def __init__(self, owner: Numbers, place_bits: int) -> None:
        self._owner = owner
        self._place_bits = place_bits
        self._events: list[tuple[bytes, int, bool]] = []  # blocks, time, whether they were released; not in `owner` yet
        self._hits: list[tuple[Numbers, int]] = []  # owners before, and time
        self.chains: list[bytes] = []  # blocks of each request that has ended
        self.counts: list[bytes] = []  # number of uses of each block in a chain
        self.endings: list[Ending] = []
        self.num_hits = self.num_blocks = 0  # drained hit blocks; blocks of all events

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 12 * self.num_blocks  # a hit has its owners, a release its blocks and their counts

    def hit(self, ids: Ids, now: int) -> None:
        """Record that the request with number `now` hit these blocks."""
        self._events.append((ids.tobytes(), now, False))
        self.num_blocks += len(ids)

    def release(self, ids: Ids, counts: Numbers, ending: Ending, now: int) -> None:
        """Record that the request with number `now` has ended and released these blocks."""
        chain = ids.tobytes()
        self._events.append((chain, now, True))
        self.chains.append(chain)
        self.counts.append(counts.tobytes())
        self.endings.append(ending)
        self.num_blocks += len(ids)

    def drain(self) -> None:
        """Apply all logged events to `owner`, and collect the hits for `reused`."""
        events, self._events = self._events, []
        for blocks, time, released in events:
            index = np.frombuffer(blocks, np.int32).astype(np.intp)
            if released:
                first = time << self._place_bits
                self._owner[index] = np.arange(first, first + index.size)
            else:
                self._hits.append((self._owner.take(index), time))
                self._owner[index] = NO_OWNER
                self.num_hits += index.size

    def reused(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return the drained hits, split into pieces that are consecutive in one chain.

        For each piece: the owner of its first block, its number of blocks, and its time.
        """
        owner = np.concatenate([np.empty(0, np.int64), *(owners for owners, _ in self._hits)])
        time = np.repeat([time for _, time in self._hits], [owners.size for owners, _ in self._hits])
        broken = (owner[1:] != owner[:-1] + 1) | (owner[:-1] == NO_OWNER) | (time[1:] != time[:-1])
        first = np.append(True, broken).nonzero()[0] if owner.size else np.empty(0, np.intp)
        return owner[first], np.diff(np.append(first, owner.size)), time[first]
