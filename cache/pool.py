"""The blocks of one group: reference counts, the table of findable blocks, the free list, and who is evicted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from .hashing import BlockHasher, TokenIds, Words, encode_tokens
from .policies import Block, EvictionPolicy
from .residency import Residency
from .table import HashTable, Ids, count_nonzero

ONE, ZERO = np.array(1, np.int32), np.array(0, np.int32)
"""As arrays they take a third of the time that numbers take."""

EMPTY: Ids = np.empty(0, np.int32)

Index = slice | npt.NDArray[np.intp]
"""Blocks as an index of the fields: a slice where they are consecutive, which is several times as quick."""

log = logging.getLogger("pc.cache")


class Watcher(Protocol):
    """A cache that follows the slots of a pool."""

    def refill(self, block: int, first: int) -> None:
        """See `BlockPool.refill`; called under the manager's lock."""


class Guard:
    """Whether a policy is being told or asked at this moment, so that a call back into the manager is noticed."""

    __slots__ = ("in_policy",)

    def __init__(self) -> None:
        self.in_policy = False


class OutOfBlocks(RuntimeError):  # noqa: N818  the name is part of the interface
    """Too few blocks are free or unreferenced; the call that raised it has changed nothing.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=2, block_size=4)
        >>> try:
        ...     manager.allocate("a", range(9))
        ... except pc.OutOfBlocks as error:
        ...     print(error)
        needs 3 blocks, 2 are free or unreferenced
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} blocks, {available} are free or unreferenced")
        self.needed = needed
        self.available = available


class BlockPool:
    """Blocks `0..num_blocks - 1`, each free, held by requests, or cached (complete and held by nobody).

    Complete blocks are those in the table: their KV is written and they are findable. Only they outlive their last
    holder; blocks that are partial, or not committed yet, are known to the requests that hold them and to nobody else.

    A policy is told and asked in the middle of the manager's work. What it raises is logged (logger "pc.cache") and
    the work goes on; where it has no valid victims to name, the blocks used longest ago go.

    Attributes:
        ref_count: Holders of each block, int32.
        last_access: Tick of the last access or release, int64.
        access_count: Requests that took the block since it was last filled, int32.
        prefix_length: Blocks of its sequence up to and including it, int32.
        taken_at: Tick at which the block was last taken fresh, int64: while it stands, the content is the same.
        words: Hash of each findable block, `[num_blocks, words]` uint64, 0 for the others.
        num_free: Blocks without content.
        clock: The current tick.
        residency: How many blocks were evicted, and how long they had been there.
        numbers: All blocks in order, int32, not to be written.
        on_removed: Called with the hashes of evicted blocks; only while `heard` is not empty.
        on_first_choice: Called once, after the first victims were chosen: a policy may take more memory from then on.
        heard: Who wants to hear of evictions.
        watchers: Told which slots of a block that stays in use take other tokens; see `Watcher`.
    """

    def __init__(
        self, num_blocks: int, hasher: BlockHasher, policy: EvictionPolicy, guard: Guard | None = None
    ) -> None:
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
        self.on_removed: Callable[[list[bytes]], None] | None = None
        self.on_first_choice: Callable[[], None] | None = None
        self.heard: Sequence[object] = ()
        self.watchers: WeakSet[Watcher] = WeakSet()
        self.residency = Residency()
        self._evictable = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks
        self.numbers = np.arange(num_blocks, dtype=np.int32)
        self.numbers.flags.writeable = False
        self._rising = self.numbers.tobytes()
        self._absent = b"\xff" * (4 * num_blocks)
        self._guard = guard or Guard()
        self.policy = policy
        # A policy of one's own is not believed without a look.
        self._trusted = type(policy).__module__.startswith("pc.cache.")
        policy.bind(self)

    @property
    def num_cached(self) -> int:
        """Complete blocks that nobody holds: findable until evicted."""
        return int(self._evictable)

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return self.num_free + self._evictable

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def complete(self) -> npt.NDArray[np.bool_]:
        """Per block, whether it is findable."""
        return self.table.listed

    def digests_of(self, ids: Ids) -> list[bytes]:
        """The hashes of findable blocks."""
        raw = self.words[ids].tobytes()
        width = 8 * self.words.shape[1]
        return [raw[i : i + width] for i in range(0, len(raw), width)]

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """The first word of the hash of each block."""
        # Rows first: to take from a column, numpy copies all of it.
        keys: npt.NDArray[np.uint64] = self.words.take(ids, axis=0)[:, 0]
        return keys

    def unreferenced(self, ids: Ids) -> int:
        """How many of these blocks nobody holds."""
        return ids.size - int(count_nonzero(self.ref_count.take(ids)))

    def index_of(self, ids: Ids) -> Index:
        """Blocks, at least one, as an index of the fields."""
        first = ids.item(0)
        if self._rising.startswith(ids.tobytes(), 4 * first):
            return slice(first, first + ids.size)
        return ids.astype(np.intp)

    def hold(self, ids: Ids) -> None:
        """Takes a reference on complete blocks, in the order of their sequence."""
        if ids.base is self.numbers:  # as `find_leading` gives blocks that are consecutive
            first = ids.item(0)
            index: Index = slice(first, first + ids.size)
        else:
            index = self.index_of(ids)
        if type(index) is slice:
            refs, counts = self.ref_count[index], self.access_count[index]
            self._evictable -= ids.size - count_nonzero(refs)
            np.add(refs, ONE, refs)
            np.add(counts, ONE, counts)
        else:
            refs = self.ref_count.take(index)
            self._evictable -= ids.size - count_nonzero(refs)
            self.ref_count[index] = np.add(refs, ONE)
            self.access_count[index] = np.add(self.access_count.take(index), ONE)
        self.clock += 1
        self.last_access[index] = self.clock
        guard = self._guard
        guard.in_policy = True
        try:
            self.policy.accessed(ids, True)
        except Exception:
            self._log("accessed")
        finally:
            guard.in_policy = False

    def share(self, ids: Ids) -> None:
        """Takes one more reference on held blocks."""
        self.ref_count[ids] += 1

    def take(self, prefix_lengths: Ids, runs: bool = True) -> Ids:
        """Takes fresh blocks, empty ones first, then victims of the policy.

        Args:
            prefix_lengths: One for each block; the caller has made sure that so many are available.
            runs: Whether they are a run of one sequence, the lengths ascending; else each is of another sequence.
        """
        count, num_free = prefix_lengths.size, self.num_free
        if not num_free:
            ids, index = self._evict(count)
        else:
            if count <= num_free:
                self.num_free = num_free - count
                ids = self._free[num_free - count : num_free][::-1].copy()
            else:
                self.num_free = 0
                ids = np.concatenate((self._free[:num_free][::-1], self._evict(count - num_free)[0]))
            index = self.index_of(ids)
        self.clock += 1
        self.ref_count[index] = 1
        self.last_access[index] = self.clock
        self.taken_at[index] = self.clock
        self.access_count[index] = 1
        self.prefix_length[index] = prefix_lengths
        guard = self._guard
        guard.in_policy = True
        try:
            if runs:
                self.policy.accessed(ids, False)
            else:
                for i in range(count):
                    self.policy.accessed(ids[i : i + 1], False)
        except Exception:
            self._log("accessed")
        finally:
            guard.in_policy = False
        return ids

    def refill(self, block: int, first: int) -> None:
        """Says that the slots of a block from `first` on take other tokens than they, or what is copied there, held."""
        if block >= 0 and self.watchers:
            for watcher in list(self.watchers):
                watcher.refill(block, first)

    def _evict(self, count: int) -> tuple[Ids, Index]:
        """Blocks that have lost their content, and their index."""
        victims = self._choose(count)
        hashes = self.digests_of(victims) if self.heard else []
        ids = victims[::-1]  # given up tail first: so neighbours in memory are neighbours in the new sequence too
        index = self._unlist(ids)
        self._evictable -= count
        self.residency.add(self.clock, self.taken_at.take(victims))
        if hashes and self.on_removed is not None:
            self.on_removed(hashes)
        return ids, index

    def remove_victims(self, count: int) -> tuple[Ids, list[bytes]]:
        """Takes `count` cached blocks, at least so many there are, out of the table: with their hashes."""
        victims = self._choose(count)
        hashes = self.digests_of(victims)
        self._unlist(victims)
        self._evictable -= count
        return victims, hashes

    def _choose(self, count: int) -> Ids:
        guard = self._guard
        guard.in_policy = True
        try:
            victims: Ids = self.policy.victims(count)
            if self.on_first_choice is not None:
                first, self.on_first_choice = self.on_first_choice, None
                first()
            if victims.size == count and (self._trusted or self._evictable_all(victims)):
                return victims
            log.error("%s.victims(%d) gave what it cannot give up: %s", type(self.policy).__name__, count, victims)
        except Exception:
            self._log("victims")
        finally:
            guard.in_policy = False
        cached = (self.complete & (self.ref_count == 0)).nonzero()[0].astype(np.int32)
        order = np.lexsort((-self.prefix_length[cached], self.last_access[cached]))
        victims = cached[order[:count]]
        self._tell("removed", victims)
        return victims

    def _evictable_all(self, ids: Ids) -> bool:
        return bool(
            ids.dtype == np.int32
            and ((ids >= 0) & (ids < self.num_blocks)).all()
            and np.unique(ids).size == ids.size
            and not self.ref_count[ids].any()
            and self.table.contains(ids).all()
        )

    def _tell(self, hook: str, *args: Any) -> None:
        """Tells the policy of what happens less often than at every request."""
        self._guard.in_policy = True
        try:
            getattr(self.policy, hook)(*args)
        except Exception:
            self._log(hook)
        finally:
            self._guard.in_policy = False

    def _log(self, hook: str) -> None:
        log.exception("%s.%s raised; the manager goes on", type(self.policy).__name__, hook)

    def hinted(self, ids: Ids, priority: int, ttl: float | None) -> None:
        """See `EvictionPolicy.hinted`."""
        if ids.size:
            self._tell("hinted", ids, priority, ttl)

    def _unlist(self, ids: Ids) -> Index:
        """Takes blocks out of the table; their index."""
        index = self.index_of(ids)
        self.table.remove(index)
        self.words[index] = 0
        return index

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping, the policy's own not counted."""
        fields = (self.ref_count, self.last_access, self.taken_at, self.access_count, self.prefix_length, self.words)
        return sum(field.nbytes for field in fields) + self._free.nbytes + 3 * len(self._rising) + self.table.nbytes

    def pin(self, victims: Ids) -> None:
        """Keeps blocks that were chosen to be evicted from being handed out while their content is saved."""
        self.ref_count[victims] = 1

    def give_up(self, victims: Ids) -> None:
        """Frees pinned blocks: they are evicted."""
        self.ref_count[victims] = 0
        self.residency.add(self.clock, self.taken_at.take(victims))
        self._give_back(victims)

    def restore(self, victims: Ids, hashes: list[bytes]) -> None:
        """Makes pinned blocks findable again, as if they had not been chosen; frees one whose hash has come back."""
        self.ref_count[victims] = 0
        digests = np.frombuffer(b"".join(hashes), np.uint64).reshape(len(hashes), -1)
        self.words[victims] = digests
        known = self.table.put(victims, digests)
        lost = known >= 0 if known is not None else np.zeros(victims.size, np.bool_)
        self.words[victims[lost]] = 0
        self._give_back(victims[lost])
        self.residency.add(self.clock, self.taken_at.take(victims[lost]))
        kept = victims[~lost][::-1]
        self._evictable += int(kept.size)
        if kept.size:
            self._tell("completed", kept)
            self._tell("released", kept)

    def _give_back(self, ids: Ids) -> None:
        self._free[self.num_free : self.num_free + ids.size] = ids[::-1]
        self.num_free += ids.size

    def ended(self, returns: float | None, output_tokens: int) -> None:
        """Tells the policy that a request has ended; the releases follow."""
        guard = self._guard
        guard.in_policy = True
        try:
            if returns is not None:
                self.policy.returning(returns)
            self.policy.finished(output_tokens)
        except Exception:
            self._log("finished")
        finally:
            guard.in_policy = False

    def release(self, ids: Ids, split: int = 0) -> None:
        """Gives up a reference on each block, in the order of their sequence; what is complete stays findable.

        Args:
            ids: Blocks.
            split: How many of the first are likely to be consecutive, apart from the others.
        """
        self.clock += 1
        kept: Ids | None = None
        for part in (ids[:split], ids[split:]) if 0 < split < ids.size else (ids,):
            if not part.size:
                continue
            index = self.index_of(part)
            if type(index) is slice:
                refs = self.ref_count[index]
                np.subtract(refs, ONE, refs)
            else:
                self.ref_count[index] = refs = np.subtract(self.ref_count.take(index), ONE)
            held = count_nonzero(refs)
            if held:
                if held == part.size:
                    continue
                part = part[refs == 0]
                index = self.index_of(part)
            complete = np.greater_equal(self.table.slot_of[index], ZERO)
            if count_nonzero(complete) < part.size:
                self._give_back(part[~complete])
                part = part[complete]
                if not part.size:
                    continue
                index = self.index_of(part)
            self.last_access[index] = self.clock
            self._evictable += part.size
            kept = part if kept is None else np.concatenate((kept, part))
        if kept is None:
            return
        guard = self._guard
        guard.in_policy = True
        try:
            self.policy.released(kept)
        except Exception:
            self._log("released")
        finally:
            guard.in_policy = False

    def publish(self, ids: Ids, digests: Words) -> tuple[Ids, Ids]:
        """Makes written blocks findable under their hashes.

        Returns:
            (blocks, duplicates): blocks whose hash another block has already. The caller is to use the other one, on
            which a reference has been taken, and to give up its own.
        """
        index = self.index_of(ids)
        table = self.table
        slots = table.slot_of[index]
        if slots.tobytes() != self._absent[: slots.nbytes]:  # some are findable already
            new = slots < 0
            ids, digests = ids[new], digests[new]
            if not ids.size:
                return EMPTY, EMPTY
            index = self.index_of(ids)
        self.words[index] = digests
        duplicates = table.put(ids, digests)
        if duplicates is None:
            self._tell("completed", ids)
            return EMPTY, EMPTY
        double = duplicates >= 0
        old = ids[double]
        self.words[old] = 0
        self._tell("completed", ids[~double])
        self.hold(duplicates[double])
        return old, duplicates[double]

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
            digests = self.hasher.hash_blocks(tokens)
        hits = self.table.leading(digests)
        needed = count - hits.size
        available = self.available - self.unreferenced(hits)
        if needed > available:
            raise OutOfBlocks(needed, available)
        if hits.size:
            self.hold(hits)
        lengths = np.arange(hits.size + 1, count + 1, dtype=np.int32)
        fresh = self.take(lengths) if needed else EMPTY
        ids = np.concatenate((hits, fresh))
        raw, width = digests.tobytes(), 8 * self.hasher.words
        hashes = [*(raw[i : i + width] for i in range(0, len(raw), width)), None]
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
        self.words.fill(0)
        self.ref_count.fill(0)
        self._free[:] = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = self.num_blocks
        self._evictable = 0
        self.residency.clear()
        self._tell("clear")

    def check(self, held: Ids) -> None:
        """Asserts every invariant of the pool.

        Args:
            held: Every block reference that requests have, with repetition.
        """
        refs = np.bincount(held, minlength=self.num_blocks) if held.size else np.zeros(self.num_blocks, np.int64)
        assert np.array_equal(refs, self.ref_count), "reference counts differ from what requests hold"
        free = self._free[: self.num_free]
        assert np.unique(free).size == free.size, "a block is free twice"
        assert not self.ref_count[free].any(), "a free block is held"
        listed = self.table.listed
        assert not listed[free].any(), "a free block is findable"
        assert not self.words[~listed].any(), "a block that is not findable has a hash"
        cached = (self.ref_count == 0) & listed
        assert int(cached.sum()) == self._evictable, "the count of cached blocks is wrong"
        in_use = int(np.count_nonzero(self.ref_count))
        assert free.size + self._evictable + in_use == self.num_blocks, "free + cached + held differs from all"
        self.table.check()
        self.policy.check()
