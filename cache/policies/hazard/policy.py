"""The policy, which logs notifications as cheaply as lru, and drains its logs when victims are needed.

The logs only save time: logging costs a request almost nothing, and applying many requests together costs a fraction of
applying them one by one. Logged blocks and counts are int32 values stored as bytes, whose memory is reused sooner than
that of arrays.
"""

from __future__ import annotations

import numpy as np

from ...table import Ids, count_nonzero
from ..base import EvictionPolicy, PoolView
from ..ghosts import NOTE_BITS, TIME_BITS, Ghosts, Keys
from ..run_queue import too_few
from .guard import ShadowGuard, Use
from .model import DECAY, NEW_BOUNDS, UNKNOWN_ENDING, Ending, HazardModel, ending_of
from .runs import USE_BOUNDS, Numbers, RunTable
from .victims import Part, VictimChooser

EVERY = 50  # requests between fits of the model; 100 gives 1 to 4 % fewer hits in small caches
IDLE = 1024  # requests after which the model is fitted even if nothing is evicted
FIRST = 16  # requests before the first fit; fewer teach nothing
EARLY = 5  # early fits wait until a fifth of all requests came after the last; a quarter to a tenth give as many hits
MEMORY = 8192  # latest requests to learn from; with 4096, lru is better on the conversation trace at a capacity of 30 %
GHOSTS, GHOST_FLOOR = 4, 65_536  # ghosts for each block, and the minimum, because small caches see late returns too
# Places for the ghost of a block. With one place, random ghosts are lost, and a prefix with holes is not recognized.
# Then hits on Mooncake's synthetic trace fall from 1.26 to 1.05 times those of lru.
WAYS = 8
LOG_REQUESTS, LOG_BLOCKS = 512, 1 << 16  # maximum drained at once; more took 70 ms for a million blocks
NO_OWNER = -1
ONE = np.int32(1)
LEAST_USES = USE_BOUNDS.astype(np.int32)[:, None]


