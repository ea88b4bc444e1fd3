"""The blocks of one group: reference counts, the table of findable blocks, the free list, and who is evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .hashing import BlockHasher, TokenIds, Words, encode_tokens
from .policies import Block, EvictionPolicy
from .table import HashTable, Ids, Places

EMPTY: Ids = np.empty(0, np.int32)


class OutOfBlocks(RuntimeError):  # noqa: N818  the name is part of the interface
    """Too few blocks are free or unreferenced; the call that raised it has changed nothing."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} blocks, {available} are free or unreferenced")
        self.needed = needed
        self.available = available


class BlockPool:
    """Blocks `0..num_blocks - 1`, each free, held by requests, or cached (complete and held by nobody).

    A block in the table is complete (its KV is written, it is findable) or pending (a request is about to write it).
    Only complete blocks outlive their last holder.

    Attributes:
        ref_count: Holders of each block, int32.
        last_access: Tick of the last access or release, int64.
        access_count: Requests that took the block since it was last filled, int32.
        prefix_length: Blocks of its sequence up to and including it, int32.
        words: Hash of each block, `[words, num_blocks]` uint64; of meaning while the block is in the table.
        complete: Whether the block is findable; one more entry, for "block" -1, is always False.
        clock: The current tick.
        evictions: Blocks evicted so far.
        on_evict: Called with the blocks that are about to lose their content.
    """

    def __init__(self, num_blocks: int, hasher: BlockHasher, policy: EvictionPolicy) -> None:
        self.num_blocks = num_blocks
        self.hasher = hasher
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.last_access = np.zeros(num_blocks, np.int64)
        self.access_count = np.zeros(num_blocks, np.int32)
        self.prefix_length = np.zeros(num_blocks, np.int32)
        self.words: Words = np.zeros((hasher.words, num_blocks), np.uint64)
        self.complete = np.zeros(num_blocks + 1, np.bool_)
        self.table = HashTable(self.words)
        self.clock = 0
        self.evictions = 0
        self.on_evict: Callable[[Ids], None] | None = None
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
        return self._evictable

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return self._num_free + self._evictable

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.available

    def digests_of(self, ids: Ids) -> list[bytes]:
        """The hashes of blocks."""
        raw = np.ascontiguousarray(self.words[:, ids].T).tobytes()
        width = 8 * self.words.shape[0]
        return [raw[i : i + width] for i in range(0, len(raw), width)]

    def unreferenced(self, ids: Ids) -> int:
        """How many of these blocks nobody holds."""
        return ids.size - int(np.count_nonzero(self.ref_count.take(ids)))

    def hold(self, ids: Ids) -> None:
        """Takes a reference on complete blocks, in the order of their sequence."""
        index = ids.astype(np.intp)
        refs = self.ref_count.take(index)
        self._evictable -= ids.size - int(np.count_nonzero(refs))
        refs += 1
        self.ref_count[index] = refs
        self.clock += 1
        self.last_access[index] = self.clock
        self.access_count[index] += 1
        self.policy.accessed(ids, hit=True)

    def share(self, ids: Ids) -> None:
        """Takes one more reference on held blocks."""
        self.ref_count[ids] += 1

    def take(
        self, prefix_lengths: Ids, digests: Words | None = None, listed: Ids | None = None, ends: Places | None = None
    ) -> Ids:
        """Takes fresh blocks, empty ones first, then victims of the policy.

        Args:
            prefix_lengths: One for each block, ascending; the caller has made sure that so many are available.
            digests: Hashes of the first of them, those that are complete once written.
            listed: What `table.search` found for those hashes; where it is -1 the block goes into the table, pending.
            ends: Where that search ended.
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
        self.access_count[index] = 1
        self.prefix_length[index] = prefix_lengths
        if digests is not None and digests.size:
            num_full = digests.shape[1]
            for own, word in zip(self.words, digests, strict=True):
                own[index[:num_full]] = word
            if listed is not None and (listed >= 0).any():
                new = listed < 0
                self.table.insert(ids[:num_full][new], None if ends is None else ends[new])
            else:
                self.table.insert(ids[:num_full], ends)
        self.policy.accessed(ids, hit=False)
        return ids

    def _evict(self, count: int) -> Ids:
        victims = self.policy.victims(count)
        if self.on_evict is not None:
            self.on_evict(victims)
        self.table.remove(victims)
        self.complete[victims] = False
        self._evictable -= count
        self.evictions += count
        return victims

    def drop(self, ids: Ids) -> None:
        """Forgets cached blocks that nobody holds: they are free from now on."""
        self.policy.removed(ids)
        self._evictable -= ids.size
        self.table.remove(ids)
        self.complete[ids] = False
        self._give_back(ids)

    def _give_back(self, ids: Ids) -> None:
        self._free[self._num_free : self._num_free + ids.size] = ids[::-1]
        self._num_free += ids.size

    def release(self, ids: Ids) -> None:
        """Gives up a reference on each block, in the order of their sequence; what is complete stays findable."""
        if not ids.size:
            return
        refs = self.ref_count.take(ids)
        refs -= 1
        self.ref_count[ids] = refs
        self.clock += 1
        if refs.any():
            ids = ids[refs == 0]
        complete = self.complete.take(ids)
        kept = ids if complete.all() else ids[complete]
        if kept.size:
            self.last_access[kept] = self.clock
            self._evictable += kept.size
            self.policy.released(kept)
        if kept.size != ids.size:
            lost = ids[~complete]
            self.table.remove(lost)
            self._give_back(lost)

    def publish(self, ids: Ids) -> list[tuple[int, int]]:
        """Makes written blocks findable under their `words`.

        Returns:
            (block, complete block of the same hash) where there already was one: the caller is to use that one, on
            which a reference has been taken, and to give up its own.
        """
        mine = self.table.contains(ids)
        merged: list[tuple[int, int]] = []
        if not mine.all():
            others = ids[~mine]
            found = self.table.find(self.words[:, others])
            there = found >= 0
            twin = there & self.complete[found]
            self.table.remove(found[there & ~twin])  # pending elsewhere: whoever is first to write owns the entry
            self.table.insert(others[~twin])
            if twin.any():
                self.hold(found[twin])
                merged = list(zip(others[twin].tolist(), found[twin].tolist(), strict=True))
                ids = np.concatenate((ids[mine], others[~twin]))
        self.complete[ids] = True
        return merged

    def disclaim(self, ids: Ids) -> None:
        """Takes pending blocks out of the table: their holder will write something else."""
        self.table.remove(ids)

    def find_complete(self, digests: Words) -> Ids:
        """The complete block of each hash, -1 where there is none."""
        found = self.table.find(digests)
        found[~self.complete.take(found)] = -1
        return found

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """See `EvictionPolicy.acquire`."""
        size = self.hasher.block_size
        if len(sequence) and isinstance(sequence[0], bytes):
            raw = b"".join(sequence)  # type: ignore[arg-type]
            count = len(sequence)
            if len(raw) != 8 * self.hasher.words * count:
                raise ValueError(f"sequence: got {len(raw)} bytes, needs {count} hashes of {8 * self.hasher.words}")
            digests = np.frombuffer(raw, np.uint64).reshape(count, -1).T
        else:
            tokens = encode_tokens(sequence, "sequence")  # type: ignore[arg-type]
            count = -(-len(tokens) // size)
            digests = self.hasher.chain().extend(tokens, len(tokens) // size)
        found = self.find_complete(digests)
        misses = np.flatnonzero(found < 0)
        hits = found[: misses[0]] if misses.size else found
        needed = count - hits.size
        available = self.available - self.unreferenced(hits)
        if needed > available:
            raise OutOfBlocks(needed, available)
        if hits.size:
            self.hold(hits)
        rest = digests[:, hits.size :]
        lengths = np.arange(hits.size + 1, count + 1, dtype=np.int32)
        fresh = self.take(lengths, rest, self.table.find(rest)) if needed else EMPTY
        ids = np.concatenate((hits, fresh))
        hashes = [*self.digests_of(ids[: digests.shape[1]]), None]
        return [
            Block(
                number=int(b),
                cached=i < hits.size,
                hash=hashes[min(i, digests.shape[1])],
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
        self.complete.fill(False)
        self.ref_count.fill(0)
        self._free[:] = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_blocks
        self._evictable = 0
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
        assert not self.complete[free].any(), "a free block is findable"
        assert not self.complete[-1], "no block is findable"
        cached = (self.ref_count == 0) & self.complete[:-1]
        assert int(cached.sum()) == self._evictable, "the count of cached blocks is wrong"
        in_use = int(np.count_nonzero(self.ref_count))
        assert free.size + self._evictable + in_use == self.num_blocks, "free + cached + held differs from all"
        self.table.check()
        listed = self.table.contains(np.arange(self.num_blocks, dtype=np.int32))
        assert listed[self.complete[:-1]].all(), "a complete block is not in the table"
        assert not listed[free].any(), "a free block is in the table"
