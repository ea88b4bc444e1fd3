"""The blocks of one group: reference counts, the table of findable blocks, the free list, and who is evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from .hash_tree import Node
from .hashing import BlockHasher, TokenIds, Words, encode_tokens
from .policies import Block, EvictionPolicy
from .table import HashTable, Ids, count_nonzero

RESIDENCY_BOUNDS = 1 << np.arange(0, 21, 2)
"""Upper bounds of the residency histogram, in ticks: 1, 4, 16 ... about a million."""

EMPTY: Ids = np.empty(0, np.int32)


TOGETHER = 1024
"""Guesses that are kept in one array at most: a node that outlives its neighbours must not keep much more alive."""


class Watcher(Protocol):
    """Keeps something beside the KV in the slots of a pool's blocks."""

    def refill(self, block: int, first: int) -> None:
        """See `BlockPool.refill`; called under the manager's lock."""


class OutOfBlocks(RuntimeError):  # noqa: N818  the name is part of the interface
    """Too few blocks are free or unreferenced; the call that raised it has changed nothing."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} blocks, {available} are free or unreferenced")
        self.needed = needed
        self.available = available


class BlockPool:
    """Blocks `0..num_blocks - 1`, each free, held by requests, or cached (complete and held by nobody).

    Complete blocks are those in the table: their KV is written and they are findable. Only they outlive their last
    holder; blocks that are partial, or not committed yet, are known to the requests that hold them and to nobody else.

    Attributes:
        ref_count: Holders of each block, int32.
        last_access: Tick of the last access or release, int64.
        access_count: Requests that took the block since it was last filled, int32.
        prefix_length: Blocks of its sequence up to and including it, int32.
        taken_at: Tick at which the block was last taken fresh, int64: while it stands, the content is the same.
        words: Hash of each block, `[num_blocks, words]` uint64; of meaning while the block is full.
        clock: The current tick.
        evictions: Blocks evicted so far.
        on_evict: Called with the blocks that are about to lose their content.
        watchers: Told which slots of a block that stays in use take other tokens; see `Watcher`.
    """

    def __init__(self, num_blocks: int, hasher: BlockHasher, policy: EvictionPolicy) -> None:
        self.num_blocks = num_blocks
        self.hasher = hasher
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.last_access = np.zeros(num_blocks, np.int64)
        self.access_count = np.zeros(num_blocks, np.int32)
        self.prefix_length = np.zeros(num_blocks, np.int32)
        self.taken_at = np.zeros(num_blocks, np.int64)
        self.words: Words = np.zeros((num_blocks, hasher.words), np.uint64)
        self.table = HashTable(self.words)
        self.clock = 0
        self.evictions = 0
        self._residency = np.zeros(RESIDENCY_BOUNDS.size + 1, np.int64)
        self._residency_sum = 0
        self._ages: list[tuple[int, npt.NDArray[np.int64]]] = []
        self.on_evict: Callable[[Ids], None] | None = None
        self.watchers: WeakSet[Watcher] = WeakSet()
        self._evictable = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self.policy = policy
        policy.bind(self)

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Complete blocks that nobody holds: findable until evicted."""
        return int(self._evictable)

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return self._num_free + self._evictable

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self._num_free - self.num_cached

    def digests_of(self, ids: Ids) -> list[bytes]:
        """The hashes of blocks."""
        raw = self.words[ids].tobytes()
        width = 8 * self.words.shape[1]
        return [raw[i : i + width] for i in range(0, len(raw), width)]

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """The first word of the hash of each block."""
        # Rows first: to take from a column, numpy copies all of it.
        keys: npt.NDArray[np.uint64] = self.words.take(ids, axis=0)[:, 0]
        return keys

    @property
    def complete(self) -> npt.NDArray[np.bool_]:
        """Per block, whether it is findable."""
        return self.table.listed

    def unreferenced(self, ids: Ids) -> int:
        """How many of these blocks nobody holds."""
        return ids.size - int(np.count_nonzero(self.ref_count.take(ids)))

    def hold(self, ids: Ids) -> None:
        """Takes a reference on complete blocks, in the order of their sequence."""
        index = ids.astype(np.intp)
        refs = self.ref_count.take(index)
        self._evictable -= ids.size - count_nonzero(refs)
        refs += 1
        self.ref_count[index] = refs
        self.clock += 1
        self.last_access[index] = self.clock
        counts = self.access_count.take(index)
        counts += 1
        self.access_count[index] = counts
        self.policy.accessed(ids, hit=True)

    def share(self, ids: Ids) -> None:
        """Takes one more reference on held blocks."""
        self.ref_count[ids] += 1

    def take(self, prefix_lengths: Ids, digests: Words | None = None) -> Ids:
        """Takes fresh blocks, empty ones first, then victims of the policy.

        Args:
            prefix_lengths: One for each block, ascending; the caller has made sure that so many are available.
            digests: Hashes of the first of them, those that are complete once written.
        """
        count = prefix_lengths.size
        from_free = min(count, self._num_free)
        self._num_free -= from_free
        if not from_free:
            ids = self._evict(count)
        else:
            ids = self._free[self._num_free : self._num_free + from_free][::-1].copy()
            if from_free < count:
                ids = np.concatenate((ids, self._evict(count - from_free)))
        index = ids.astype(np.intp)
        self.clock += 1
        self.ref_count[index] = 1
        self.last_access[index] = self.clock
        self.taken_at[index] = self.clock
        self.access_count[index] = 1
        self.prefix_length[index] = prefix_lengths
        if digests is not None and len(digests):
            self.words[index[: len(digests)]] = digests
        self.policy.accessed(ids, hit=False)
        return ids

    def refill(self, block: int, first: int) -> None:
        """Says that the slots of a block from `first` on take other tokens than they, or what is copied there, held."""
        if block >= 0:
            for watcher in list(self.watchers):
                watcher.refill(block, first)

    def _evict(self, count: int) -> Ids:
        victims = self.policy.victims(count)
        if self.on_evict is not None:
            self.on_evict(victims)
        self.table.remove(victims)
        self._evictable -= count
        self.evictions += count
        self._ages.append((self.clock, self.taken_at.take(victims)))
        if len(self._ages) > 256:
            self.residency()
        return victims[::-1]  # given up tail first: so neighbours in memory are neighbours in the new sequence too

    def residency(self) -> tuple[npt.NDArray[np.int64], int]:
        """Ticks that evicted blocks had been there: a count for each of `RESIDENCY_BOUNDS` and beyond, and the sum."""
        if self._ages:
            ages = np.concatenate([now - then for now, then in self._ages])
            self._ages.clear()
            self._residency += np.bincount(RESIDENCY_BOUNDS.searchsorted(ages), minlength=self._residency.size)
            self._residency_sum += int(ages.sum())
        return self._residency, self._residency_sum

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping, the policy's own not counted."""
        fields = (self.ref_count, self.last_access, self.taken_at, self.access_count, self.prefix_length, self.words)
        return sum(field.nbytes for field in fields) + self._free.nbytes + self.table.nbytes

    def drop(self, ids: Ids) -> None:
        """Forgets cached blocks that nobody holds: they are free from now on."""
        if self.on_evict is not None:
            self.on_evict(ids)
        self.policy.removed(ids)
        self._evictable -= ids.size
        self.table.remove(ids)
        self._give_back(ids)

    def _give_back(self, ids: Ids) -> None:
        self._free[self._num_free : self._num_free + ids.size] = ids[::-1]
        self._num_free += ids.size

    def release(self, ids: Ids) -> None:
        """Gives up a reference on each block, in the order of their sequence; what is complete stays findable."""
        if not ids.size:
            return
        index = ids.astype(np.intp)
        refs = self.ref_count.take(index)
        refs -= 1
        self.ref_count[index] = refs
        self.clock += 1
        if count_nonzero(refs):
            ids = ids[refs == 0]
        complete = self.table.contains(ids)
        kept = ids if count_nonzero(complete) == ids.size else ids[complete]
        if kept.size:
            self.last_access[kept] = self.clock
            self._evictable += kept.size
            self.policy.released(kept)
        if kept.size != ids.size:
            self._give_back(ids[~complete])

    def publish(self, ids: Ids) -> tuple[Ids, Ids]:
        """Makes written blocks findable under their `words`.

        Returns:
            (blocks, duplicates): blocks whose hash another block has already. The caller is to use the other one, on
            which a reference has been taken, and to give up its own.
        """
        known = self.table.contains(ids)
        if count_nonzero(known):
            ids = ids[~known]
        duplicates = self.table.put(ids)
        double = duplicates >= 0
        if not count_nonzero(double):
            self.policy.completed(ids)
            return EMPTY, EMPTY
        self.policy.completed(ids[~double])
        self.hold(duplicates[double])
        return ids[double], duplicates[double]

    def leading(self, digests: Words, path: list[Node]) -> Ids:
        """The complete blocks of the first hashes, up to the first that has none.

        Args:
            digests: The hashes of a sequence.
            path: Remembered chunks it begins with: where they were last found is tried first.
        """
        guess = _guess(path)
        if not guess.size:
            return self.table.leading(digests)
        count = self.table.confirm(guess, digests[: guess.size])
        if count < guess.size:
            guess = guess[:count]
            for node in path:
                node.table = None
        if count == len(digests) or not self.table.has(digests[count]):
            return guess
        return np.concatenate((guess, self.table.leading(digests[count:])))

    @staticmethod
    def note(path: list[Node], table: Ids) -> None:
        """Leaves the blocks of a request as guesses for `leading`."""
        at = first = 0
        shared: Ids | None = None
        for node in path:
            stop = at + node.size
            if node.table is not None:
                shared = None
            else:
                if shared is None or stop - first > TOGETHER:
                    first, shared = at, table[at : at + TOGETHER].copy()
                node.table, node.at = shared, at - first
            at = stop

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """See `EvictionPolicy.acquire`."""
        size = self.hasher.block_size
        if len(sequence) and isinstance(sequence[0], bytes):
            raw = b"".join(sequence)  # type: ignore[arg-type]
            count = len(sequence)
            if len(raw) != 8 * self.hasher.words * count:
                raise ValueError(f"sequence: got {len(raw)} bytes, needs {count} hashes of {8 * self.hasher.words}")
            digests = np.frombuffer(raw, np.uint64).reshape(count, self.hasher.words)
        else:
            tokens = encode_tokens(sequence, "sequence")  # type: ignore[arg-type]
            count = -(-len(tokens) // size)
            digests = self.hasher.chain().extend(tokens, len(tokens) // size)
        hits = self.table.leading(digests)
        needed = count - hits.size
        available = self.available - self.unreferenced(hits)
        if needed > available:
            raise OutOfBlocks(needed, available)
        if hits.size:
            self.hold(hits)
        lengths = np.arange(hits.size + 1, count + 1, dtype=np.int32)
        fresh = self.take(lengths, digests[hits.size :]) if needed else EMPTY
        ids = np.concatenate((hits, fresh))
        hashes = [*self.digests_of(ids[: digests.shape[0]]), None]
        return [
            Block(
                number=int(b),
                cached=i < hits.size,
                hash=hashes[min(i, digests.shape[0])],
                ref_count=int(self.ref_count[b]),
                last_access=int(self.last_access[b]),
                access_count=int(self.access_count[b]),
                prefix_length=int(self.prefix_length[b]),
            )
            for i, b in enumerate(ids)
        ]

    def reset(self) -> None:
        """Empties every block; the caller has made sure that none is held."""
        self.table.clear()
        self.ref_count.fill(0)
        self._free[:] = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_blocks
        self._evictable = 0
        self.evictions = self._residency_sum = 0
        self._residency.fill(0)
        self._ages.clear()
        self.policy.clear()

    def check(self, held: Ids) -> None:
        """Asserts every invariant of the pool.

        Args:
            held: Every block reference that requests have, with repetition.
        """
        refs = np.bincount(held, minlength=self.num_blocks) if held.size else np.zeros(self.num_blocks, np.int64)
        assert np.array_equal(refs, self.ref_count), "reference counts differ from what requests hold"
        free = self._free[: self._num_free]
        assert np.unique(free).size == free.size, "a block is free twice"
        assert not self.ref_count[free].any(), "a free block is held"
        listed = self.table.listed
        assert not listed[free].any(), "a free block is findable"
        cached = (self.ref_count == 0) & listed
        assert int(cached.sum()) == self._evictable, "the count of cached blocks is wrong"
        in_use = int(np.count_nonzero(self.ref_count))
        assert free.size + self._evictable + in_use == self.num_blocks, "free + cached + held differs from all"
        self.table.check()


def _guess(path: list[Node]) -> Ids:
    """The blocks that chunks were last found in, up to the first chunk of which nothing is known."""
    runs: list[Ids] = []
    shared: Ids | None = None
    start = stop = 0
    for node in path:
        if node.table is not shared:
            if shared is not None:
                runs.append(shared[start:stop])
            shared, start = node.table, node.at
        if shared is None:
            break
        stop = node.at + node.size
    if shared is not None:
        runs.append(shared[start:stop])
    return runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else EMPTY
