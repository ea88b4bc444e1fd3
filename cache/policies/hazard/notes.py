"""What the policy was told and has not worked off yet: noting it costs a request that only hits next to nothing."""

from __future__ import annotations

from sys import byteorder
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...table import count_nonzero
from .endings import Ending

Numbers = npt.NDArray[Any]
Step = bytes | slice
"""Blocks as int32 or, of many that are consecutive, as a slice: what is done to one takes half the time."""

NOBODY, ONE = np.array(-1), np.array(1)
"""As arrays they take two thirds of the time that numbers take."""
MANY, MOST = 8, 16384
"""Requests worked off together at least, fewer are quicker one by one; their blocks, more do not stay in the cache."""


class Pieces(NamedTuple):
    """What was hit, in pieces that are consecutive in one chain."""

    code: Numbers
    """Of the first block."""
    size: Numbers
    time: Numbers


class Notes:
    """Hits and releases.

    Mostly a request is told of twice in a row: of what it hit, then of what it leaves, which begins with the same. That
    is one step. What is kept of it is bytes: arrays would keep more memory from being used again at once.

    Args:
        code: Of each block, serial of its last user and place in its chain, -1 for none; brought up to date here.
        place_bits: Low bits of a code that are the place.

    Attributes:
        hit: What was hit last, while nothing else was noted.
        steps: What `code` does not know of yet, in its order: blocks,
        hits: and how many of the first were hit before all were released; -1 - time for a hit alone.
        chains: Blocks of each request that has ended, int32 as bytes.
        counts: How often they were used, int32 as bytes.
        endings: What the ends of these requests say.
        hit_places: Blocks hit, of which `code` knows.
        places: Blocks in all notes.
        whole: Whether every request that `code` knows of left just what it had hit.
    """

    def __init__(self, code: Numbers, place_bits: int) -> None:
        self._code = code
        self._place_bits = place_bits
        # Of some hits their codes, or a list of the first codes of those that are one piece each, then sizes and times.
        self._used: list[tuple[Any, list[int], list[int]]] = []
        self.hit: Step | None = None
        self.steps: list[Step] = []
        self.hits: list[int] = []
        self.chains: list[bytes] = []
        self.counts: list[bytes] = []
        self.endings: list[Ending] = []
        self.hit_places = self.places = 0
        self.whole = True

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 12 * self.places  # a hit has its codes, a release its blocks and their counts

    def put_aside(self, now: int) -> None:
        """Makes the last hit, of the request of this number, a step of its own."""
        if self.hit is not None:
            self.steps.append(self.hit)
            self.hits.append(-1 - now)
            self.hit = None

    def hits_of(self, step: Step, now: int) -> int:
        """How many blocks of what is released at this number were just hit, as far as they are the first."""
        hit: Any = self.hit
        if isinstance(step, bytes):
            begins = isinstance(hit, bytes) and step.startswith(hit)
        else:
            begins = isinstance(hit, slice) and step.start == hit.start and step.stop >= hit.stop
        if not begins:
            self.put_aside(now)
            return 0
        self.hit = None
        return _size(hit)

    def catch_up(self, now: int) -> None:
        """Brings `code` up to date at the number of the next request."""
        self.put_aside(now)
        steps, hits = self.steps, self.hits
        if steps:
            self.steps, self.hits = [], []
            alone = min(hits) < 0
            self._work_off(steps, hits, now - (sum([hit >= 0 for hit in hits]) if alone else len(hits)), alone)

    def _work_off(self, steps: list[Step], hits: list[int], serial: int, alone: bool) -> None:
        """Does steps, the first release of which has this number."""
        index = np.frombuffer(b"".join([step for step in steps if type(step) is bytes]), np.int32).astype(np.intp)
        if alone or len(steps) < MANY or slice in map(type, steps):
            self._one_by_one(steps, hits, index, serial)
            return
        sizes = np.array([len(step) for step in steps if type(step) is bytes]) // 4
        ends = sizes.cumsum()
        seen: set[int] = set()
        cuts, most = [], MOST
        for number, (first, end) in enumerate(zip(index.take(ends - sizes).tolist(), ends.tolist(), strict=True)):
            if first in seen or end > most:
                cuts.append(number)
                seen.clear()
                most = end + MOST
            seen.add(first)
        starts = [0, *ends.tolist()]
        begin = done = 0
        for end in (*cuts, len(steps)):
            if end - begin >= MANY:
                self._one_by_one(
                    steps[done:begin], hits[done:begin], index[starts[done] : starts[begin]], serial + done
                )
                part = index[starts[begin] : starts[end]]
                done = end if self._together(part, sizes[begin:end], hits[begin:end], serial + begin) else begin
            begin = end
        self._one_by_one(steps[done:], hits[done:], index[starts[done] :], serial + done)

    def _together(self, index: Numbers, sizes: Numbers, hits: list[int], serial: int) -> bool:
        """Does steps that have no block in common; False if some have: then nothing has changed."""
        code, places = self._code, np.arange(index.size)
        first = sizes.cumsum() - sizes
        values = ((np.arange(serial, serial + sizes.size) << self._place_bits) - first).repeat(sizes) + places
        before = code[index]
        code[index] = values
        if count_nonzero(code[index] == values) < values.size:
            code[index] = before
            return False
        if hits != sizes.tolist():
            self.whole = False
            before = before[places < (first + hits).repeat(sizes)]
        if before.size:
            times = [serial + number for number, hit in enumerate(hits) if hit]
            self._add_used(before, [hit for hit in hits if hit], times)
        return True

    def _one_by_one(self, steps: list[Step], hits: list[int], index: Numbers, serial: int) -> None:
        """Does steps in their order; `index` has the blocks of those that are no slices."""
        code, at = self._code, 0
        firsts: list[int] = []  # of the last hits that were one piece each
        for step, hit in zip(steps, hits, strict=True):
            if type(step) is slice:
                place: Any = step
                size = step.stop - step.start
            else:
                size = len(step) // 4
                place = index[at : at + size]
                at += size
            here, start = code[place], serial << self._place_bits
            if hit != size:
                self.whole = False
            elif type(step) is slice and count_nonzero(here[1:] - here[:-1] == ONE) == size - 1:
                first = here.item(0)
                if not firsts:
                    sizes: list[int] = []
                    times: list[int] = []
                    self._used.append((firsts, sizes, times))
                firsts.append(first)
                sizes.append(size)
                times.append(serial)
                self.hit_places += size
                here += start - first
                serial += 1
                continue
            if hit:
                firsts = []
            if hit < 0:
                self._add_used(here.copy(), [size], [-1 - hit])
                code[place] = NOBODY
                continue
            if hit:
                self._add_used(here[:hit].copy(), [hit], [serial])
            code[place] = np.arange(start, start + size)
            serial += 1

    def _add_used(self, codes: Numbers, sizes: list[int], times: list[int]) -> None:
        self._used.append((codes, sizes, times))
        self.hit_places += sum(sizes)

    def pieces(self) -> Pieces | None:
        """What was hit, as far as `code` knows; None: nothing."""
        if not self._used:
            return None
        found: list[Pieces] = []
        some: list[Any] = []
        number = 0
        for each in self._used:
            whole = type(each[0]) is list
            if some and (whole or number >= MOST):
                found.append(_cut(some))
                some, number = [], 0
            if whole:
                found.append(Pieces(*map(np.array, each)))
            else:
                some.append(each)
                number += each[0].size
        if some:
            found.append(_cut(some))
        return found[0] if len(found) == 1 else Pieces(*map(np.concatenate, zip(*found, strict=True)))


def _size(step: Step) -> int:
    """How many blocks."""
    return len(step) // 4 if isinstance(step, bytes) else step.stop - step.start


def last_of(step: Step) -> int:
    """The last block."""
    return int.from_bytes(step[-4:], byteorder) if isinstance(step, bytes) else step.stop - 1


def _cut(used: list[Any]) -> Pieces:
    """The pieces of some hits: their codes, and of each hit size and time."""
    sizes, times = used[0][1:]
    if len(used) > 1:
        sizes, times = [size for _, some, _ in used for size in some], [time for _, _, some in used for time in some]
    size, time = np.array(sizes), np.array(times)
    codes = np.concatenate([codes for codes, _, _ in used]) if len(used) > 1 else used[0][0]
    broken = codes[1:] - codes[:-1] != 1
    ends = size.cumsum()
    broken[ends[:-1] - 1] = True
    at = np.zeros(count_nonzero(broken) + 1, np.intp)
    np.add(broken.nonzero()[0], 1, out=at[1:])
    if at.size > time.size:
        time = time.take(ends.searchsorted(at, side="right"))
    return Pieces(codes.take(at), np.append(at[1:], codes.size) - at, time)
