"""The event log: hits and releases that the policy was notified of but has not applied yet.

The log only saves time: logging costs a request almost nothing, and applying many requests together costs a fraction of
applying them one by one.
"""

from __future__ import annotations

from sys import byteorder
from typing import Any, NamedTuple

import numpy as np

from ...table import count_nonzero
from .model import Ending
from .runs import Numbers

BlockRun = bytes | slice  # block numbers as int32 bytes, or as a slice if many are consecutive, in half the time

NO_OWNER, ONE = np.array(-1), np.array(1)  # arrays take two thirds of the time of numbers
BATCH_MIN = 8  # minimum number of requests to apply together; fewer are faster one by one
BATCH_BLOCKS = 16384  # maximum number of their blocks; more do not fit in the CPU's cache


class ReusedPieces(NamedTuple):
    """Blocks that were hit, split into pieces that are consecutive in one chain. `owner` is that of the first block."""

    owner: Numbers
    size: Numbers
    time: Numbers


class EventLog:
    """A log of hits and releases.

    A request usually causes two notifications in a row: its hit, then its release, which starts with the same blocks.
    They form one event, kept as bytes, because arrays would keep more memory from being reused at once. `owner` has for
    each block the serial of its last user and, in the low `place_bits`, the place in its chain; -1 for none. Draining
    the log updates it. Chains and counts are int32 as bytes, one for each request that has ended.
    """

    def __init__(self, owner: Numbers, place_bits: int) -> None:
        self._owner = owner
        self._place_bits = place_bits
        # For some hits, their owners or a list of the first owners of those in one piece; then sizes and times
        self._reused: list[tuple[Any, list[int], list[int]]] = []
        self.hit: BlockRun | None = None  # the last hit, if nothing was logged after it
        self.events: list[BlockRun] = []  # events that `owner` does not reflect yet, in order
        self.hits: list[int] = []  # for each event, how many first blocks were hit; -1 - time for a hit alone
        self.chains: list[bytes] = []
        self.counts: list[bytes] = []  # number of uses of each block in a chain
        self.endings: list[Ending] = []
        self.num_reused = self.num_blocks = 0  # number of hit blocks in `owner`; of blocks in all events
        self.whole = True  # whether every request so far released exactly the blocks that it had hit

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 12 * self.num_blocks  # a hit has its owners, a release its blocks and their counts

    def push_hit(self, now: int) -> None:
        """Make the last hit, of the request with number `now`, an event of its own."""
        if self.hit is not None:
            self.events.append(self.hit)
            self.hits.append(-1 - now)
            self.hit = None

    def match_hit(self, event: BlockRun, now: int) -> int:
        """Return how many of the first released blocks were just hit."""
        hit: Any = self.hit
        if isinstance(event, bytes):
            begins = isinstance(hit, bytes) and event.startswith(hit)
        else:
            begins = isinstance(hit, slice) and event.start == hit.start and event.stop >= hit.stop
        if not begins:
            self.push_hit(now)
            return 0
        self.hit = None
        return len(hit) // 4 if isinstance(hit, bytes) else int(hit.stop - hit.start)

    def drain(self, now: int) -> None:
        """Update `owner` for all events. `now` is the number of the next request."""
        self.push_hit(now)
        events, hits = self.events, self.hits
        if events:
            self.events, self.hits = [], []
            alone = min(hits) < 0
            self._apply(events, hits, now - (sum([hit >= 0 for hit in hits]) if alone else len(hits)), alone)

    def _apply(self, events: list[BlockRun], hits: list[int], serial: int, alone: bool) -> None:
        """Apply events. `serial` is the number of the first release."""
        index = np.frombuffer(b"".join([event for event in events if type(event) is bytes]), np.int32).astype(np.intp)
        if alone or len(events) < BATCH_MIN or slice in map(type, events):
            self._apply_each(events, hits, index, serial)
            return
        sizes = np.array([len(event) for event in events if type(event) is bytes]) // 4
        ends = sizes.cumsum()
        seen: set[int] = set()
        cuts, most = [], BATCH_BLOCKS
        for number, (first, end) in enumerate(zip(index.take(ends - sizes).tolist(), ends.tolist(), strict=True)):
            if first in seen or end > most:
                cuts.append(number)
                seen.clear()
                most = end + BATCH_BLOCKS
            seen.add(first)
        starts = [0, *ends.tolist()]
        begin = done = 0
        for end in (*cuts, len(events)):
            if end - begin >= BATCH_MIN:
                part = index[starts[done] : starts[begin]]
                self._apply_each(events[done:begin], hits[done:begin], part, serial + done)
                part = index[starts[begin] : starts[end]]
                done = end if self._apply_batch(part, sizes[begin:end], hits[begin:end], serial + begin) else begin
            begin = end
        self._apply_each(events[done:], hits[done:], index[starts[done] :], serial + done)

    def _apply_batch(self, index: Numbers, sizes: Numbers, hits: list[int], serial: int) -> bool:
        """Apply events that share no block. Return False, with nothing changed, if some do."""
        owner, places = self._owner, np.arange(index.size)
        first = sizes.cumsum() - sizes
        values = ((np.arange(serial, serial + sizes.size) << self._place_bits) - first).repeat(sizes) + places
        before = owner[index]
        owner[index] = values
        if count_nonzero(owner[index] == values) < values.size:
            owner[index] = before
            return False
        if hits != sizes.tolist():
            self.whole = False
            before = before[places < (first + hits).repeat(sizes)]
        if before.size:
            times = [serial + number for number, hit in enumerate(hits) if hit]
            self._add_reused(before, [hit for hit in hits if hit], times)
        return True

    def _apply_each(self, events: list[BlockRun], hits: list[int], index: Numbers, serial: int) -> None:
        """Apply events in order. `index` has the blocks of the events that are not slices."""
        owner, at = self._owner, 0
        firsts: list[int] = []  # first owners of the last hits that were one piece each
        for event, hit in zip(events, hits, strict=True):
            if type(event) is slice:
                place: Any = event
                size = event.stop - event.start
            else:
                size = len(event) // 4
                place = index[at : at + size]
                at += size
            here, start = owner[place], serial << self._place_bits
            if hit != size:
                self.whole = False
            elif type(event) is slice and count_nonzero(here[1:] - here[:-1] == ONE) == size - 1:
                first = here.item(0)
                if not firsts:
                    sizes: list[int] = []
                    times: list[int] = []
                    self._reused.append((firsts, sizes, times))
                firsts.append(first)
                sizes.append(size)
                times.append(serial)
                self.num_reused += size
                here += start - first
                serial += 1
                continue
            if hit:
                firsts = []
            if hit < 0:
                self._add_reused(here.copy(), [size], [-1 - hit])
                owner[place] = NO_OWNER
                continue
            if hit:
                self._add_reused(here[:hit].copy(), [hit], [serial])
            owner[place] = np.arange(start, start + size)
            serial += 1

    def _add_reused(self, owners: Numbers, sizes: list[int], times: list[int]) -> None:
        self._reused.append((owners, sizes, times))
        self.num_reused += sum(sizes)

    def reused(self) -> ReusedPieces | None:
        """Return the drained hits; None if there are none."""
        if not self._reused:
            return None
        found: list[ReusedPieces] = []
        some: list[Any] = []
        number = 0
        for each in self._reused:
            whole = type(each[0]) is list
            if some and (whole or number >= BATCH_BLOCKS):
                found.append(_split_pieces(some))
                some, number = [], 0
            if whole:
                found.append(ReusedPieces(*map(np.array, each)))
            else:
                some.append(each)
                number += each[0].size
        if some:
            found.append(_split_pieces(some))
        return found[0] if len(found) == 1 else ReusedPieces(*map(np.concatenate, zip(*found, strict=True)))


def last_of(event: BlockRun) -> int:
    """Return the last block of an event."""
    return int.from_bytes(event[-4:], byteorder) if isinstance(event, bytes) else event.stop - 1


def _split_pieces(used: list[Any]) -> ReusedPieces:
    """Return the pieces of some hits, given their owners, and the size and time of each hit."""
    sizes, times = used[0][1:]
    if len(used) > 1:
        sizes, times = [size for _, some, _ in used for size in some], [time for _, _, some in used for time in some]
    size, time = np.array(sizes), np.array(times)
    owners = np.concatenate([owners for owners, _, _ in used]) if len(used) > 1 else used[0][0]
    broken = owners[1:] - owners[:-1] != 1
    ends = size.cumsum()
    broken[ends[:-1] - 1] = True
    at = np.zeros(count_nonzero(broken) + 1, np.intp)
    np.add(broken.nonzero()[0], 1, out=at[1:])
    if at.size > time.size:
        time = time.take(ends.searchsorted(at, side="right"))
    return ReusedPieces(owners.take(at), np.append(at[1:], owners.size) - at, time)
