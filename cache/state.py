"""What all parts of the manager share: the pools, the requests, and who is computing what."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np

from .allocation import CacheStats
from .groups import FullAttention, Group, Tensors
from .hashing import BlockHasher
from .host_slots import HostSlots, Preempted
from .listeners import Listeners
from .policies import EvictionPolicy, make_policy
from .pool import EMPTY, BlockPool
from .request import Request

BLOCK_BYTES = 256
"""What the bookkeeping of a block may take; remembered hashes get what the rest leaves."""
BASE_BYTES = 1 << 20
"""What it may take whatever the number of blocks: ghosts and tables of a policy."""
QUEUE_BYTES = 16
"""Of that, what policies may come to need once they are in use."""


class ManagerState:
    """The state of a manager; its lock is the manager's business.

    Attributes:
        groups: Specs of the layer groups.
        pools: The block pool of each.
        simple: Whether there is one group, which needs all its blocks.
        running: Requests by id.
        preempted: What is kept of requests that wait for `resume`.
        host: The slots of host memory of each group.
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
        self.listeners = Listeners(self.block_size, partial_reuse)
        self.pools = [BlockPool(g.num_blocks or num_blocks, hasher, make_policy(policy)) for g in groups]
        for group, pool in enumerate(self.pools):
            pool.on_evict = partial(self.listeners.evicted, group, pool)
        blocks = sum(pool.num_blocks for pool in self.pools)
        hasher.tree.capacity = max(BASE_BYTES + (BLOCK_BYTES - QUEUE_BYTES) * blocks - self.nbytes, 0)
        self.running: dict[Hashable, Request] = {}
        self.preempted: dict[Hashable, Preempted] = {}
        self.host = [HostSlots(host_blocks) for _ in groups]
        self._writers: dict[bytes, Hashable] = {}
        self._zero_counters()

    def _zero_counters(self) -> None:
        self.total_requests = self.queried = self.merged = self.preemptions = 0
        self.hits = {"prefix": 0, "gap": 0, "partial": 0}

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping: fields, tables and policies of all pools, and remembered hashes."""
        return sum(pool.nbytes + pool.policy.nbytes for pool in self.pools) + self.hasher.tree.nbytes

    def start_writing(self, request_id: Hashable, request: Request, digest: bytes) -> Hashable:
        """Says that a request computes the block of this hash, unless another one does: then returns who."""
        writer = self._writers.setdefault(digest, request_id)
        if writer != request_id:
            return writer
        request.writing = digest
        return None

    def stop_writing(self, request: Request) -> None:
        """Takes back what `start_writing` said."""
        if request.writing is not None:
            del self._writers[request.writing]
            request.writing = None

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
        self.stop_writing(request)
        output_tokens = len(request.tokens) - request.prompt_tokens
        for group, pool in enumerate(self.pools):
            if returns is not None:
                pool.policy.returning(returns)
            pool.policy.finished(output_tokens)
            pool.release(request.tables[0][: request.num_blocks] if self.simple else request.held(group))

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
            evictions=sum(p.evictions for p in self.pools),
            merged_blocks=self.merged,
            residency=tuple(np.sum([p.residency()[0] for p in self.pools], axis=0).tolist()),
            residency_sum=sum(p.residency()[1] for p in self.pools),
            preemptions=self.preemptions,
            host_blocks=sum(host.count - host.num_free for host in self.host),
        )

    def reset(self) -> None:
        """Forgets all cached blocks and counters; the caller has made sure that nothing runs."""
        for pool in self.pools:
            pool.reset()
        self._zero_counters()
        self.listeners.cleared()

    def check(self) -> None:
        """Asserts every invariant."""
        for group, pool in enumerate(self.pools):
            held = [EMPTY]
            for request in self.running.values():
                mine = [request.held(group), *((request.replaced or [])[group : group + 1])]
                assert np.unique(mine[0]).size == mine[0].size, "a request holds a block twice"
                assert request.num_blocks == -(-len(request.tokens) // self.block_size), "a table has another length"
                assert request.committed <= len(request.tokens), "more committed than there is"
                assert request.published * self.block_size <= request.committed, "findable before it was written"
                before = request.tables[group][: request.published]
                assert pool.table.contains(before[before >= 0]).all(), "a committed block is not findable"
                held += mine
            pool.check(np.concatenate(held))
            slots = [saved.slots[group] for saved in self.preempted.values() if saved.slots]
            slots += [request.loading[group] for request in self.running.values() if request.loading]
            self.host[group].check([slot for some in slots for slot in some])
