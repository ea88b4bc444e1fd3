"""What the verbs of a manager work on: the pools, the requests, and who is computing what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from .allocation import Allocation, BaseAllocation, CacheStats, GroupedAllocation
from .groups import FullAttention, Group, Tensors
from .hashing import BlockHasher
from .host_slots import HostSlots
from .listeners import Listeners
from .partial_reuse import PartialIndex
from .policies import EvictionPolicy, make_policy
from .pool import EMPTY, BlockPool, Guard, OutOfBlocks
from .request import Preempted, Request
from .table import Ids

BLOCK_BYTES = 256
"""What the bookkeeping of a block may take; remembered hashes get what the rest leaves."""
BASE_BYTES = 1 << 20
"""What it may take whatever the number of blocks: ghosts and tables of a policy."""
QUEUE_BYTES = 16
"""Of that, what policies may come to need until hashes are fitted again."""
FIT_EVERY = 256
"""Requests between looks at how much policies take."""

OnEvict = Callable[[int, Ids, list[bytes]], "Collection[bytes] | object | None"]

T = TypeVar("T")


class MustEvict(Exception):  # noqa: N818  no error: a verb that has changed nothing asks for room
    """Blocks have to be evicted, and somebody wants to save them first.

    Args:
        counts: Per group, how many.
        held: Per group, cached blocks that must not be among them.
    """

    def __init__(self, counts: list[int], held: Sequence[Ids]) -> None:
        super().__init__()
        self.counts = counts
        self.held = held


class ManagerState:
    """The state of a manager; its lock is the manager's business.

    Attributes:
        groups: Specs of the layer groups.
        pools: The block pool of each.
        simple: Whether there is one group, which needs all its blocks.
        listeners: Who hears of blocks that become findable or cease to be.
        partial: The beginnings of findable blocks, None without partial reuse.
        guard: Notices calls from within a policy.
        on_evict: See `CacheManager.on_evict`.
        running: Requests by id.
        preempted: What is kept of requests that wait for `resume`.
        host: The slots of host memory of each group.
        saving: Blocks that a tier is saving: (group, blocks).
        pinned: Cached blocks that verbs hold while it does, per group; one list a verb.
        adopted: The list of the verb that runs now, if it has one.
        queried: Prompt tokens asked for.
        hits: Tokens found, by cause.
    """

    def __init__(
        self,
        num_blocks: int,
        hasher: BlockHasher,
        groups: Sequence[Group],
        policy: str | EvictionPolicy | type[EvictionPolicy],
        host_blocks: int,
        partial_reuse: bool,
    ) -> None:
        self.block_size = hasher.block_size
        self.hasher = hasher
        self.groups = tuple(groups)
        self.simple = len(groups) == 1 and isinstance(groups[0], FullAttention | Tensors)
        self.allocation: type[BaseAllocation] = Allocation if len(groups) == 1 else GroupedAllocation
        self.listeners = Listeners()
        self.partial = PartialIndex(self.block_size) if partial_reuse else None
        self.guard = Guard()
        self.on_evict: OnEvict | None = None
        self.pools = [BlockPool(g.num_blocks or num_blocks, hasher, make_policy(policy), self.guard) for g in groups]
        for group, pool in enumerate(self.pools):
            pool.on_removed = partial(self.removed, group)
            pool.on_first_choice = self.fit_hashes
            pool.heard = (self.partial,) if self.partial is not None else self.listeners.heard
        self.fit_hashes()
        self.running: dict[Hashable, Request] = {}
        self.preempted: dict[Hashable, Preempted] = {}
        self.host = [HostSlots(host_blocks) for _ in groups]
        self.saving: list[tuple[int, Ids]] = []
        self.pinned: list[list[Ids]] = []
        self.adopted: list[Ids] | None = None
        self.writers: dict[bytes, Hashable] = {}
        self._zero_counters()

    def fit_hashes(self) -> None:
        """Leaves to remembered hashes what pools and policies do not take of the bookkeeping's bytes."""
        blocks, tree = sum(pool.num_blocks for pool in self.pools), self.hasher.tree
        taken = self.nbytes - tree.nbytes
        tree.capacity = max(BASE_BYTES + (BLOCK_BYTES - QUEUE_BYTES) * blocks - taken, 0)

    def _zero_counters(self) -> None:
        self.total_requests = self.queried = self.merged = self.preemptions = self.offloaded = 0
        self.hits = {"prefix": 0, "gap": 0, "partial": 0}

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping: fields, tables and policies of all pools, and remembered hashes."""
        return sum(pool.nbytes + pool.policy.nbytes for pool in self.pools) + self.hasher.tree.nbytes

    def per_group(self, values: list[T]) -> Any:
        """One value a group as callers see it: the value itself where there is one group."""
        return values if len(values) > 1 else values[0]

    def get(self, request_id: Hashable) -> Request:
        """A running request."""
        try:
            return self.running[request_id]
        except KeyError:
            raise KeyError(f"request_id: got {request_id!r}, needs a running request") from None

    def check_new(self, name: str, request_id: Hashable) -> None:
        """Refuses an id in use."""
        if request_id in self.running or request_id in self.preempted:
            raise ValueError(f"{name}: got {request_id!r}, which is running, needs a new one")

    def require(self, counts: list[int], held: Sequence[Ids]) -> None:
        """Makes sure, before anything is changed, that so many blocks of each group can be taken.

        Args:
            counts: Blocks, per group.
            held: Cached blocks that are about to be held, per group.

        Raises:
            OutOfBlocks: Too few.
            MustEvict: Enough, once `on_evict` has saved some.
        """
        short = False
        for pool, count, ids in zip(self.pools, counts, held, strict=True):
            if count > pool.num_free:
                if count + ids.size > pool.available:
                    available = pool.available - pool.unreferenced(ids)
                    if count > available:
                        raise OutOfBlocks(count, available)
                short = True
        if short and self.on_evict is not None:
            raise MustEvict([max(c - p.num_free, 0) for c, p in zip(counts, self.pools, strict=True)], held)

    def hold(self, group: int, ids: Ids) -> None:
        """Takes a reference on cached blocks for a request, or the one that its verb has already."""
        if self.adopted is not None:
            pinned = self.adopted[group]
            mine = np.isin(ids, pinned)
            self.adopted[group] = pinned[~np.isin(pinned, ids)]
            ids = ids[~mine]
        if ids.size:
            self.pools[group].hold(ids)

    def start_writing(self, request_id: Hashable, request: Request, digest: bytes) -> Hashable:
        """Says that a request computes the block of this hash, unless another one does: then returns who."""
        writer = self.writers.setdefault(digest, request_id)
        if writer is not request_id:
            return writer
        request.writing = digest
        return None

    def stop_writing(self, request: Request) -> None:
        """Takes back what `start_writing` said."""
        if request.writing is not None:
            del self.writers[request.writing]
            request.writing = None

    def removed(self, group: int, hashes: list[bytes]) -> None:
        """Blocks were evicted."""
        if self.partial is not None:
            self.partial.remove(hashes)
        self.listeners.add("removed", group, hashes)

    def end_step(self, request: Request) -> None:
        """Gives back what was held for the step that is over: replaced blocks, host slots that were read."""
        for host, slots in zip(self.host, request.loading, strict=False):
            host.give_back(slots)
        request.loading = []
        for pool, ids in zip(self.pools, request.replaced or (), strict=False):
            pool.release(ids)
        request.replaced = None

    def release(self, request_id: Hashable, request: Request, returns: float | None = None) -> None:
        """Ends a running request and gives up all it holds; see `CacheManager.free` for `returns`."""
        del self.running[request_id]
        if request.replaced is not None or request.loading:
            self.end_step(request)
        if request.writing is not None:
            self.stop_writing(request)
        output_tokens = max(len(request.tokens) - request.prompt_tokens, 0)
        for group, pool in enumerate(self.pools):
            pool.ended(returns, output_tokens)
            if self.simple:
                pool.release(request.tables[0][: request.num_blocks], request.hit)
            else:
                pool.release(request.held(group))

    def passed(self, request: Request, group: int, end: int = 0) -> tuple[int, int, Ids]:
        """Blocks that no later query of a request reads: the range of logical blocks, and those held in it.

        The last token may be computed again for its logits, so what it reads is kept; `end` is what the request is
        about to have.
        """
        spec, size = self.groups[group], self.block_size
        last = spec.first_needed(min(request.committed, max(request.length - 1, end - 1, 0)), size)
        first = max(request.released[group], spec.sink_blocks(size))
        if request.new_states:  # still to be written
            last = min([last, *[block for at, block in request.new_states if at == group]])
        if last <= first:
            return first, first, EMPTY
        ids = request.tables[group][first:last]
        return first, last, ids[ids >= 0]

    def leave_window(self, request: Request, group: int, end: int = 0) -> None:
        """Releases what `passed` names."""
        first, last, ids = self.passed(request, group, end)
        if last > first:
            self.pools[group].release(ids)
            request.tables[group][first:last] = -1
            request.released[group] = last

    def stats(self) -> CacheStats:
        """Counters since the manager was made or reset."""
        return CacheStats(
            num_blocks=sum(p.num_blocks for p in self.pools),
            free_blocks=sum(p.num_free for p in self.pools),
            cached_blocks=sum(p.num_cached for p in self.pools),
            held_blocks=sum(p.num_held for p in self.pools),
            num_requests=len(self.running),
            total_requests=self.total_requests,
            queried_tokens=self.queried,
            hit_tokens=sum(self.hits.values()),
            hit_tokens_by_cause=dict(self.hits),
            evictions=sum(p.residency.evictions for p in self.pools),
            offloaded_blocks=self.offloaded,
            merged_blocks=self.merged,
            residency=tuple(np.sum([p.residency.totals()[0] for p in self.pools], axis=0).tolist()),
            residency_sum=sum(p.residency.totals()[1] for p in self.pools),
            preemptions=self.preemptions,
            host_blocks=sum(host.count - host.num_free for host in self.host),
        )

    def reset(self) -> None:
        """Forgets all cached blocks and counters."""
        busy = len(self.running) + len(self.preempted)
        if busy or self.saving or self.pinned:
            what = f"{busy} requests are running or preempted" if busy else "blocks are being saved by on_evict"
            raise RuntimeError(f"reset: {what}, needs none; free them first")
        for pool in self.pools:
            pool.reset()
        self._zero_counters()
        if self.partial is not None:
            self.partial.clear()
        self.listeners.add("cleared")

    def check(self) -> None:
        """Asserts every invariant."""
        assert {r.writing: i for i, r in self.running.items() if r.writing is not None} == self.writers, "a lost writer"
        for group, pool in enumerate(self.pools):
            held = [EMPTY, *[ids for at, ids in self.saving if at == group], *[ids[group] for ids in self.pinned]]
            for request in self.running.values():
                mine = [request.held(group), *((request.replaced or [])[group : group + 1])]
                assert np.unique(mine[0]).size == mine[0].size, "a request holds a block twice"
                assert request.num_blocks == -(-len(request.tokens) // self.block_size), "a table has another length"
                assert request.committed <= len(request.tokens), "more committed than there is"
                assert request.published * self.block_size <= request.committed, "findable before it was written"
                before = request.tables[group][: request.published].copy()
                before[[block for at, block in request.new_states if at == group and block < before.size]] = -1
                assert pool.table.contains(before[before >= 0]).all(), "a committed block is not findable"
                held += mine
            pool.check(np.concatenate(held))
            slots = [saved.slots[group] for saved in self.preempted.values() if saved.slots]
            slots += [request.loading[group] for request in self.running.values() if request.loading]
            self.host[group].check([slot for some in slots for slot in some])
