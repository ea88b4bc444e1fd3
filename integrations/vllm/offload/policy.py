"""An eviction policy of `pc.cache` for vLLM's tier of chunks in host memory.

The policies of vLLM are notified of single chunks that are stored, read and released. Policies of `pc.cache` work with
requests. A request finds chunks, fills others, and releases all of them when it ends, in the order of its sequence.
These policies ignore transfers that hold a chunk briefly. A chunk that they choose during a transfer is put back.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from ....cache.policies import POLICIES, make_policy
from ...hints import read_or_warn
from ...policy_pool import PolicyPool
from ..api import CachePolicy, LRUCachePolicy, check_version, logger

PREFIX = "pc_"
LEAST_KEY = 12
"""Number of bytes that policies read of a key: 8 of its hash, and vLLM's number of the group of layers."""


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of the tier: its number, its key, vLLM's record of its transfers, and its users."""

    block_id: int
    key: bytes
    status: Any
    holders: int = 0
    """Number of running requests that found or stored the chunk. The policy may choose a chunk without holders."""
    place: int = 0
    """Its place in its sequence, from 1. 0: unknown."""


class OffloadPolicy(CachePolicy):
    """An `eviction_policy` for vLLM's CPU tier. `policy_class` makes the class for a policy's name.

    Chunks of running requests are evicted only if the chunks of ended requests are not enough. The chunks of the oldest
    running request then come first.
    """

    policy_name: ClassVar[str] = "default"

    def __init__(self, cache_capacity: int) -> None:
        check_version("offload")
        super().__init__(cache_capacity)
        policy = make_policy(self.policy_name)
        self._chunks: dict[bytes, Chunk] = {}
        self._by_id: dict[int, Chunk] = {}
        self._running: dict[str, dict[Chunk, None]] = {}  # the chunks of each request, in the order of their use
        self._num_held = self._num_evictable = 0
        self._tokens_per_chunk = 0
        self.state = PolicyPool(max(1, cache_capacity), policy, lambda: self._num_held)
        logger.info_once(
            "%s%s (%s) evicts from the tier in host memory", PREFIX, self.policy_name, type(policy).__name__
        )

    def get(self, key: bytes) -> Any:
        """Return vLLM's record of a chunk, or None if it is absent."""
        found = self._chunks.get(key)
        return None if found is None else found.status

    def insert(self, key: bytes, chunk: Any, req_context: Any) -> None:
        """Record that a request stores a chunk."""
        end = req_context.get_offload_key_position(key) or 0
        self._tokens_per_chunk = math.gcd(self._tokens_per_chunk, end)
        new = Chunk(chunk.chunk_id, key, chunk, place=end // max(1, self._tokens_per_chunk))
        self._chunks[key] = self._by_id[new.block_id] = new
        self._num_evictable += chunk.ref_cnt == 0
        self.state.took([new.block_id])
        self.state.completed([new.block_id], [new.place], [key.rjust(LEAST_KEY, b"\0")])
        self._hold(new, req_context)

    def remove(self, key: bytes) -> None:
        """Record that a store failed."""
        gone = self._forget(key)
        self._num_evictable -= gone.status.ref_cnt == 0
        if not gone.holders:
            self.state.removed([gone.block_id])
        self.state.dropped([gone.block_id], gone.holders)
        self.state.lost([gone.block_id])

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Record that chunks are used, but not by a request."""
        used = [chunk for key in keys if (chunk := self._chunks.get(key)) is not None]
        if used:
            self.state.accessed([chunk.block_id for chunk in used])
            self.state.dropped([chunk.block_id for chunk in used if chunk.holders])
            self._release([chunk for chunk in used if not chunk.holders])

    def on_request_access(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Record that a request uses chunks from now on. It may store absent chunks later."""
        found = [chunk for key in keys if (chunk := self._chunks.get(key)) is not None]
        held = self._running.get(req_context.req_id, ())
        found = [chunk for chunk in found if chunk not in held]
        if found:
            for chunk in found:
                self._hold(chunk, req_context)
            self.state.accessed([chunk.block_id for chunk in found])

    def on_request_finished(
        self, key_groups: Sequence[Sequence[bytes]], insertion_only_keys: Any, reused_keys: Any, req_context: Any
    ) -> None:
        """Record that a request has ended, so chunks that only it held may be chosen."""
        held = self._running.pop(req_context.req_id, {})
        hint, _ = read_or_warn(req_context, req_context.req_id, logger)
        order = {key: n for n, key in enumerate(itertools.chain(*key_groups))}
        # The chunks of all groups of layers, by place. Places are 0 if vLLM has recorded no positions.
        chunks = sorted(held, key=lambda chunk: (chunk.place, order.get(chunk.key, 0)))
        for each in () if hint is None else hint.ranges:
            ids = [chunk.block_id for chunk in chunks if self._is_in(chunk, each.start, each.end)]
            if ids:
                self.state.hinted(ids, each.priority, each.ttl)
        free = self._let_go(held, chunks)
        self.state.finished(0, None if hint is None else hint.returns)
        self._release(free)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Return `n` chunks that the policy chose, none of them in `protected` or in a transfer.

        None if there are fewer.

        Raises:
            RuntimeError: The policy made an invalid choice.
        """
        kept = (self._chunks.get(key) for key in protected)
        if n > self._num_evictable - sum(chunk is not None and chunk.status.ref_cnt == 0 for chunk in kept):
            return None
        chosen: list[Chunk] = []
        aside: list[Chunk] = []
        while len(chosen) < n:
            left = n - len(chosen)
            while not (free := len(self._chunks) - self._num_held - len(chosen) - len(aside)):
                self._release_running(left, protected)  # other requests may still hold what it releases
            ids = self.state.victims(min(left, free)).tolist()
            for chunk in map(self._by_id.__getitem__, ids):
                (aside if chunk.status.ref_cnt or chunk.key in protected else chosen).append(chunk)
        if aside:
            back = [chunk.block_id for chunk in aside]
            self.state.accessed(back, back)
            self._release(aside)
        for chunk in chosen:
            self._forget(chunk.key)
        self._num_evictable -= n
        return [(chunk.key, chunk.status) for chunk in chosen]

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunks.clear()
        self._by_id.clear()
        self._running.clear()
        self._num_held = self._num_evictable = 0
        self.state.clear()

    def mark_evictable(self, key: bytes) -> None:
        """Record that the last transfer of a chunk has ended."""
        self._num_evictable += 1

    def mark_non_evictable(self, key: bytes) -> None:
        """Record that a transfer of a chunk starts."""
        self._num_evictable -= 1

    def check(self) -> None:
        """Assert that counts and the policy's own state are consistent."""
        chunks = list(self._chunks.values())
        assert self._by_id == {chunk.block_id: chunk for chunk in chunks}
        assert self._num_evictable == sum(chunk.status.ref_cnt == 0 for chunk in chunks)
        assert self._num_held == sum(chunk.holders > 0 for chunk in chunks)
        self.state.flush()
        self.state.policy.check()

    def _hold(self, chunk: Chunk, req_context: Any) -> None:
        """Record that a request uses a chunk from now on."""
        self._running.setdefault(req_context.req_id, {})[chunk] = None
        self._num_held += chunk.holders == 0
        chunk.holders += 1

    def _let_go(self, held: dict[Chunk, None], chunks: list[Chunk]) -> list[Chunk]:
        """Remove chunks from a request; return those without holders, for the caller to release."""
        free = []
        for chunk in chunks:
            del held[chunk]
            if self._chunks.get(chunk.key) is chunk:
                chunk.holders -= 1
                if chunk.holders:
                    self.state.dropped([chunk.block_id])
                else:
                    free.append(chunk)
        self._num_held -= len(free)
        return free

    def _release(self, chunks: list[Chunk]) -> None:
        """Notify the policy that it may choose these chunks as victims."""
        self.state.released([chunk.block_id for chunk in chunks])

    def _release_running(self, count: int, protected: set[bytes]) -> None:
        """Release chunks of running requests, ends of sequences first, until `count` can be evicted."""
        for name, held in list(self._running.items()):
            idle = [chunk for chunk in held if chunk.status.ref_cnt == 0 and chunk.key not in protected]
            free = self._let_go(held, sorted(idle, key=attrgetter("place"))[-count:])
            self._release(free)
            count -= len(free)
            if not held:
                del self._running[name]
            if count <= 0:
                return

    def _forget(self, key: bytes) -> Chunk:
        """Remove a chunk from this policy's records, and return it."""
        gone = self._chunks.pop(key)
        del self._by_id[gone.block_id]
        self._num_held -= gone.holders > 0
        return gone

    def _is_in(self, chunk: Chunk, start: int, end: int | None) -> bool:
        """Return whether a chunk is in the tier and has some of the tokens `[start, end)`."""
        size = self._tokens_per_chunk
        last = chunk.place * size
        return last > start and (end is None or last - size < end) and self._by_id.get(chunk.block_id) is chunk


@functools.cache
def policy_class(name: str) -> type[Any]:
    """Return the class for a name of `eviction_policy`: `pc_` and the name of a policy.

    `pc_lru` is vLLM's own lru, which evicts in the same order as the lru of `pc.cache`. It begins with the chunks whose
    last request ended longest ago, and evicts the end of a sequence before its beginning.

    Raises:
        AttributeError: There is no such policy. vLLM looks for the name in this module.
    """
    policy = name.removeprefix(PREFIX)
    if policy == name or policy not in POLICIES:
        needs = ", ".join(sorted(PREFIX + each for each in POLICIES))
        raise AttributeError(f"eviction_policy: got {name!r}, needs one of {needs}")
    if policy == "lru":
        return LRUCachePolicy  # type: ignore[no-any-return]
    return type(name, (OffloadPolicy,), {"policy_name": policy})
