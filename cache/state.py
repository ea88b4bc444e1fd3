"""What the verbs of a manager work on: the pools, the requests, and who is computing what.

How a verb stays whole. It looks first, at whether blocks are available too, and only then changes anything; so errors
of the caller leave all as it was. While it changes something, an interrupt (`KeyboardInterrupt`, or what
another thread raises in this one) may come between any two instructions. So before a change that nothing else tells
of, a verb notes in `ManagerState.changes` how to undo it (journal.py). What is noted is forgotten at once when the verb
is complete. If an exception comes
before, `ManagerState.undo` undoes what is noted and derives the rest anew from the requests and the hashes of
blocks: reference counts, the table, the free list, host slots, writers, and what the policy knows. That takes time in
proportion to all blocks, but only then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np

from .allocation import Allocation, BaseAllocation, CacheStats, GroupedAllocation
from .groups import FullAttention, Group, Tensors
from .hashing import BlockHasher, Words, split_digests
from .history import History
from .journal import COMPLETES, Journal
from .listeners import Listeners
from .lookup import Hit, Reuse
from .policies import PolicyLike, make_policy
from .pool import EMPTY, BlockPool, HostSlots
from .remembered import RememberedHashes
from .request import Preempted, Request
from .table import Ids

# Requests between looks at how much policies take.
FIT_EVERY = 256
# Interrupts in a row that the undoing of a verb withstands.
ATTEMPTS = 100

OnEvict = Callable[[int, Ids, list[bytes]], "Collection[bytes] | object | None"]

# Evicted blocks and their hashes, and of which group they are.
Victims = list[tuple[int, Ids, list[bytes]]]

T = TypeVar("T")


class Handover:
    """What a verb has evicted and hands to `on_evict`; as long as its frame has this, the blocks are not handed out.

    Attributes:
        victims: Blocks and their hashes, of one group each.
        taken: Of them, how many the tier took.
        failed: Calls of `on_evict` that raised.
    """

    def __init__(self) -> None:
        self.victims: Victims = []
        self.taken = self.failed = 0


class Saving(NamedTuple):
    """Blocks that a handover holds a reference on: while it lives, and in the process where its thread does."""

    handover: ref[Handover]
    thread: int
    victims: Victims


class ManagerState:
    """The state of a manager; its lock is the manager's business.

    Attributes:
        prefix_only: Whether there is one group, which needs all its blocks.
        reuses: By name, what finds more than whole blocks of a prefix, from when it is first asked for.
        changes: How to undo what the verb that runs has done; empty when none does. See above.
        refills: What watchers of the pools are to be notified of; see `BlockPool.refill`.
        evicted: What the verb that runs has evicted so far, None where there is no tier.
        saving: What `on_evict` is called with at this moment.
        writers: Which request computes the block of a hash.
        history: What is remembered for `CacheManager.explain`.
        asked: Requests, prompt tokens asked for, and tokens found: in the prefix, behind a gap, in part of a block,
            elsewhere.
        merged: Blocks that another request had completed first.
        offloaded: Evicted blocks that a tier took.
        failed_offloads: Calls of `on_evict` that raised.
    """

    def __init__(
        self, num_blocks: int, hasher: BlockHasher, groups: Sequence[Group], policy: PolicyLike, host_blocks: int
    ) -> None:
        self.block_size = hasher.block_size
        self.hasher = hasher
        self.memory = RememberedHashes()
        hasher.begin = self.memory.begin
        self.groups = tuple(groups)
        self.prefix_only = len(groups) == 1 and isinstance(groups[0], FullAttention | Tensors)
        self.allocation: type[BaseAllocation] = Allocation if len(groups) == 1 else GroupedAllocation
        self.changes = Journal()
        self.refills: list[tuple[BlockPool, int, int, int]] = []
        self.listeners = Listeners(self.changes)
        self.reuses: dict[str, Reuse] = {}
        self.on_evict: OnEvict | None = None
        self.pools = [BlockPool(g.num_blocks or num_blocks, hasher, make_policy(policy), self.changes) for g in groups]
        for group, pool in enumerate(self.pools):
            pool.on_evict = partial(self.note_evicted, group)
            pool.on_first_choice = self.fit_hashes
            pool.refills = self.refills
        self.fit_hashes()
        self.running: dict[Hashable, Request] = {}
        self.preempted: dict[Hashable, Preempted] = {}
        self.host = [HostSlots(host_blocks) for _ in groups]
        self.evicted: Victims | None = None
        self.saving: list[Saving] = []
        self.writers: dict[bytes, Hashable] = {}
        self.history = History(self.pools)
        self._zero_counters()

    def fit_hashes(self) -> None:
        """Leaves to remembered hashes what pools and policies do not take of the bookkeeping's bytes."""
        self.memory.fit(sum(pool.num_blocks for pool in self.pools), self.nbytes - self.memory.nbytes)

    def with_reuse(self, name: str) -> dict[str, Reuse]:
        """`reuses` with one more of `pc.cache.reuse`, which is imported when one is first asked for."""
        module = importlib.import_module(".reuse", __package__)
        return {**self.reuses, name: module.make_reuse(name, self.pools[0], self.changes)}

    def extended(self, request: Request, hit: Hit, reuse: str = "prefix", segments: Any = None) -> Hit:
        """A hit with what else can be reused."""
        for user in self.reuses.values():
            hit = user.extend(request, hit, reuse, segments)
        return hit

    def _zero_counters(self) -> None:
        self.merged = self.preemptions = self.offloaded = self.failed_offloads = 0
        self.asked = (0, 0, 0, 0, 0, 0)

    def run(self, verb: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Calls a verb with this state and `args`, then notifies of what it did; one that raises changed nothing."""
        changes, listeners = self.changes, self.listeners
        if changes.in_policy:
            raise RuntimeError("the manager was called from within a hook of its eviction policy")
        nested = listeners.busy
        try:
            if changes:  # what further interrupts have kept from being undone, or ended
                self.undo(nested)
            if self.saving:
                self.end_saving(lambda saving: saving.handover() is None)
            result = verb(self, *args)
            if changes:
                changes.clear()  # from here on the verb is complete
                if self.refills:
                    self._refill()
            if listeners.queue and not nested:
                listeners.notify()
            return result
        except BaseException:
            attempts = 0
            while True:  # no call is before the first attempt, so that no further interrupt comes before it
                try:
                    self.undo(nested)
                    break
                except BaseException:  # another one: from the start again
                    attempts += 1
                    if attempts == ATTEMPTS:
                        raise
            raise

    def _refill(self) -> None:
        """Notifies watchers of the pools."""
        while self.refills:
            pool, *refill = self.refills[0]
            for watcher in list(pool.watchers):
                watcher.refill(*refill)
            self.refills.pop(0)

    def settle(self) -> None:
        """Undoes what even that did not come to; whoever calls the manager next does it."""
        if self.changes and not self.changes.in_policy:
            self.undo(False)

    def undo(self, nested: bool) -> None:
        """Undoes what a verb that did not come to its end has done; `nested`: it was called by a listener."""
        self.changes.in_policy, self.listeners.busy, self.evicted = False, nested, None
        if self.changes:
            self.changes.undo()
            self.refills.clear()
            self._rebuild()
            self.changes.clear()

    def _rebuild(self) -> None:
        """Derives from requests and hashes what follows from them."""
        for request_id in self.running.keys() & self.preempted.keys() if self.preempted else ():
            del self.preempted[request_id]
        self.writers.clear()
        self.writers.update({r.writing: i for i, r in self.running.items() if r.writing is not None})
        for group, (pool, host) in enumerate(zip(self.pools, self.host, strict=True)):
            pool.rebuild(np.concatenate(self._references(group)))
            host.rebuild(self._host_slots(group))

    def _references(self, group: int) -> list[Ids]:
        """All block references that there are in a group."""
        held = [EMPTY]
        for saving in self.saving:
            held += [ids for at, ids, _ in saving.victims if at == group]
        for request in self.running.values():
            held += [request.held(group), *((request.replaced or [])[group : group + 1])]
        return held

    def _host_slots(self, group: int) -> list[int]:
        """All host slots in use by a group."""
        slots = [saved.slots[group] for saved in self.preempted.values() if saved.slots]
        slots += [request.loading[group] for request in self.running.values() if request.loading]
        return [slot for some in slots for slot in some]

    @property
    def nbytes(self) -> int:
        """See `CacheManager.nbytes`."""
        return sum(pool.nbytes + pool.policy.nbytes for pool in self.pools) + self.memory.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of what finds more than whole blocks of a prefix."""
        return sum(user.nbytes for user in self.reuses.values())

    def per_group(self, values: list[T]) -> Any:
        """One value a group as callers see it: the value itself where there is one group."""
        return values if len(values) > 1 else values[0]

    def get(self, request_id: Hashable) -> Request:
        """A running request."""
        if (request := self.running.get(request_id)) is None:
            raise KeyError(f"request_id: got {request_id!r}, needs a running request")
        return request

    def check_new(self, name: str, request_id: Hashable) -> None:
        """Refuses an id in use."""
        if request_id in self.running or request_id in self.preempted:
            raise ValueError(f"{name}: got {request_id!r}, which is running, needs a new one")

    def start_writing(self, request_id: Hashable, request: Request, block: int) -> Hashable:
        """Notes that a request computes a block of its prompt, unless another does: the id of that one, or None."""
        if block < len(request.digests):
            digest = request.digests[block].tobytes()
            writer = self.writers.setdefault(digest, request_id)
            if writer is not request_id:
                return writer
            request.writing = digest
        return None

    def stop_writing(self, request: Request) -> None:
        """Others may compute what a request said that it computes."""
        if request.writing is not None:
            self.writers.pop(request.writing, None)
            request.writing = None

    def note_evicted(self, group: int, ids: Ids, words: Words) -> None:
        """Blocks with these hashes were evicted."""
        self.history.blocks_evicted(words)
        for user in self.reuses.values():
            user.removed(words)
        if self.evicted is not None or self.listeners.registered:
            hashes = split_digests(words)
            if self.evicted is not None:
                self.evicted.append((group, ids, hashes))
            self.listeners.add("removed", group, hashes)

    def end_saving(self, over: Callable[[Saving], bool]) -> None:
        """Drops the references of handovers."""
        ended = [saving for saving in self.saving if over(saving)]
        if ended:
            self.changes.fields(self, "saving")
        self.saving = [saving for saving in self.saving if saving not in ended]
        for saving in ended:
            for group, blocks, _ in saving.victims:
                self.pools[group].unshare(blocks)

    def end_step(self, request: Request) -> None:
        """Gives back what was held for the step that is over: replaced blocks, host slots that were read."""
        loading, request.loading = request.loading, []
        replaced, request.replaced = request.replaced, None
        for host, slots in zip(self.host, loading, strict=False):
            host.give_back(slots)
        for pool, ids in zip(self.pools, replaced or (), strict=False):
            pool.release(ids)

    def release(self, request_id: Hashable, request: Request, returns: float | None = None) -> None:
        """Ends a running request and releases all it holds; `undo` completes it once it is gone from `running`."""
        del self.running[request_id]; self.changes[:] = [COMPLETES]  # fmt: skip  # noqa: E702  no interrupt is between
        if request.replaced is not None or request.loading:
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

    def behind_window(self, request: Request, group: int, position: int) -> tuple[int, int, Ids]:
        """Blocks that no query at `position` or later reads: the range of logical blocks, and those held in it."""
        spec, size = self.groups[group], self.block_size
        last = spec.first_needed(position, size)
        first = max(request.released[group], spec.sink_blocks(size))
        if request.new_states:  # still to be written
            last = min([last, *[block for at, block in request.new_states if at == group]])
        if last <= first:
            return first, first, EMPTY
        ids = request.tables[group][first:last]
        return first, last, ids[ids >= 0]

    def leave_window(self, request: Request, group: int, position: int) -> None:
        """Releases what `behind_window` names."""
        first, last, ids = self.behind_window(request, group, position)
        if last > first:
            self.clear_table(request, group, first, last)
            request.released = [*request.released[:group], last, *request.released[group + 1 :]]
            self.pools[group].release(ids)

    def clear_table(self, request: Request, group: int, first: int, last: int) -> None:
        """Makes logical blocks [first, last) of a table holes."""
        part = request.tables[group][first:last]
        self.changes.append((request.put_blocks, group, first, part.copy()))
        part.fill(-1)

    def stats(self) -> CacheStats:
        """See `CacheManager.stats`."""
        total_requests, queried, prefix, gap, partial, moved = self.asked
        residency = [pool.residency.totals() for pool in self.pools]
        return CacheStats(
            num_blocks=sum(p.num_blocks for p in self.pools),
            free_blocks=sum(p.num_free for p in self.pools),
            cached_blocks=int(sum(p.num_cached for p in self.pools)),
            held_blocks=int(sum(p.num_held for p in self.pools)),
            num_requests=len(self.running),
            total_requests=total_requests,
            queried_tokens=queried,
            hit_tokens=prefix + gap + partial,
            hit_tokens_by_cause={"prefix": prefix, "gap": gap, "partial": partial},
            moved_tokens=moved,
            index_bytes=self.index_bytes,
            evictions=sum(p.residency.evictions for p in self.pools),
            offloaded_blocks=self.offloaded,
            failed_offloads=self.failed_offloads,
            merged_blocks=self.merged,
            residency=tuple(np.sum([counts for counts, _ in residency], axis=0).tolist()),
            residency_sum=sum(total for _, total in residency),
            preemptions=self.preemptions,
            host_blocks=sum(host.count - host.num_free for host in self.host),
        )

    def reset(self) -> None:
        """Forgets all cached blocks and counters; once begun, `undo` does not undo that but completes it."""
        busy = len(self.running) + len(self.preempted)
        if busy or self.saving:
            what = f"{busy} requests are running or preempted" if busy else "blocks are being saved by on_evict"
            raise RuntimeError(f"reset: {what}, needs none; free them first")
        self.listeners.add("cleared")
        self.changes[:] = [(self._empty,)]
        self._empty()

    def _empty(self) -> None:
        for pool in self.pools:
            pool.reset()
        self._zero_counters()
        self.history.clear()
        for user in self.reuses.values():
            user.clear()

    def check(self) -> None:
        """Asserts every invariant."""
        assert not self.changes, "a verb was left in the middle"
        assert {r.writing: i for i, r in self.running.items() if r.writing is not None} == self.writers, "a lost writer"
        for group, pool in enumerate(self.pools):
            for request in self.running.values():
                held = request.held(group)
                assert np.unique(held).size == held.size, "a request holds a block twice"
                assert request.num_blocks == -(-len(request.tokens) // self.block_size), "a table has another length"
                assert request.committed <= len(request.tokens), "more committed than there is"
                assert request.published * self.block_size <= request.committed, "published before it was written"
                before = request.tables[group][: request.published].copy()
                before[[block for at, block in request.new_states if at == group and block < before.size]] = -1
                assert pool.table.contains(before[before >= 0]).all(), "a committed block is not published"
            pool.check(np.concatenate(self._references(group)))
            self.host[group].check(self._host_slots(group))
