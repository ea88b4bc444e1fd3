"""The policy itself: notes what it is told as cheaply as lru does, and works it off when victims are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...table import Ids, count_nonzero
from ..base import EvictionPolicy, PoolView
from ..run_queue import too_few
from .endings import ENDINGS, UNTOLD, ending_of
from .evicted import Evicted
from .ghosts import RequestGhosts
from .guard import Guard
from .lives import Lives
from .notes import NOBODY, RELEASED, Notes
from .runs import Runs
from .tables import DECAY, NEW_BOUNDS, USE_BOUNDS, HazardTables
from .victims import Chooser

Numbers = npt.NDArray[Any]

EVERY = 50
"""Requests between fits of the tables; 100 hits 1 to 4 % less in small caches."""
IDLE = 1024
"""Requests after which the tables are fitted though nothing is evicted."""
EARLY = 20
"""The first fit comes earlier."""
MEMORY = 8192
"""Requests that are learned from; with 4096 the conversation trace at 30 % capacity falls below lru."""
GHOSTS, GHOST_FLOOR = 4, 65_536
"""Ghosts a block, and how many there are at least: what returns late returns to small caches too."""
LONG = 128
"""Blocks of a request that are looked at whether they are consecutive: what is done to a slice takes half the time."""
NOTES, TOGETHER = 256, 1 << 16
"""Requests, and their blocks, worked off together at most: in a pool of a million blocks more took 70 ms at a time."""
LEAST_USES = USE_BOUNDS.astype(np.int32)[:, None]


def _index_of(ids: Ids) -> npt.NDArray[np.intp]:
    return ids.astype(np.intp)


class Hazard(EvictionPolicy):
    """Heeds `free(..., returns=)`; see the package and docs/policies.md.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "hazard", capacity=3).hit_rate, 2)
        0.5
    """

    def bind(self, pool: PoolView) -> None:
        """Also makes everything that is kept a block: 18 bytes of each, and 32 of ghosts."""
        super().bind(pool)
        self._index_of: Callable[[Ids], Any] = getattr(pool, "index_of", _index_of)
        self._place_bits = max(pool.num_blocks.bit_length(), 1)
        self._code = np.full(pool.num_blocks, -1, np.int64)  # serial of the last user and place in its chain, or -1
        self._earlier_uses = np.zeros(pool.num_blocks, np.uint8)  # before the block was evicted and filled again
        self._forked = np.zeros(pool.num_blocks, np.bool_)  # whether other requests went on behind it
        self._most_places = min(2 * pool.num_blocks + 64, TOGETHER)
        self._before = np.full(pool.num_blocks, -1, np.int32)
        self._hanging = np.zeros(pool.num_blocks, np.int32)  # runs whose `parent` the block is
        self._ghosts = RequestGhosts(GHOSTS * pool.num_blocks + GHOST_FLOOR)
        self._begin()

    def _begin(self) -> None:
        self._now = 0
        self._last_fit = -1
        self._ending = UNTOLD
        self._returns: float | None = None
        self._last_hit = -1
        self._notes = Notes(self._code, self._place_bits)
        self._judged = 0
        self.runs = Runs()
        self.tables = HazardTables()
        self.guard = Guard(self.pool.num_blocks)
        self.lives = Lives(self.runs, self.tables)
        self._evicted = Evicted(self._ghosts, self.runs, self.guard, self.lives, self._earlier_uses)
        self._chooser = Chooser(self.pool, self.runs, self.tables, self._code, self._hanging, self._place_bits)

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            notes, number = self._notes, len(ids)
            index = self._index_of(ids) if number >= LONG else None
            notes.log.append(index if type(index) is slice else ids.tobytes())  # the caller may write to the array
            notes.times.append(self._now)
            notes.places += number
            self._last_hit = ids.item(-1)
            return
        index = ids.astype(np.intp)
        self._before[index] = NOBODY
        self._forked[index] = False
        last_hit = self._last_hit
        if last_hit >= 0:
            first, length = ids.item(0), self.pool.prefix_length
            if length.item(last_hit) == length.item(first) - 1:
                self._before[first] = last_hit
            self._last_hit = -1

    def completed(self, ids: Ids) -> None:
        self._evicted.filled.append((self._now, ids.copy(), self.pool.keys_of(ids), self.pool.prefix_length.take(ids)))

    def returning(self, probability: float) -> None:
        self._returns = probability

    def finished(self, output_tokens: int) -> None:
        returns = self._returns
        if returns is None and 0 <= output_tokens < len(ENDINGS):
            self._ending = ENDINGS[output_tokens]
        else:
            self._ending = ending_of(returns, output_tokens)
            self._returns = None

    def released(self, ids: Ids) -> None:
        notes, number, blocks = self._notes, len(ids), ids.tobytes()
        index = ids.astype(np.intp) if number < LONG else self._index_of(ids)
        notes.log.append(index if type(index) is slice else blocks)
        notes.times.append(RELEASED)
        notes.chains.append(ids)
        notes.blocks.append(blocks)
        notes.counts.append(self.pool.access_count[index].tobytes())
        notes.endings.append(self._ending)
        notes.places += number
        self._ending = UNTOLD
        self._now += 1
        if len(notes.chains) >= NOTES or notes.places > self._most_places:
            self._work_off()
            if self._now - self._last_fit > IDLE:
                self._learn()

    def _work_off(self) -> None:
        """Brings rows and the guard up to date with what was noted."""
        notes = self._notes
        notes.catch_up(self._now)
        chains, used = notes.chains, notes.used
        if not (chains or used or self._evicted.filled):
            return
        self._notes = Notes(self._code, self._place_bits)
        runs, guard = self.runs, self.guard
        self._evicted.work_off(self._now)
        room = max(1, self.pool.num_blocks - max(0, self.pool.num_held - sum(notes.used_sizes)))
        if chains:
            rows = self._add_rows(notes)
            guard.released(runs.size[rows])
        if len(chains) == 1:
            guard.fill(runs, room)
        if used:
            self._take_used(notes)
        if chains:
            self._note_shared(rows)
        if len(chains) > 1:  # among these are requests that later ones in the batch went on from
            guard.fill(runs, room)
        runs.cut_shorter()
        if runs.count:
            if not guard.learned:
                guard.evict_on_paper(runs, self.tables, self._now, self.pool.num_blocks - self.pool.num_held)
            guard.judge(self._now - self._judged, runs)
            self._judged = self._now

    def _add_rows(self, notes: Notes) -> slice:
        """Rows for requests that have ended."""
        runs = self.runs
        rows = runs.add(notes.chains)
        chain = np.frombuffer(b"".join(notes.blocks), np.int32)
        index = chain.astype(np.intp)
        count = np.frombuffer(b"".join(notes.counts), np.int32)
        sizes = runs.size[rows]
        starts = sizes.cumsum() - sizes
        bounds = runs.bounds[rows]
        if np.minimum.reduce(count) >= USE_BOUNDS[-1]:  # as where everything hits
            bounds[:] = sizes[:, None]
        else:
            count = count + self._earlier_uses[index]
            bounds[:] = np.add.reduceat(count >= LEAST_USES, starts, axis=1, dtype=np.int32).T
        runs.last[rows] = chain.take(starts + sizes - 1)
        firsts = index.take(starts)
        parent = self._before.take(firsts)
        self._before[index[1:]] = chain[:-1]
        self._before[firsts] = runs.parent[rows] = parent
        for block in parent[parent >= 0].tolist():
            self._hanging[block] += 1
            self._forked[block] = True
        runs.serial[rows] = np.arange(self._now - sizes.size, self._now)
        group, output, runs.certain[rows] = zip(*notes.endings, strict=True)
        runs.kind[rows] = (bounds >= sizes[:, None]).sum(axis=1) + group
        runs.trait[rows] = NEW_BOUNDS.searchsorted(sizes - bounds[:, 0], side="right") + output
        return rows

    def _note_shared(self, rows: slice) -> None:
        """How much of the chains whose requests do not go on others went on from."""
        for row in (rows.start + self.runs.certain[rows].nonzero()[0]).tolist():
            forks = self._forked.take(self.runs.chains[row]).nonzero()[0]
            self.runs.shared[row] = self.runs.base[row] + forks[-1] + 1 if forks.size else 0

    def _take_used(self, notes: Notes) -> None:
        """Later requests take over the fronts of runs."""
        runs = self.runs
        codes = np.concatenate(notes.used) if len(notes.used) > 1 else notes.used[0]
        begin = np.array(notes.used_sizes).cumsum()  # of each request but the first
        broken = codes[1:] - codes[:-1] != 1
        broken[begin[:-1] - 1] = True
        at = np.zeros(count_nonzero(broken) + 1, np.intp)
        np.add(broken.nonzero()[0], 1, out=at[1:])
        sizes = np.append(at[1:], codes.size) - at
        code = codes.take(at)
        found = code >= 0
        if count_nonzero(found) < found.size:
            at, sizes, code = at[found], sizes[found], code[found]
            if not at.size:
                return
        first = code & ((1 << self._place_bits) - 1)
        rows = runs.rows_of(code >> self._place_bits)
        last = first + sizes
        self.guard.used(runs, rows, first, last, resident=True)
        np.subtract.at(runs.kept, rows, sizes.astype(np.int32))
        self.lives.used(rows, first, last, np.array(notes.used_at)[begin.searchsorted(at, side="right")])
        start_of, size_of, moved = runs.cells.start, runs.cells.size, set()
        for row, begins, ends in zip(rows.tolist(), first.tolist(), last.tolist(), strict=True):
            if begins <= start_of[row] < ends:  # one by one: several requests may have gone on from a run
                start_of[row] = ends
                moved.add(row)
            if ends < size_of[row]:
                self._forked[runs.block(row, ends - 1)] = True
        self._chooser.hang(moved)

    def _learn(self) -> None:
        """Fits the tables, and drops rows that are of no use any more."""
        runs = self.runs
        steps = (self._now - self._last_fit) / EVERY
        self.lives.learn(self._now, stale=steps > 2)
        self.tables.fit(DECAY ** min(steps, 20.0))
        self._last_fit = self._now
        serial = runs.serial[: runs.count]
        useful = (runs.end > runs.start)[: runs.count] | self.guard.needed(runs)
        useful |= (serial >= self._now - MEMORY) & (runs.kept[: runs.count] > 0)
        rows = np.flatnonzero(useful)
        if rows.size < 0.9 * runs.count:
            runs.keep(rows)
            self.guard.keep(rows)
            self._chooser.drop_ranks()
            self.lives.renumbered()

    def victims(self, count: int) -> Ids:
        self._notes.catch_up(self._now)
        chooser = self._chooser
        left = count
        if chooser.is_due(self._now):
            self._refresh(left)
        if self.guard.learned:
            left -= chooser.least(left, self._now)
            if left:
                self._refresh(left)
                left -= chooser.least(left, self._now)
        if left:  # lru is in force, or every run waits for another
            self._work_off()
            left -= chooser.oldest(left)
        parts = chooser.taken()
        if left:
            raise too_few(left)
        ids = np.concatenate([part for part, _, _ in parts]) if len(parts) > 1 else parts[0][0]
        self._ghosts.expect()
        index = ids.astype(np.intp)
        uses = self.pool.access_count.take(index) + self._earlier_uses.take(index)
        self._evicted.gone(parts, self.pool.keys_of(ids), uses)
        return ids

    def _refresh(self, count: int) -> None:
        """Brings everything up to date and ranks the runs anew."""
        self._work_off()
        if self._now - self._last_fit >= EVERY or (self._last_fit < EARLY <= self._now):
            self._learn()
        self._chooser.rank(count, self._now)

    def removed(self, ids: Ids) -> None:
        self._notes.catch_up(self._now)
        self._code[ids] = -1

    def check(self) -> None:
        chains, code = self._notes.chains, self._code
        self._notes.catch_up(self._now)
        self.runs.check(self._hanging)
        assert not self.pool.ref_count[code >= 0].any(), "a block that is held may be chosen"
        self.runs.check_blocks(code, self._place_bits, self._now - len(chains), chains)

    def clear(self) -> None:
        self._code.fill(-1)
        self._hanging.fill(0)
        self._before.fill(-1)
        self._earlier_uses.fill(0)
        self._forked.fill(False)
        self._ghosts.clear()
        self._begin()
