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
from .notes import NOBODY, Notes, Pieces, Step, last_of
from .runs import Runs
from .tables import DECAY, NEW_BOUNDS, USE_BOUNDS, USES, HazardTables
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
LONG = 256
"""Blocks of a request that are looked at whether they are consecutive: what is done to a slice takes half the time."""
NOTES, TOGETHER = 512, 1 << 16
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
        self._last_hit: Step | None = None
        self._notes = Notes(self._code, self._place_bits)
        self._judged = self._worked_off = 0
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
            self._last_hit = step = index if type(index) is slice else ids.tobytes()  # the array may be written to
            if notes.hit is not None:
                notes.put_aside(self._now)
                if notes.places > self._most_places:  # somebody else holds the same blocks: nothing is released
                    self._work_off()
                    notes = self._notes
            notes.hit = step
            notes.places += number
            return
        index = ids.astype(np.intp)
        self._before[index] = NOBODY
        self._forked[index] = False
        last_hit = self._last_hit
        if last_hit is not None:
            first, last, length = ids.item(0), last_of(last_hit), self.pool.prefix_length
            if length.item(last) == length.item(first) - 1:
                self._before[first] = last
            self._last_hit = None

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
        notes, number, chain = self._notes, len(ids), ids.tobytes()
        index = ids.astype(np.intp) if number < LONG else self._index_of(ids)
        count = self.pool.access_count[index].tobytes()
        hits, step = 0, index if type(index) is slice else chain
        if notes.hit == step:
            hits, notes.hit = number, None
        elif notes.hit is not None:
            hits = notes.hits_of(step, self._now)
        notes.steps.append(step)
        notes.hits.append(hits)
        notes.chains.append(chain)
        notes.counts.append(count)
        notes.endings.append(self._ending)
        notes.places += number
        self._ending = UNTOLD
        self._now = now = self._now + 1
        if now - self._worked_off >= NOTES or notes.places > self._most_places:
            self._work_off()
            if self._now - self._last_fit > IDLE:
                self._learn()

    def _work_off(self) -> None:
        """Brings rows and the guard up to date with what was noted."""
        notes = self._notes
        notes.catch_up(self._now)
        self._worked_off = self._now
        ended, used = len(notes.chains), notes.pieces()
        if not (ended or used or self._evicted.filled):
            return
        self._notes = Notes(self._code, self._place_bits)
        runs, guard = self.runs, self.guard
        self._evicted.work_off(self._now)
        room = max(1, self.pool.num_blocks - max(0, self.pool.num_held - notes.hit_places))
        if ended:
            # Blocks that were hit in one piece are still behind one another.
            rows = self._add_rows(notes, not (used and notes.whole and used.code.size == ended))
            guard.released(runs.size[rows])
        if ended == 1:
            guard.fill(runs, room)
        if used:
            self._take_used(used)
        if ended:
            self._note_shared(rows)
        if ended > 1:  # among these are requests that later ones in the batch went on from
            guard.fill(runs, room)
        runs.cut_shorter()
        if runs.count:
            if not guard.learned:
                guard.evict_on_paper(runs, self.tables, self._now, self.pool.num_blocks - self.pool.num_held)
            guard.judge(self._now - self._judged, runs)
            self._judged = self._now

    def _add_rows(self, notes: Notes, moved: bool) -> slice:
        """Rows for requests that have ended; `moved`: blocks may be behind others than before."""
        runs = self.runs
        rows = runs.add(notes.chains)
        chain = np.frombuffer(b"".join(notes.chains), np.int32)
        count = np.frombuffer(b"".join(notes.counts), np.int32)
        sizes = runs.size[rows]
        starts = sizes.cumsum() - sizes
        bounds = runs.bounds[rows]
        group, output, runs.certain[rows] = zip(*notes.endings, strict=True)
        if np.minimum.reduce(count) >= USE_BOUNDS[-1]:  # as where everything hits
            bounds[:] = sizes[:, None]
            runs.kind[rows], runs.trait[rows] = np.add(group, USES - 1), output
        else:
            count = count + self._earlier_uses.take(chain)
            bounds[:] = np.add.reduceat(count >= LEAST_USES, starts, axis=1, dtype=np.int32).T
            runs.kind[rows] = (bounds >= sizes[:, None]).sum(axis=1) + group
            runs.trait[rows] = NEW_BOUNDS.searchsorted(sizes - bounds[:, 0], side="right") + output
        runs.last[rows] = chain.take(starts + sizes - 1)
        firsts = chain.take(starts)
        parent = self._before.take(firsts)
        if moved:
            self._before[chain[1:].astype(np.intp)] = chain[:-1]
            self._before[firsts] = parent
        runs.parent[rows] = parent
        for block in parent[parent >= 0].tolist():
            self._hanging[block] += 1
            self._forked[block] = True
        runs.serial[rows] = np.arange(self._now - sizes.size, self._now)
        return rows

    def _note_shared(self, rows: slice) -> None:
        """How much of the chains whose requests do not go on others went on from."""
        for row in (rows.start + self.runs.certain[rows].nonzero()[0]).tolist():
            forks = self._forked.take(self.runs.blocks(row)).nonzero()[0]
            self.runs.shared[row] = self.runs.base[row] + forks[-1] + 1 if forks.size else 0

    def _take_used(self, used: Pieces) -> None:
        """Later requests take over the fronts of runs."""
        runs, (code, sizes, times) = self.runs, used
        found = code >= 0
        if count_nonzero(found) < found.size:
            code, sizes, times = code[found], sizes[found], times[found]
            if not code.size:
                return
        first = code & ((1 << self._place_bits) - 1)
        rows = runs.rows_of(code >> self._place_bits)
        last = first + sizes
        self.guard.used(runs, rows, first, last, resident=True)
        np.subtract.at(runs.kept, rows, sizes.astype(np.int32))
        self.lives.used(rows, first, last, times)
        size_of = runs.cells.size
        for row, end in zip(rows.tolist(), last.tolist(), strict=True):
            if end < size_of[row]:
                self._forked[runs.block(row, end - 1)] = True
        self._chooser.hang(runs.begin_at(rows, first, last))

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
        self._notes.catch_up(self._now)
        chains, code = [np.frombuffer(chain, np.int32) for chain in self._notes.chains], self._code
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