class Hazard(EvictionPolicy):
    """Learned eviction that uses the hints of `free(..., returns=)`; see the package and docs/policies.md.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "hazard", capacity=3).hit_rate, 2)
        0.5
    """

    def bind(self, pool: PoolView) -> None:
        """Also allocate the state of each block: 18 bytes, and 32 bytes of ghosts."""
        super().bind(pool)
        self._place_bits = max(pool.num_blocks.bit_length(), 1)
        self._owner = np.full(pool.num_blocks, -1, np.int64)  # last user's serial and the place in its chain, or -1
        self._earlier_uses = np.zeros(pool.num_blocks, np.uint8)  # uses before the block was evicted and filled again
        self._forked = np.zeros(pool.num_blocks, np.bool_)  # whether other requests continued after the block
        self._log_limit = min(2 * pool.num_blocks + 64, LOG_BLOCKS)
        self._previous = np.full(pool.num_blocks, -1, np.int32)  # the block before it in the chain of its last user
        self._child_count = np.zeros(pool.num_blocks, np.int32)  # number of runs whose `parent` the block is
        self._ghosts = Ghosts(GHOSTS * pool.num_blocks + GHOST_FLOOR, WAYS)
        self._begin()

    def _begin(self) -> None:
        """Start with nothing logged or learned. The arrays of blocks are not reset."""
        self._now = 0
        self._last_fit = -1
        self._ending = UNKNOWN_ENDING
        self._returns: float | None = None
        self._last_hit = -1  # the last block of the hit that fresh blocks may follow, or -1
        self._events: list[tuple[bytes, int, bool]] = []  # blocks, time, whether released; not in `_owner` yet
        self._hits: list[tuple[Numbers, int]] = []  # owners of hit blocks before the hit, and time; not drained yet
        self._ended: list[tuple[bytes, bytes, Ending]] = []  # chains, numbers of uses of their blocks; not drained yet
        self._num_logged = 0  # blocks of hits and chains that are not drained yet
        self._drained_at = 0
        self.runs = RunTable()
        self.model = HazardModel(self.runs)
        self.guard = ShadowGuard(self.pool.num_blocks)
        self._filled: list[tuple[int, Ids, Keys, Ids]] = []  # times, blocks, keys and prefix lengths, not drained yet
        self._gone: list[tuple[list[Part], Keys, Numbers]] = []  # victims by request, keys and uses, not drained yet
        self._chooser = VictimChooser(self.runs, self.model, self._owner, self._child_count, self._place_bits)

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            self._last_hit = ids.item(-1)
            if self._num_logged > self._log_limit:  # without releases, hits alone may fill the log
                self._drain()
            self._events.append((ids.tobytes(), self._now, False))
            self._num_logged += ids.size
            return
        # Fresh blocks have no history. The first of them may continue the chain of the hit just before.
        index = ids.astype(np.intp)
        self._previous[index] = NO_OWNER
        self._forked[index] = False
        last, self._last_hit = self._last_hit, -1
        if last >= 0 and self.pool.prefix_length[last] == self.pool.prefix_length[ids[0]] - 1:
            self._previous[ids[0]] = last

    def completed(self, ids: Ids) -> None:
        self._filled.append((self._now, ids.copy(), self.pool.keys_of(ids), self.pool.prefix_length.take(ids)))

    def returning(self, probability: float) -> None:
        self._returns = probability

    def finished(self, output_tokens: int) -> None:
        self._ending = ending_of(self._returns, output_tokens)
        self._returns = None

    def released(self, ids: Ids) -> None:
        chain = ids.tobytes()
        self._events.append((chain, self._now, True))
        self._ended.append((chain, self.pool.access_count.take(ids).tobytes(), self._ending))
        self._num_logged += ids.size
        self._ending = UNKNOWN_ENDING
        self._now += 1
        if self._now - self._drained_at >= LOG_REQUESTS or self._num_logged > self._log_limit:
            self._drain()
            if self._now - self._last_fit > IDLE:
                self._learn()

    def _update_owners(self) -> None:
        """Apply all logged hits and releases to `_owner`."""
        events, self._events = self._events, []
        for blocks, time, released in events:
            index = np.frombuffer(blocks, np.int32).astype(np.intp)
            if released:
                first = time << self._place_bits
                self._owner[index] = np.arange(first, first + index.size)
            else:
                self._hits.append((self._owner.take(index), time))
                self._owner[index] = NO_OWNER

    def _drain(self) -> None:
        """Apply the logs to the rows of `runs` and to the guard."""
        self._update_owners()
        self._drained_at = self._now
        hits, ended = self._hits, self._ended
        if not (ended or hits or self._filled):
            return
        self._hits, self._ended, self._num_logged = [], [], 0
        runs, guard = self.runs, self.guard
        if self._gone:  # first, because a block may return soon after its eviction
            self._remember_victims()
        uses = self._recall_filled() if self._filled else []
        room = max(1, self.pool.num_blocks - max(0, self.pool.num_held - sum(owners.size for owners, _ in hits)))
        rows = self._add_rows(ended) if ended else slice(runs.count, runs.count)
        if hits:
            uses = self._claim_reused(*_pieces(hits)) + uses
        self._mark_shared(rows)
        runs.trim_all()
        if runs.count:
            uses = sorted(uses, key=lambda use: use[0])[::-1]  # of each request, hits before misses
            guard.follow(runs, rows, uses, room, self.model)
            guard.judge(len(ended), runs)

    def _remember_victims(self) -> None:
        """Store a ghost for each victim. Ghosts show reuses that a larger cache would have hit.

        Without them the model would be biased: the idle time of an evicted block would seem to end at its eviction.
        """
        parts = [part for parts, _, _ in self._gone for part in parts]
        sizes = [ids.size for ids, _, _ in parts]
        serials = np.repeat(np.array([serial for _, serial, _ in parts], np.int64), sizes)
        tails = np.zeros(serials.size, np.int64)
        tails[np.cumsum(sizes) - sizes] = [tail for _, _, tail in parts]
        keys, uses = (np.concatenate(part) for part in list(zip(*self._gone, strict=True))[1:])
        uses = np.minimum(uses, USE_BOUNDS[-1]).astype(np.int64)
        self._gone = []
        numbers = serials << NOTE_BITS | uses << 1 | tails
        serials, uses, tails = _split_numbers(self._ghosts.remember(keys, numbers, self._now), self._now)
        known, rows = self.runs.find(serials)
        if known.size:
            self.guard.forgotten(self.runs, rows)
            np.subtract.at(self.runs.owned, rows, ONE)
            self.model.forgotten(rows, uses[known], tails[known])

    def _recall_filled(self) -> list[Use]:
        """Record reuses of evicted blocks: find the newly filled blocks that have ghosts. Return the uses."""
        times, parts, keys, lengths = zip(*self._filled, strict=True)
        self._filled = []
        ids = np.concatenate(parts)
        found, numbers = self._ghosts.take(np.concatenate(keys))
        serials, uses, tails = _split_numbers(numbers, self._now)
        self._earlier_uses[ids] = 0
        self._earlier_uses[ids[found]] = uses
        runs = self.runs
        known, rows = runs.find(serials)
        if not known.size:
            return []
        found = found[known]
        begin = np.array([part.size for part in parts]).cumsum()
        time = np.array(times)[begin.searchsorted(found, side="right")]
        place = np.minimum(np.concatenate(lengths)[found] - 1, runs.size[rows] - 1)
        self.model.recalled(rows, uses[known], tails[known], time)
        broken = (np.diff(rows) != 0) | (np.diff(place) != 1) | (np.diff(time) != 0)
        first = np.append(True, broken)
        return _uses(time[first], rows[first], place[first], place[np.append(broken, True)] + 1, cached=False)

    def _add_rows(self, ended: list[tuple[bytes, bytes, Ending]]) -> slice:
        """Add rows for requests that have ended."""
        chains, counts, endings = zip(*ended, strict=True)
        runs = self.runs
        rows = runs.add(list(chains))
        chain = np.frombuffer(b"".join(chains), np.int32)
        count = np.frombuffer(b"".join(counts), np.int32)
        sizes = runs.size[rows]
        starts = sizes.cumsum() - sizes
        bounds = runs.bounds[rows]
        group, output, runs.final[rows] = zip(*endings, strict=True)
        count = count + self._earlier_uses.take(chain)
        bounds[:] = np.add.reduceat(count >= LEAST_USES, starts, axis=1, dtype=np.int32).T
        runs.stratum[rows] = (bounds >= sizes[:, None]).sum(axis=1) + group
        runs.covariates[rows] = NEW_BOUNDS.searchsorted(sizes - bounds[:, 0], side="right") + output
        runs.last[rows] = chain.take(starts + sizes - 1)
        firsts = chain.take(starts)
        parent = self._previous.take(firsts)
        self._previous[chain[1:].astype(np.intp)] = chain[:-1]
        self._previous[firsts] = parent
        runs.parent[rows] = parent
        for block in parent[parent >= 0].tolist():
            self._child_count[block] += 1
            self._forked[block] = True
        runs.serial[rows] = np.arange(self._now - sizes.size, self._now)
        return rows

    def _mark_shared(self, rows: slice) -> None:
        """Record how much of the chains of finished conversations other requests share."""
        for row in (rows.start + self.runs.final[rows].nonzero()[0]).tolist():
            forks = self._forked.take(self.runs.blocks(row)).nonzero()[0]
            self.runs.shared[row] = self.runs.base[row] + forks[-1] + 1 if forks.size else 0

    def _claim_reused(self, owner: Numbers, sizes: Numbers, times: Numbers) -> list[Use]:
        """Record that later requests used the first blocks of runs, and now own these blocks. Return the uses."""
        runs = self.runs
        found = owner >= 0
        if count_nonzero(found) < found.size:
            owner, sizes, times = owner[found], sizes[found], times[found]
            if not owner.size:
                return []
        first = owner & ((1 << self._place_bits) - 1)
        _, rows = runs.find(owner >> self._place_bits)
        last = first + sizes
        self.model.used(rows, first, last, times)
        size_of = runs.views.size
        for row, end in zip(rows.tolist(), last.tolist(), strict=True):
            if end < size_of[row]:
                self._forked[runs.block(row, end - 1)] = True
        self._chooser.reparent(runs.advance_starts(rows, first, last))
        return _uses(times, rows, first, last, cached=True)

    def _learn(self) -> None:
        """Fit the model, and drop rows that are no longer useful."""
        runs = self.runs
        steps = (self._now - self._last_fit) / EVERY
        self.model.learn(self._now, stale=steps > 2)
        self.model.fit(DECAY ** min(steps, 20.0))
        self._last_fit = self._now
        serial = runs.serial[: runs.count]
        useful = (runs.end > runs.start)[: runs.count] | self.guard.needed(runs)
        useful |= (serial >= self._now - MEMORY) & (runs.owned[: runs.count] > 0)
        rows = np.flatnonzero(useful)
        if rows.size < 0.9 * runs.count:
            runs.keep(rows)
            self.guard.keep(rows)
            self._chooser.drop_ranks()
            self.model.renumbered()

    def victims(self, count: int) -> Ids:
        self._update_owners()
        chooser = self._chooser
        left = count
        if self._now >= chooser.until:
            self._refresh(left)
        left -= self._evict(left)
        if left:  # the runs that were ranked have no more blocks
            self._refresh(left)
            left -= self._evict(left)
        if left:  # no run can be evicted by score, because each has a child
            left -= chooser.evict_oldest(left)
        parts = chooser.pop_evicted()
        if left:
            raise too_few(left)
        ids = np.concatenate([part for part, _, _ in parts]) if len(parts) > 1 else parts[0][0]
        index = ids.astype(np.intp)
        uses = self.pool.access_count.take(index) + self._earlier_uses.take(index)
        self._gone.append((parts, self.pool.keys_of(ids), uses))
        return ids

    def _evict(self, count: int) -> int:
        """Evict up to `count` blocks by score, or in lru's order while that hits more; return how many.

        Blocks of finished conversations, whose scores are negative, always come first.
        """
        chooser = self._chooser
        if self.guard.learned:
            return chooser.evict_least(count, self._now)
        over = chooser.evict_least(count, self._now, below=0.0)
        return over + chooser.evict_oldest(count - over)

    def _refresh(self, count: int) -> None:
        """Apply all notifications and rank runs again. While lru decides, rank only runs of finished conversations."""
        self._drain()
        if self._now >= FIRST and self._now - self._last_fit >= min(EVERY, self._now / EARLY):
            self._learn()
        self._chooser.rank(count, self._now, self.guard.learned)

    def removed(self, ids: Ids) -> None:
        self._update_owners()
        self._owner[ids] = -1

    @property
    def nbytes(self) -> int:
        waiting = sum(ids.size for _, ids, _, _ in self._filled) + sum(keys.size for _, keys, _ in self._gone)
        # A hit has its owners, a release its blocks and their numbers of uses.
        return super().nbytes + 16 * waiting + 12 * self._num_logged

    def check(self) -> None:
        self._update_owners()
        chains, owner = [np.frombuffer(chain, np.int32) for chain, _, _ in self._ended], self._owner
        self.runs.check(self._child_count)
        assert not self.pool.ref_count[owner >= 0].any(), "a held block has an owner, so it could be evicted"
        self.runs.check_blocks(owner, self._place_bits, self._now - len(chains), chains)

    def clear(self) -> None:
        self._owner.fill(-1)
        self._child_count.fill(0)
        self._previous.fill(-1)
        self._earlier_uses.fill(0)
        self._forked.fill(False)
        self._ghosts.clear()
        self._begin()


