"""The blocks of one group: reference counts, the table of published blocks, the free list, and who is evicted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from .hashing import BlockHasher, TokenIds, Words, split_digests
from .observe.residency import Residency, Ticks
from .policies import Block, EvictionPolicy
from .policies.acquire import acquire
from .table import HashTable, Ids, count_nonzero

# As arrays they take a third of the time that numbers take.
ONE, ZERO = np.array(1, np.int32), np.array(0, np.int32)


EMPTY: Ids = np.empty(0, np.int32)

# Blocks as an index of the fields: a slice where they are consecutive, which is several times as quick.
Index = slice | npt.NDArray[np.intp]

# A pool, the blocks that it evicted, their hashes, the tick, and the ticks at which they were taken.
Eviction = tuple["BlockPool", Ids, Words, int, Ticks]

log = logging.getLogger("pc.cache")


class Watcher(Protocol):
    """A cache that follows the slots of a pool."""

    def refill(self, block: int, first: int, source: int) -> None:
        """See `BlockPool.refill`; called under the manager's lock."""


class Log:
    """What the pools of a manager share about the verb that runs.

    Attributes:
        in_policy: Whether a policy is being called at this moment. A policy must not call the manager.
        evicted: Blocks that lose their hashes, logged before they do.
        published: Pools and blocks that get hashes, logged before they do.
        later: Tasks for when the verb is complete, each a function and its arguments. A task may be done twice.
    """

    def __init__(self) -> None:
        self.in_policy = False
        self.evicted: list[Eviction] = []
        self.published: list[tuple[BlockPool, Ids]] = []
        self.later: list[tuple[Any, ...]] = []


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
        super().__init__(needed, available)
        self.needed, self.available = needed, available

    def __str__(self) -> str:
        return f"needs {self.needed} blocks, {self.available} are free or unreferenced"


