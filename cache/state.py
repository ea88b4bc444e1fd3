"""The state of a manager, on which its verbs work: pools, requests, and the blocks that requests are computing.

A verb is a function that changes a `ManagerState`, such as `allocate` or `free`. Verbs are atomic. A verb first reads
the state, computes the changes and raises all its errors. Then it calls `ManagerState.begin` with the requests that it
will change, and applies the changes. `begin` takes one snapshot. Pools log the fields of evicted blocks before they
overwrite them. If an exception comes before the end, `ManagerState.undo` restores the snapshot and the logged fields.
It rebuilds the rest from them: reference counts, tables, free lists, writers, and the policy's knowledge. An interrupt
(`KeyboardInterrupt`, or an exception that another thread raises in this one) is such an exception, and may come between
any two instructions. The time of a rebuild is proportional to the number of blocks.

With three rules, a verb needs no code to undo its changes:

- A verb grows a request's tokens and tables in place, and replaces every other value (`Request`).
- A verb that removes a request, or tokens of one, removes them in one step. From that step on the verb counts as
  complete, because `undo` can rebuild its remaining changes.
- After the verb is complete, `run` notifies listeners, indexes and watchers (`BlockPool.watchers`) of all that
  `Log.evicted` and `Log.later` hold. After an interrupt, they may be notified twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .groups import FullAttention, Group, Tensors
from .hashing import BlockHasher, split_digests
from .listeners import Listener
from .lookup import Hit
from .observe.history import History
from .offload import Evicted, OnEvict
from .policies import PolicyLike, make_policy
from .pool import EMPTY, BlockPool, Log, log
from .remembered import RememberedHashes
from .request import Request, RequestSnapshot
from .table import Ids

if TYPE_CHECKING:
    from .reuse import Reuse

# Maximum number of attempts to undo a verb, if each is interrupted
ATTEMPTS = 100

T = TypeVar("T")

# The counters of `CacheManager.stats`: requests, queried tokens, hit tokens by cause, and events
COUNTS = (
    *("requests", "queried", "prefix", "gap", "partial", "moved"),
    *("merged", "preemptions", "offloaded", "failed_offloads"),
)
Counts = dict[str, int]

# The values that cannot be rebuilt, as they were before the running verb: `RequestSnapshot` of requests; `counts`,
# `reuses` and `offloading`; the numbers of running and of preempted requests.
Snapshot = tuple["list[RequestSnapshot]", "tuple[Counts, dict[str, Reuse], list[Evicted]]", int, int]


class ManagerState:
    """The state of a manager, which its verbs read and change while the manager holds the lock.

    Attributes:
        prefix_only: Whether there is only one group of layers, and it needs all blocks of a prefix.
        reuses: By name, the indexes for reuse of parts of blocks ("partial") and of text elsewhere ("anywhere").
        log: Changed hashes and tasks of the running verb; see `Log`.
        snapshot: The values that the running verb may change; None while it only reads.
        offloading: For each running call of `on_evict`, the `Evicted` that holds its blocks.
        writers: For the hash of each block that is being computed, the request that computes it.
        listeners: See `CacheManager.listeners`.
        events: Events of complete verbs for the listeners, each a method of `Listener` and its arguments.
        notifying: Whether listeners are being notified. Verbs that they call add their events to `events`.
        history: Memory of `CacheManager.explain`.
        counts: The counters of `CacheManager.stats`.
    """

    def __init__(
        self, num_blocks: int, hasher: BlockHasher, groups: Sequence[Group], policy: PolicyLike, host_blocks: int
    ) -> None:
        self.block_size = hasher.block_size
        self.hasher = hasher
        self.memory = RememberedHashes(sum(g.num_blocks or num_blocks for g in groups))
        hasher.begin = self.memory.begin
        self.groups = tuple(groups)
        self.prefix_only = len(groups) == 1 and isinstance(groups[0], FullAttention | Tensors)
        self.log = Log()
        self.snapshot: Snapshot | None = None
        self.listeners: list[Listener] = []
        self.events: list[tuple[Any, ...]] = []
        self.notifying = False
        self.reuses: dict[str, Reuse] = {}
        self.on_evict: OnEvict | None = None
        self.pools = [BlockPool(g.num_blocks or num_blocks, hasher, make_policy(policy), self.log) for g in groups]
        self.running: dict[Hashable, Request] = {}
        self.preempted: dict[Hashable, Request] = {}
        self.host_blocks = host_blocks
        self.offloading: list[Evicted] = []
        self.writers: dict[bytes, Hashable] = {}
        self.history = History(self.block_size, [pool.num_blocks for pool in self.pools])
        self.counts: Counts = dict.fromkeys(COUNTS, 0)

    def with_reuse(self, name: str) -> dict[str, Reuse]:
        """Return `reuses` with a new index of `pc.cache.reuse`, which is imported on first use."""
        from .reuse import REUSES

        return {**self.reuses, name: REUSES[name](self.pools[0])}

    def extended(self, request: Request, hit: Hit, reuse: str = "prefix", segments: Any = None) -> Hit:
        """Return the hit, extended by each index in `reuses`: parts of blocks, and text at other positions."""
        for index in self.reuses.values():
            hit = index.extend(request, hit, reuse, segments)
        return hit

    def run(self, verb: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Call a verb with this state and `args`, then notify listeners. A verb that raises has changed nothing."""
        log, nested = self.log, self.notifying
        if log.in_policy:
            raise RuntimeError("the manager was called from within a hook of its eviction policy")
        try:
            if self.snapshot is not None or log.evicted or log.later or self.offloading:
                self._settle()  # finish what earlier interrupts and calls of `on_evict` have left
            result = verb(self, *args)
            if self.snapshot is not None:
                self.snapshot = None  # from here on the verb is complete
                if log.evicted or log.later:
                    self._finish()
            if self.events and not nested:
                self._notify()
            return result
        except BaseException:
            attempts = 0
            while True:  # `range` would be a call, in which an interrupt could come before the first attempt
                try:
                    self.undo(nested)
                    break
                except BaseException:  # another interrupt: start again
                    attempts += 1
                    if attempts == ATTEMPTS:
                        raise
            raise

    def begin(self, *requests: Request, growing: Iterable[RequestSnapshot] = ()) -> None:
        """Take the snapshot. After this the running verb changes these requests, and may allocate and release blocks.

        `growing`: snapshots of other requests that only get tokens.
        """
        if self.log.published:
            self.log.published.clear()
        changing = [*map(Request.snapshot, requests), *growing]
        fields = self.counts, self.reuses, self.offloading
        self.snapshot = changing, fields, len(self.running), len(self.preempted)

    def undo(self, nested: bool) -> None:
        """Undo a verb that did not finish, or complete it if it has already removed something.

        `nested`: whether a listener called the verb.
        """
        self.log.in_policy, self.notifying = False, nested
        if self.snapshot is None:
            return
        requests, fields, num_running, num_preempted = self.snapshot
        kept = len(self.running) >= num_running and len(self.preempted) >= num_preempted
        if kept and all(len(request.tokens) >= length for request, length, _ in requests):
            for some, count in ((self.running, num_running), (self.preempted, num_preempted)):
                while len(some) > count:
                    some.popitem()  # compares no keys, which may raise
            for request, length, values in requests:
                request.restore(length, values)
            self.counts, self.reuses, self.offloading = fields
            for pool, ids in self.log.published:
                pool.words[ids] = 0
            for pool, ids, words, _, taken_at, lengths in self.log.evicted:
                pool.words[ids], pool.taken_at[ids], pool.prefix_length[ids] = words, taken_at, lengths
            self.log.later.clear()
            self.log.evicted.clear()
        self._rebuild()
        self.snapshot = None

    def settle(self) -> None:
        """Finish what interrupts have left unfinished, and release the blocks of calls of `on_evict` that have ended.

        Within a policy's hook, in the middle of a verb, do nothing.
        """
        log = self.log
        if (self.snapshot is not None or log.evicted or log.later or self.offloading) and not log.in_policy:
            self.run(lambda state: None, ())

    def _settle(self) -> None:
        """Undo or finish the last verb, and release the blocks of calls of `on_evict` that have ended.

        `run` calls this before the next verb. Other code calls `settle`.
        """
        if self.snapshot is not None:
            self.undo(self.notifying)
        self._finish()
        ended = [evicted for evicted in self.offloading if evicted.is_over]
        if ended:
            self.begin()
            self.offloading = [evicted for evicted in self.offloading if evicted not in ended]
            for evicted in ended:
                self.count(offloaded=evicted.taken, failed_offloads=evicted.failed)
                for group, blocks, _ in evicted.victims:
                    self.pools[group].release(blocks)
            self.snapshot = None

    def _finish(self) -> None:
        """Record the blocks that a complete verb has evicted, and run the tasks that it has queued.

        The history, the indexes and the events for listeners record the blocks. After an interrupt, the next verb does
        the rest.
        """
        evicted, later = self.log.evicted, self.log.later
        while evicted:
            pool, _, words, now, then, _ = evicted[0]
            pool.residency.add(now, then)
            group = self.pools.index(pool)
            self.history.blocks_evicted(words, group)
            for index in self.reuses.values():
                index.removed(words)
            if self.listeners:
                self.events.append(("removed", group, split_digests(words)))
            del evicted[0]
        while later:
            function, *args = later[0]
            function(*args)
            del later[0]

    def _notify(self) -> None:
        """Notify all listeners of all events, in order."""
        self.notifying = True  # stays True after an interrupt, until `undo`
        while self.events:
            event, *args = self.events[0]
            for listener in tuple(self.listeners):
                try:
                    getattr(listener, event)(*args)
                except Exception:  # noqa: PERF203
                    log.exception("%s.%s raised; the manager continues", type(listener).__name__, event)
            del self.events[0]
        self.notifying = False

    def _rebuild(self) -> None:
        """Derive all state that follows from requests and hashes."""
        self.writers.clear()
        self.writers.update({r.writing: i for i, r in self.running.items() if r.writing is not None})
        for group, pool in enumerate(self.pools):
            pool.rebuild(np.concatenate(self.references(group)))

    def references(self, group: int) -> list[Ids]:
        """Return the blocks of a group that something holds, each as often as it is held."""
        held = [EMPTY]
        for evicted in self.offloading:
            held += [ids for at, ids, _ in evicted.victims if at == group]
        for request in self.running.values():
            held += [request.held(group), *((request.replaced or [])[group : group + 1])]
        return held

    def host_slots(self, group: int) -> list[int]:
        """Return the host slots that a group uses, for preempted requests and for blocks that are being loaded."""
        requests = (*self.preempted.values(), *self.running.values())
        return [slot for request in requests if request.host_slots for slot in request.host_slots[group]]

    @property
    def nbytes(self) -> int:
        """Bytes of all bookkeeping; see `CacheManager.nbytes`."""
        pools = sum(pool.nbytes + pool.policy.nbytes for pool in self.pools)
        return pools + self.memory.nbytes + self.index_bytes + self.history.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes in `reuses`."""
        return sum(index.nbytes for index in self.reuses.values())

    def count(self, **more: int) -> None:
        """Add to counters. The dictionary is replaced, because the snapshot has the old one."""
        self.counts = dict(self.counts)
        for name, number in more.items():
            self.counts[name] += number

    def per_group(self, values: list[T]) -> Any:
        """Return one value for each group as callers see it: a list, or the value itself if there is one group."""
        return values if len(values) > 1 else values[0]

    def get(self, request_id: Hashable) -> Request:
        """Return a running request.

        Raises:
            KeyError: No such request is running.
        """
        if (request := self.running.get(request_id)) is None:
            raise KeyError(f"request_id: got {request_id!r}, needs a running request")
        return request

    def table(self, request_id: Hashable, group: int) -> Ids:
        """Return a copy of a request's block table; see `CacheManager.block_table`."""
        request = self.get(request_id)
        if not 0 <= group < len(self.groups):
            raise IndexError(f"group: got {group}, needs 0 to {len(self.groups) - 1}")
        return request.tables[group][: request.num_blocks].copy()

    def block_hashes(self, request_id: Hashable) -> list[bytes]:
        """Return the hashes of a request's full blocks; see `CacheManager.block_hashes`."""
        request = self.get(request_id)
        tokens = request.tokens + request.pending if request.pending else request.tokens
        return split_digests(self.hasher.hash_blocks(tokens, request.keys))

    def victim(self) -> Hashable:
        """Return the request to preempt first; see `CacheManager.victim`."""
        order = [(r.hint[0] if r.hint else 0, -i, request_id) for i, (request_id, r) in enumerate(self.running.items())]
        return min(order, key=lambda row: row[:2])[2] if order else None

    def check_new(self, name: str, request_id: Hashable) -> None:
        """Raise ValueError if an id is in use."""
        if request_id in self.running or request_id in self.preempted:
            raise ValueError(f"{name}: got {request_id!r}, which is in use, needs a new one")

    def start_writing(self, request_id: Hashable, request: Request, block: int) -> Hashable:
        """Record that a request computes a block of its prompt.

        If another request already does, return its id, else None.
        """
        if block < len(request.digests):
            digest = request.digests[block].tobytes()
            writer = self.writers.setdefault(digest, request_id)
            if writer is not request_id:
                return writer
            request.writing = digest
        return None

    def stop_writing(self, request: Request) -> None:
        """Record that a request no longer computes its block, so that others may."""
        self.writers.pop(request.writing or b"", None)
        request.writing = None

    def end_step(self, request: Request) -> None:
        """Release the replaced blocks and the host slots that the last step still read."""
        request.host_slots = ()
        replaced, request.replaced = request.replaced, None
        for pool, ids in zip(self.pools, replaced or (), strict=False):
            pool.release(ids)

    def release(self, request_id: Hashable, request: Request, returns: float | None = None) -> None:
        """End a running request and release all it holds. The caller has called `begin`."""
        del self.running[request_id]
        if request.replaced is not None:
            self.end_step(request)
        if request.writing is not None:
            self.stop_writing(request)
        output_tokens = max(len(request.tokens) - request.prompt_tokens, 0)
        self.history.request_ended(request)
        for group, pool in enumerate(self.pools):
            pool.ended(returns, output_tokens)
            if self.prefix_only:
                pool.release(request.tables[0][: request.num_blocks], request.hit)
            else:
                pool.release(request.held(group))

    def behind_window(self, request: Request, group: int, position: int) -> tuple[slice, Ids]:
        """Return the range of the block table that no query from `position` on reads, and the blocks held there."""
        spec, size = self.groups[group], self.block_size
        first, last = spec.sink_blocks(size), spec.first_needed(position, size)
        if request.new_states:  # a later commit needs the blocks whose states are not written yet
            last = min([last, *[block for at, block in request.new_states if at == group]])
        blocks = slice(first, max(first, last))
        ids = request.tables[group][blocks]
        return blocks, ids[ids >= 0]

    def leave_window(self, request: Request, group: int, position: int) -> None:
        """Release the blocks that `behind_window` returns."""
        blocks, ids = self.behind_window(request, group, position)
        if ids.size:
            request.put_blocks(group, blocks, -1)
            self.pools[group].release(ids)

    def reset(self) -> None:
        """Forget all cached blocks and counters."""
        busy = len(self.running) + len(self.preempted)
        if busy:
            raise RuntimeError(f"reset: {busy} requests are running or preempted, needs none; free them first")
        if self.offloading:
            raise RuntimeError("reset: on_evict is still saving blocks; wait until it returns")
        self.begin()
        self.log.later.append((self._empty,))

    def _empty(self) -> None:
        """Empty the pools, and reset counters, history and indexes. `reset` queues this."""
        for pool in self.pools:
            pool.reset()
        self.counts = dict.fromkeys(COUNTS, 0)
        self.history = History(self.block_size, [pool.num_blocks for pool in self.pools])
        for name in self.reuses:
            self.reuses = self.with_reuse(name)
        if self.listeners:
            self.events.append(("cleared",))