def _pieces(hits: list[tuple[Numbers, int]]) -> tuple[Numbers, Numbers, Numbers]:
    """Split hits, given as owners and time, into pieces that are consecutive in one chain.

    Return for each piece the owner of its first block, its number of blocks, and its time.
    """
    owner = np.concatenate([owners for owners, _ in hits])
    time = np.repeat([time for _, time in hits], [owners.size for owners, _ in hits])
    broken = (owner[1:] != owner[:-1] + 1) | (owner[:-1] == NO_OWNER) | (time[1:] != time[:-1])
    first = np.append(True, broken).nonzero()[0]
    return owner[first], np.diff(np.append(first, owner.size)), time[first]


def _split_numbers(numbers: Numbers, now: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return the serials, uses and tails of ghosts' numbers, which have only the low bits of the serials."""
    age = (now - (numbers >> NOTE_BITS)) & ((1 << TIME_BITS) - 1)
    return now - age, numbers >> 1 & 7, numbers & 1


def _uses(time: Numbers, row: Numbers, first: Numbers, last: Numbers, cached: bool) -> list[Use]:
    """Return the uses that these columns list."""
    columns = (time.tolist(), row.tolist(), first.tolist(), last.tolist(), [cached] * time.size)
    return list(zip(*columns, strict=True))