class BlockPool:
    """Blocks `0..num_blocks - 1`, each free, held by requests, or cached (complete, with a reference count of 0).

    Complete blocks are those in the table: their KV is written and they are published in the prefix cache. Only they
    outlive their last holder; blocks that are partial, or not committed yet, are known only to the requests that hold
    them.

    A policy is called in the middle of the manager's work. It must not call the manager (`Log.in_policy`). Its
    exceptions are logged (logger "pc.cache"). If it names no valid victims, the pool evicts the blocks used longest
    ago.

    `words` and the references of requests decide all other fields: `rebuild` derives them after an interrupted verb.
    The pool logs each change of `words` before it makes it (`Log`).

    Attributes:
        last_access: Tick of the last access or release of each block.
        access_count: Requests that took the block since it was last filled.
        prefix_length: Blocks of its sequence up to and including it.
        taken_at: Tick at which the block was last taken fresh: while it stands, the content is the same.
        words: Hash of each published block, `[num_blocks, words]`, 0 for the others.
        num_free: Blocks without content.
        num_cached: Complete blocks with a reference count of 0: published until evicted.
        on_first_choice: Called once, after the first victims were chosen: a policy may take more memory from then on.
        watchers: Notified which slots of a block that stays in use take other tokens; see `Watcher`.
        log: Changes and tasks of the running verb, shared by the pools of a manager.
    """

    def __init__(self, num_blocks: int, hasher: BlockHasher, policy: EvictionPolicy, log: Log | None = None) -> None:
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
        self.on_first_choice: Callable[[], None] | None = None
        self.watchers: WeakSet[Watcher] = WeakSet()
        self._managed = log is not None
        self.log = Log() if log is None else log
        self.residency = Residency()
        self.num_cached = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks
        self._rising = self.table.numbers.tobytes()
        self._absent = b"\xff" * (4 * num_blocks)
        self.policy = policy
        # A policy of one's own is not believed without a look.
        self._trusted = type(policy).__module__.startswith("pc.cache.")
        policy.bind(self)

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def complete(self) -> npt.NDArray[np.bool_]:
        """Per block, whether it is published."""
        return self.table.listed

    def digests_of(self, ids: Ids) -> list[bytes]:
        """The hashes of published blocks."""
        return split_digests(self.words[ids])

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """The first word of the hash of each block."""
        # Rows first: to take from a column, numpy copies all of it.
        return self.words.take(ids, axis=0)[:, 0]

    def unreferenced(self, ids: Ids) -> int:
        """How many of these blocks have a reference count of 0."""
        return ids.size - int(count_nonzero(self.ref_count.take(ids)))

    def index_of(self, ids: Ids) -> Index:
        """Blocks, at least one, as an index of the fields."""
        first = ids.item(0)
        if self._rising.startswith(ids.tobytes(), 4 * first):
            return slice(first, first + ids.size)
        return ids.astype(np.intp)

    def check_available(self, count: int, held: Ids = EMPTY) -> None:
        """Raises OutOfBlocks unless `count` blocks can be taken; `held` are cached ones that are about to be held."""
        available = self.available
        if held.size and count + held.size > available:
            available -= self.unreferenced(held)
        if count > available:
            raise OutOfBlocks(count, int(available))

    def hold(self, ids: Ids) -> None:
        """Takes a reference on complete blocks, in the order of their sequence."""
        first = ids.item(0)
        # `HashTable.leading` returns consecutive blocks so.
        consecutive = ids.base is self.table.numbers
        index: Index = slice(first, first + ids.size) if consecutive else self.index_of(ids)
        if type(index) is slice:
            refs, counts = self.ref_count[index], self.access_count[index]
            self.num_cached -= ids.size - count_nonzero(refs)
            np.add(refs, ONE, refs)
            np.add(counts, ONE, counts)
        else:
            refs = self.ref_count.take(index)
            self.num_cached -= ids.size - count_nonzero(refs)
            self.ref_count[index] = np.add(refs, ONE)
            self.access_count[index] = np.add(self.access_count.take(index), ONE)
        self.clock += 1
        self.last_access[index] = self.clock
        self._call("accessed", ids, True)

    def share(self, ids: Ids) -> None:
        """Takes one more reference on held blocks."""
        self.ref_count[ids] += 1

    def unshare(self, ids: Ids) -> None:
        """Drops what `share` took; that is a release, and an access, only of blocks that nothing else holds."""
        alone = self.ref_count.take(ids) == 1
        self.ref_count[ids[~alone]] -= 1
        if alone.any():
            self.release(ids[alone])

    def take(self, prefix_lengths: Ids, runs: bool = True) -> Ids:
        """Takes fresh blocks, one for each prefix length: empty ones first, then victims of the policy.

        The caller has made sure that so many are available. Without `runs` each is of another sequence; else they are a
        run of one, the lengths ascending.
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
        self.last_access[index] = self.taken_at[index] = self.clock
        self.access_count[index] = 1
        self.prefix_length[index] = prefix_lengths
        for part in (ids,) if runs else [ids[i : i + 1] for i in range(count)]:
            self._call("accessed", part, False)
        return ids

    def refill(self, block: int, first: int, source: int = -1) -> None:
        """Says that the slots of a block from `first` on take other tokens than they, or what is copied there, held.

        Watchers are notified when the verb is complete. `source` is the block that the caller is told to copy to it, as
        its slots are now; -1 is no block.
        """
        if block >= 0 and self.watchers:
            self.log.later.append((self._notify_watchers, block, first, source))

    def _notify_watchers(self, block: int, first: int, source: int) -> None:
        for watcher in list(self.watchers):
            watcher.refill(block, first, source)

    def _evict(self, count: int) -> tuple[Ids, Index]:
        """Evict blocks; return them and their index."""
        victims = self._choose(count)
        ids = victims[::-1]  # chosen tail first: so neighbours in memory are neighbours in the new sequence too
        index, words = self.index_of(ids), self.words
        before = words[index].copy() if type(index) is slice else words.take(index, axis=0)
        self.log.evicted.append((self, victims, before[::-1], self.clock, self.taken_at.take(victims)))
        self.table.remove(index)
        words[index] = 0
        self.num_cached -= count
        return ids, index

    def _choose(self, count: int) -> Ids:
        victims: Any = self._call("victims", count)
        if self.on_first_choice is not None:
            first, self.on_first_choice = self.on_first_choice, None
            first()
        if victims is not False:
            if (self._trusted and victims.size == count) or self._all_evictable(victims, count):
                return victims
            log.error("%s.victims(%d) chose what cannot be evicted: %s", type(self.policy).__name__, count, victims)
        cached = (self.complete & (self.ref_count == 0)).nonzero()[0].astype(np.int32)
        order = np.lexsort((-self.prefix_length[cached], self.last_access[cached]))
        oldest: Ids = cached[order[:count]]
        self._call("removed", oldest)
        return oldest

    def _all_evictable(self, ids: object, count: int) -> bool:
        return bool(
            isinstance(ids, np.ndarray)
            and ids.dtype == np.int32
            and ids.size == count
            and ((ids >= 0) & (ids < self.num_blocks)).all()
            and np.unique(ids).size == ids.size
            and not self.ref_count[ids].any()
            and self.table.contains(ids).all()
        )

    def _call(self, hook: str, *args: Any) -> Any:
        """Calls a hook of the policy; False where it raises."""
        try:
            self.log.in_policy = True
            return getattr(self.policy, hook)(*args)
        except Exception:
            log.exception("%s.%s raised; the manager goes on", type(self.policy).__name__, hook)
            return False
        finally:
            self.log.in_policy = False

    def hinted(self, ids: Ids, priority: int, ttl: float | None) -> None:
        """See `EvictionPolicy.hinted`; holes are left out, and without a hint nothing is done."""
        if (priority or ttl is not None) and ids.size:
            self._call("hinted", ids[ids >= 0], priority, ttl)

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping, the policy's own not counted."""
        fields = (self.ref_count, self.last_access, self.taken_at, self.access_count, self.prefix_length, self.words)
        return sum(field.nbytes for field in fields) + self._free.nbytes + 3 * len(self._rising) + self.table.nbytes

    def ended(self, returns: float | None, output_tokens: int) -> None:
        """Notifies the policy that a request has ended; the releases follow."""
        if returns is not None:
            self._call("returning", returns)
        self._call("finished", output_tokens)

    def release(self, ids: Ids, split: int = 0) -> None:
        """Drops a reference on each block, in the order of their sequence; what is complete stays published.

        The first `split` are likely to be consecutive, apart from the others.
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
                free = part[~complete]
                self._free[self.num_free : self.num_free + free.size] = free[::-1]
                self.num_free += free.size
                part = part[complete]
                if not part.size:
                    continue
                index = self.index_of(part)
            self.last_access[index] = self.clock
            self.num_cached += part.size
            kept = part if kept is None else np.concatenate((kept, part))
        if kept is not None:
            self._call("released", kept)

    def publish(self, ids: Ids, digests: Words) -> tuple[Ids, Ids]:
        """Publishes written blocks under their hashes: (blocks, duplicates) where another block has the hash already.

        The caller is to use the other one, on which a reference has been taken, and to release its own.
        """
        index, table = self.index_of(ids), self.table
        slots = table.slot_of[index]
        if slots.tobytes() != self._absent[: slots.nbytes]:  # some are published already
            new = slots < 0
            ids, digests = ids[new], digests[new]
            if not ids.size:
                return EMPTY, EMPTY
            index = self.index_of(ids)
        self.log.published.append((self, ids))
        self.words[index] = digests
        duplicates = table.put(ids, digests)
        if duplicates is None:
            self._call("completed", ids)
            return EMPTY, EMPTY
        double = duplicates >= 0
        old = ids[double]
        self.words[old] = 0
        self._call("completed", ids[~double])
        self.hold(duplicates[double])
        return old, duplicates[double]

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """See `EvictionPolicy.acquire`."""
        blocks = acquire(self, sequence)
        if not self._managed:
            self.log.evicted.clear()
        return blocks

    def reset(self) -> None:
        """Empties every block; the caller has made sure that none is held."""
        self.table.clear()
        self.words.fill(0)
        self.ref_count.fill(0)
        self._free[:] = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = self.num_blocks
        self.num_cached = 0
        self.residency.clear()
        self._call("clear")

    def rebuild(self, held: Ids) -> None:
        """Derives every field anew from the hashes and all block references that there are, `held`, with repetition.

        The policy forgets what it has learned; it is told of all blocks in the order of their last access.
        """
        self.ref_count[:] = np.bincount(held, minlength=self.num_blocks) if held.size else 0
        listed: npt.NDArray[np.bool_] = np.asarray(self.words.any(axis=1))
        unheld = self.ref_count == 0
        self.table.renew(listed.nonzero()[0].astype(np.int32))
        known = np.concatenate((self._free, self.table.numbers))  # what was free keeps its order
        order = known[np.sort(np.unique(known, return_index=True)[1])]
        free = order[(unheld & ~listed)[order]]
        self._free[: free.size] = free
        self.num_free = free.size
        self.num_cached = int(count_nonzero(unheld & listed))
        self._call("clear")
        used = (listed | ~unheld).nonzero()[0].astype(np.int32)
        used = used[np.lexsort((self.prefix_length[used], self.last_access[used]))]
        for ids in np.split(used, np.diff(self.last_access[used]).nonzero()[0] + 1) if used.size else ():
            self._call("accessed", ids, False)
            for hook, chosen in (("completed", listed[ids]), ("released", (listed & unheld)[ids])):
                if chosen.any():
                    self._call(hook, ids[chosen])

    def check(self, held: Ids) -> None:
        """Asserts every invariant of the pool; `held` are all block references that there are, with repetition."""
        refs = np.bincount(held, minlength=self.num_blocks) if held.size else np.zeros(self.num_blocks, np.int64)
        assert np.array_equal(refs, self.ref_count), "reference counts differ from what requests hold"
        free = self._free[: self.num_free]
        assert np.unique(free).size == free.size, "a block is free twice"
        assert not self.ref_count[free].any(), "a free block is held"
        listed = self.table.listed
        assert not listed[free].any(), "a free block is published"
        assert not self.words[~listed].any(), "a block that is not published has a hash"
        cached = (self.ref_count == 0) & listed
        assert int(cached.sum()) == self.num_cached, "the count of cached blocks is wrong"
        in_use = int(np.count_nonzero(self.ref_count))
        assert free.size + self.num_cached + in_use == self.num_blocks, "free + cached + held differs from all"
        self.table.check()
        self.policy.check()


class HostSlots:
    """Block-sized slots of host memory for one group, by number; the memory itself is the engine's."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots not in use."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` slots; the caller has made sure that so many are free."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: list[int]) -> None:
        """Makes slots free."""
        self._free += slots

    def rebuild(self, held: list[int]) -> None:
        """Makes all slots free but these."""
        self._free = sorted(set(range(self.count)).difference(held), reverse=True)

    def check(self, held: list[int]) -> None:
        """Asserts that every slot is free or held, once."""
        assert sorted([*self._free, *held]) == list(range(self.count)), "a host slot is lost or in two places"
