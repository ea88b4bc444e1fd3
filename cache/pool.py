"""The blocks of one group: reference counts, the table of published blocks, the free list, and eviction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from .hashing import BlockHasher, TokenIds, Words, split_digests
from .observe.residency import Residency, Ticks
from .policies import Block, EvictionPolicy
from .policies.acquire import acquire, check_victims
from .table import HashTable, Ids, count_nonzero

# numpy adds an array of one number in a third of the time that it takes for a Python number.
ONE, ZERO = np.array(1, np.int32), np.array(0, np.int32)


EMPTY: Ids = np.empty(0, np.int32)

# An index of blocks into the pool's arrays. Consecutive blocks get a slice, which is several times faster.
Index = slice | npt.NDArray[np.intp]

# A request's priority, and the seconds for which it holds; see `EvictionPolicy.hinted`.
Hint = tuple[int, "float | None"]

# A pool, its evicted blocks, their hashes, the tick of the eviction, and their old `taken_at` and `prefix_length`.
Eviction = tuple["BlockPool", Ids, Words, int, Ticks, Ids]

log = logging.getLogger("pc.cache")


class Log:
    """State of the running verb, shared by the pools of a manager.

    A verb is a function that changes the manager's state, such as `allocate` or `free`.

    Attributes:
        in_policy: Whether a policy is being called now. A policy must not change the manager's state.
        evicted: Blocks that lose their hashes, logged before they do.
        published: Pools and blocks that get hashes, logged before they do.
        later: Tasks to run when the verb is complete, each a function and its arguments. A task may run twice.
    """

    def __init__(self) -> None:
        self.in_policy = False
        self.evicted: list[Eviction] = []
        self.published: list[tuple[BlockPool, Ids]] = []
        self.later: list[tuple[Any, ...]] = []


class OutOfBlocks(RuntimeError):  # noqa: N818  the name is part of the interface
    """Too few blocks are free or unreferenced. The call that raised it has changed nothing.

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
    outlive their last holder. Partial or uncommitted blocks are known only to the requests that hold them.

    The pool calls the policy in the middle of the manager's work, so the policy may read the manager but must not
    change it (`Log.in_policy`). Its exceptions are logged (logger "pc.cache"). If it names no valid victims, the pool
    evicts the least recently used blocks.

    After an interrupted verb, `rebuild` derives the other fields from `words` and the references of requests. The pool
    logs each change of `words` before it makes the change (`Log`). For an evicted block it also logs `taken_at` and
    `prefix_length`.

    Attributes:
        last_access: Tick of each block's last access or release.
        access_count: Number of requests that used the block since it was last filled.
        prefix_length: Number of blocks of its sequence up to and including the block.
        taken_at: Tick at which the block was last allocated. If the tick is unchanged, the content is too.
        words: Hash of each published block, `[num_blocks, words]`; 0 for other blocks.
        num_free: Number of blocks without content.
        num_cached: Number of complete blocks with a reference count of 0. They stay published until evicted.
        watchers: Caches of tensors. When slots of a block in use get other contents, the pool calls their `refill` with
            the arguments of `BlockPool.refill`, under the manager's lock.
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
        self._hashes = self.words.view(f"V{8 * hasher.words}")[:, 0]  # each hash as one element, to clear some faster
        self.table = HashTable(self.words)
        self.clock = 0
        self.watchers: WeakSet[Any] = WeakSet()
        self._managed = log is not None
        self.log = Log() if log is None else log
        self.residency = Residency()
        self.num_cached = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks
        self._rising = self.table.numbers.tobytes()
        self.policy = policy
        # The victims of a user's own policy are checked.
        self._trusted = type(policy).__module__.startswith("pc.cache.")
        policy.bind(self)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        """Number of blocks that requests hold."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def complete(self) -> npt.NDArray[np.bool_]:
        """For each block, whether it is published."""
        return self.table.listed

    def digests_of(self, ids: Ids) -> list[bytes]:
        """Return the hashes of published blocks."""
        return split_digests(self.words[ids])

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """Return the first word of each block's hash, by which policies recognize a block."""
        # Take rows before the column, because numpy copies a whole column before it takes from it.
        return self.words.take(ids, axis=0)[:, 0]

    def unreferenced(self, ids: Ids) -> int:
        """Return the number of these blocks that have a reference count of 0."""
        return ids.size - int(count_nonzero(self.ref_count.take(ids)))

    def index_of(self, ids: Ids) -> Index:
        """Return an index into the pool's arrays for one or more blocks: a slice if they are consecutive."""
        first = ids.item(0)
        if self._rising.startswith(ids.tobytes(), 4 * first):
            return slice(first, first + ids.size)
        return ids.astype(np.intp)

    def check_available(self, count: int, held: Ids = EMPTY) -> None:
        """Raise OutOfBlocks unless `count` blocks can be allocated.

        `held` are cached blocks that will be held first.
        """
        available = self.num_free + self.num_cached
        if held.size and count + held.size > available:
            available -= self.unreferenced(held)
        if count > available:
            raise OutOfBlocks(count, int(available))

    def hold(self, ids: Ids, hint: Hint | None = None) -> None:
        """Add a reference to complete blocks that a request found, in sequence order, and notify the policy."""
        # `HashTable.leading` returns consecutive blocks as a view of `numbers`.
        consecutive = ids.base is self.table.numbers
        index: Index = slice(ids.item(0), ids.item(0) + ids.size) if consecutive else self.index_of(ids)
        refs = self.ref_count[index]
        self.num_cached -= ids.size - count_nonzero(refs)
        self.ref_count[index] = np.add(refs, ONE)
        self.access_count[index] = np.add(self.access_count[index], ONE)
        self.clock += 1
        self.last_access[index] = self.clock
        self._call("accessed", ids, True)
        if hint is not None:
            self._call("hinted", ids, *hint)

    def share(self, ids: Ids) -> None:
        """Add one more reference to blocks that are held already, without notifying the policy."""
        self.ref_count[ids] += 1

    def take(self, prefix_lengths: Ids, hint: Hint | None = None, each: Sequence[Hint | None] | None = None) -> Ids:
        """Allocate fresh blocks, one for each prefix length: free blocks first, then victims of the policy.

        The caller has checked that enough blocks are available. The blocks belong to one sequence, and the lengths
        ascend. With `each`, every block belongs to another sequence, and has its own hint.
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
        for part, given in [(ids, hint)] if each is None else [(ids[i : i + 1], one) for i, one in enumerate(each)]:
            self._call("accessed", part, False)
            if given is not None:
                self._call("hinted", part, *given)
        return ids

    def refill(self, block: int, first: int, source: int = -1) -> None:
        """Record that the slots of a block from `first` on get new contents.

        Watchers are notified when the verb is complete. `source` is the block that the caller must copy to this block;
        -1: none.
        """
        if block >= 0 and self.watchers:
            self.log.later.append((self._notify_watchers, block, first, source))

    def _notify_watchers(self, block: int, first: int, source: int) -> None:
        for watcher in list(self.watchers):
            watcher.refill(block, first, source)

    def _evict(self, count: int) -> tuple[Ids, Index]:
        """Evict blocks that the policy chooses; return them and their `index_of`."""
        victims = self._choose(count)
        ids = victims[::-1]  # tails are chosen first, so neighbours in memory stay neighbours
        index, before = self.index_of(ids), self.words.take(victims, axis=0)
        taken_at, lengths = self.taken_at.take(victims), self.prefix_length.take(victims)
        self.log.evicted.append((self, victims, before, self.clock, taken_at, lengths))
        self.table.remove(index)
        self._hashes[index] = np.zeros((), self._hashes.dtype)
        self.num_cached -= count
        return ids, index

    def _choose(self, count: int) -> Ids:
        """Return the policy's victims; the least recently used blocks if the policy raises or returns invalid ones."""
        victims: Any = self._call("victims", count)
        if victims is not False:
            if self._trusted and victims.size == count:
                return victims
            try:
                check_victims(self.policy, victims, count)
                if not self.table.contains(victims).all():
                    raise RuntimeError(f"got {victims}, needs cached blocks")
                return np.array(victims, np.int32)  # a policy may write to its own array later
            except RuntimeError as error:
                log.error("%s.victims(%d) returned invalid victims: %s", type(self.policy).__name__, count, error)
        cached = (self.complete & (self.ref_count == 0)).nonzero()[0].astype(np.int32)
        order = np.lexsort((-self.prefix_length[cached], self.last_access[cached]))
        oldest: Ids = cached[order[:count]]
        self._call("removed", oldest)
        return oldest

    def _call(self, hook: str, *args: Any) -> Any:
        """Call a hook of the policy; return False if it raises. A user's policy gets copies and may write to them."""
        try:
            self.log.in_policy = True
            if not self._trusted:
                args = tuple(each.copy() if isinstance(each, np.ndarray) else each for each in args)
            return getattr(self.policy, hook)(*args)
        except Exception:
            log.exception("%s.%s raised; the manager continues", type(self.policy).__name__, hook)
            return False
        finally:
            self.log.in_policy = False

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping, without the policy's."""
        fields = (self.ref_count, self.last_access, self.taken_at, self.access_count, self.prefix_length, self.words)
        return sum(field.nbytes for field in fields) + self._free.nbytes + 2 * len(self._rising) + self.table.nbytes

    def ended(self, returns: float | None, output_tokens: int) -> None:
        """Notify the policy that a request has ended. The releases follow."""
        if returns is not None:
            self._call("returning", returns)
        self._call("finished", output_tokens)

    def release(self, ids: Ids, split: int = 0) -> None:
        """Drop a reference to each block, in the order of their sequence. Complete blocks stay published.

        `split` only saves time: the first `split` blocks likely have consecutive numbers, and so have the others.
        """
        self.clock += 1
        kept: Ids | None = None
        for part in (ids[:split], ids[split:]) if 0 < split < ids.size else (ids,):
            if not part.size:
                continue
            index = self.index_of(part)
            self.ref_count[index] = refs = np.subtract(self.ref_count[index], ONE)
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

    def publish(self, ids: Ids, digests: Words, hint: Hint | None = None) -> tuple[Ids, Ids]:
        """Publish written blocks under their hashes.

        Returns:
            (blocks, duplicates): blocks whose hash another block already has, and these other blocks, each with a new
            reference. The caller must use the duplicates and release its own blocks.
        """
        index, table = self.index_of(ids), self.table
        new = np.less(table.slot_of[index], ZERO)
        if count_nonzero(new) < ids.size:  # some are published already
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
        self.hold(duplicates[double], hint)
        return old, duplicates[double]

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Allocate the blocks of a sequence; see `EvictionPolicy.acquire`."""
        blocks = acquire(self, sequence)
        if not self._managed:
            self.log.evicted.clear()
        return blocks

    def reset(self) -> None:
        """Empty every block. The caller has checked that none is held."""
        self.words.fill(0)
        self._free[:] = self.table.numbers[::-1]
        self.residency = Residency()
        self.rebuild(EMPTY)

    def rebuild(self, held: Ids) -> None:
        """Derive every field from the hashes and from `held`, all block references with repetition.

        The policy forgets what it has learned. It is notified of all blocks in the order of their last access.
        """
        self.ref_count[:] = np.bincount(held, minlength=self.num_blocks) if held.size else 0
        listed: npt.NDArray[np.bool_] = np.asarray(self.words.any(axis=1))
        unheld = self.ref_count == 0
        self.table.renew(listed.nonzero()[0].astype(np.int32))
        known = np.concatenate((self._free, self.table.numbers))  # free blocks keep their order
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
