"""The manager: requests on one side, block pools on the other."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .allocation import Allocation, CacheStats, Span
from .groups import FullAttention, Group, Tensors
from .hashing import BlockHasher, Chain, TokenIds, Words, encode_tokens
from .policies import EvictionPolicy, make_policy
from .pool import EMPTY, BlockPool, OutOfBlocks
from .table import Ids

MEMO_BYTES = 96
"""Memory a block for remembered hashes: chunks of 64 blocks of 16 tokens come to about 110 bytes a block."""

Mask = npt.NDArray[np.bool_]

REUSES = ("prefix", "gap")


class _Request:
    """A running request.

    Attributes:
        tokens: All its token ids.
        committed: Positions before it have been written.
        tables: Per group, block numbers by logical block, with room to grow; -1 is a hole.
        num_blocks: Logical blocks in use.
        chain: Running hash behind `chain.hashed` blocks, None when it has to be built again.
        released: Per group, logical blocks before it, sinks apart, were given back.
        retired: Per group, blocks that a merge replaced, held until the next commit or free.
        shared_tail: Whether the last block may be someone else's too, so that writing it needs a look.
    """

    __slots__ = ("chain", "committed", "keys", "num_blocks", "released", "retired", "shared_tail", "tables", "tokens")

    def __init__(self, tokens: array[int], tables: list[Ids], num_blocks: int, chain: Chain | None, keys: Any) -> None:
        self.tokens = tokens
        self.tables = tables
        self.num_blocks = num_blocks
        self.chain = chain
        self.keys = keys
        self.committed = 0
        self.released = [0] * len(tables)
        self.retired: list[Ids] | None = None
        self.shared_tail = False


class CacheManager:
    """Gives requests block tables, finds what is cached, and decides what is evicted.

    All methods may be called from several threads; each is atomic. A method that raises has changed nothing.

    Args:
        num_blocks: Blocks of each group's cache tensors.
        block_size: Tokens a block.
        policy: Name of an eviction policy (`pc.cache.policies.POLICIES`), its class, or (one group) an instance.
        hash_algorithm: "sha256", "blake2b" or "xxh3_128"; see `pc.cache.hashing` for what each promises.
        groups: Specs of the layer groups; None: one group of full attention.
        seed: Makes hashes differ from those of managers with another seed; None: the same everywhere.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: str | EvictionPolicy | type[EvictionPolicy] = "default",
        hash_algorithm: str = "sha256",
        groups: Sequence[Group] | None = None,
        seed: int | None = None,
    ) -> None:
        _check_count("num_blocks", num_blocks)
        _check_count("block_size", block_size)
        specs = (FullAttention(),) if groups is None else tuple(groups)
        if not specs or not all(isinstance(g, Group) for g in specs):
            raise TypeError(f"groups: got {groups!r}, needs a sequence of pc.cache group specs")
        if len(specs) > 1 and isinstance(policy, EvictionPolicy):
            raise ValueError("policy: got one instance for several groups, needs a name or a class")
        self.block_size = block_size
        self.hash_algorithm = hash_algorithm
        self.groups = specs
        self._hasher = BlockHasher(hash_algorithm, block_size, seed, MEMO_BYTES * num_blocks)
        self._pools = [BlockPool(g.num_blocks or num_blocks, self._hasher, make_policy(policy)) for g in specs]
        self._simple = len(specs) == 1 and isinstance(specs[0], FullAttention | Tensors)
        self._requests: dict[Hashable, _Request] = {}
        self._lock = threading.RLock()
        self._zero_counters()

    def _zero_counters(self) -> None:
        self._total_requests = 0
        self._queried = 0
        self._hits = {"prefix": 0, "gap": 0, "partial": 0}
        self._merged = 0

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The block pool of each group, to look at."""
        return tuple(self._pools)

    def allocate(
        self,
        request_id: Hashable,
        token_ids: TokenIds,
        extra_keys: Any = None,
        salt: Any = None,
        reuse: str = "prefix",
        priority: int = 0,
        ttl: float | None = None,
    ) -> Allocation:
        """Starts a request: finds its cached blocks and takes blocks for the rest.

        Args:
            request_id: Any hashable that no running request has.
            token_ids: The prompt: list, array or numpy array of integers.
            extra_keys: What decides the KV besides tokens: one key or several, plain (LoRA name) or `KeyAt`.
            salt: Requests with different salts never share a block.
            reuse: "prefix": the leading run of cached blocks. "gap": cached blocks behind a missing one too.
            priority: Above 0 asks policies that heed it to keep the blocks longer.
            ttl: Seconds for which the priority holds; None: until evicted.

        Returns:
            Block ids of the whole prompt. At least the last token is to be computed; its slot is -1 when its KV is
            there.

        Raises:
            OutOfBlocks: Too few blocks.
            ValueError: A request id in use, a token id out of range, an unknown `reuse`.
            TypeError: token_ids or keys of the wrong type.
        """
        if reuse not in REUSES:
            raise ValueError(f"reuse: got {reuse!r}, needs one of {', '.join(REUSES)}")
        tokens = encode_tokens(token_ids)
        keys = (extra_keys, salt)
        with self._lock:
            if request_id in self._requests:
                raise ValueError(f"request_id: got {request_id!r}, which is running, needs a new one")
            chain = self._hasher.chain(*keys)
            digests = chain.extend(tokens, len(tokens) // self.block_size)
            return self._allocate(request_id, tokens, chain, keys, digests, reuse, priority, ttl)

    def _allocate(
        self,
        request_id: Hashable,
        tokens: array[int],
        chain: Chain,
        keys: Any,
        digests: Words,
        reuse: str,
        priority: int,
        ttl: float | None,
    ) -> Allocation:
        size, num_tokens = self.block_size, len(tokens)
        num_full = digests.shape[1]
        num_blocks = -(-num_tokens // size)
        searches = [pool.table.search(digests) for pool in self._pools]
        resident = [pool.complete.take(listed) for pool, (listed, _) in zip(self._pools, searches, strict=True)]
        hit = self._hit(resident, num_tokens)
        reused = self._behind_gap(resident, hit) if reuse == "gap" else EMPTY
        fresh = np.arange(hit, num_blocks, dtype=np.int32)
        if reused.size:
            fresh = np.setdiff1d(fresh, reused, assume_unique=True)
        tables = [
            self._cached_part(group, hit, reused, num_blocks, num_tokens, listed)
            for group, (listed, _) in zip(self.groups, searches, strict=True)
        ]
        holds = [tables[0][:hit]] if self._simple and not reused.size else [table[table >= 0] for table in tables]
        for pool, ids in zip(self._pools, holds, strict=True):
            available = pool.available - pool.unreferenced(ids)
            if fresh.size > available:
                raise OutOfBlocks(fresh.size, available)

        wait_for = None
        first = searches[0][0]
        if hit < num_full and not resident[0][hit] and first[hit] >= 0:
            wait_for = self._writer_of(int(first[hit]))
        where = fresh if reused.size else slice(hit, num_blocks)
        full = fresh[: fresh.searchsorted(num_full)] if reused.size else slice(hit, num_full)
        for pool, ids, table, (listed, ends) in zip(self._pools, holds, tables, searches, strict=True):
            if ids.size:
                pool.hold(ids)
            if fresh.size:
                table[where] = pool.take(fresh + 1, digests[:, full], listed[full], ends[full])
            if priority or ttl is not None:
                pool.policy.hinted(table[table >= 0], priority, ttl)

        request = _Request(tokens, tables, num_blocks, chain, keys)
        request.committed = min(hit * size, num_tokens)
        self._requests[request_id] = request
        return self._describe(request, hit, reused, wait_for)

    def _hit(self, resident: list[Mask], num_tokens: int) -> int:
        """Blocks of the longest prefix behind which every group can go on."""
        if self._simple:
            return _leading(resident[0])
        servable = np.ones(resident[0].size + 1, np.bool_)
        for group, mask in zip(self.groups, resident, strict=True):
            servable &= group.servable(mask, num_tokens, self.block_size)
        return int(np.flatnonzero(servable)[-1])

    def _behind_gap(self, resident: list[Mask], hit: int) -> Ids:
        """Blocks behind the hit that every group has; none with recurrent groups, which cannot jump a gap."""
        if any(group.aligned for group in self.groups):
            return EMPTY
        everywhere = np.logical_and.reduce([mask[hit:] for mask in resident])
        return (np.flatnonzero(everywhere) + hit).astype(np.int32)

    def _cached_part(self, spec: Group, hit: int, reused: Ids, num_blocks: int, num_tokens: int, listed: Ids) -> Ids:
        """The block table of a group with the cached blocks it needs, everything else -1."""
        size = self.block_size
        table = np.full(num_blocks, -1, np.int32)
        table[:hit] = listed[:hit]
        position = min(hit * size, max(num_tokens - 1, 0))
        table[spec.sink_blocks(size) : min(spec.first_needed(position, size), hit)] = -1
        if reused.size:
            table[reused] = listed[reused]
        return table

    def _writer_of(self, block: int) -> Hashable:
        """The request that is about to write a pending block of the first group."""
        for request_id, request in self._requests.items():
            first = request.committed // self.block_size
            if (request.tables[0][first : request.num_blocks] == block).any():
                return request_id
        return None

    def _describe(self, request: _Request, hit: int, reused: Ids, wait_for: Hashable) -> Allocation:
        """The Allocation of a new request, and its share of the counters."""
        size, num_tokens = self.block_size, len(request.tokens)
        cached = _spans(hit, reused, size)
        written = 0
        if cached and cached[-1][1] == num_tokens:
            written = 1
            cached[-1] = (cached[-1][0], num_tokens - 1)
            if cached[-1][0] == cached[-1][1]:
                cached.pop()
        compute = _complement(cached, num_tokens)
        self._total_requests += 1
        self._queried += num_tokens
        prefix = min(hit * size, max(num_tokens - 1, 0))
        tables = tuple(table.copy() for table in request.tables)
        single = len(tables) == 1
        allocation = Allocation(
            tables=tables,
            first_block=0,
            block_size=size,
            cached_spans=cached,
            compute_spans=compute,
            written=written,
            block_ids=tables[0] if single else tables,
            copies=[] if single else [[] for _ in tables],
            wait_for=wait_for,
        )
        self._hits["prefix"] += prefix
        self._hits["gap"] += allocation.num_cached_tokens - prefix
        return allocation

    def append(self, request_id: Hashable, token_ids: TokenIds) -> Allocation:
        """Adds tokens to a request and takes the blocks they need.

        Args:
            request_id: A running request.
            token_ids: The new tokens.

        Returns:
            The allocation of the new tokens: block_ids has the blocks newly taken, compute_spans all new tokens.
            `copies` is not empty when the last block was shared and had to be duplicated.

        Raises:
            OutOfBlocks: Too few blocks.
            KeyError: An unknown request.
            ValueError: A token id out of range.
            TypeError: token_ids of the wrong type.
        """
        new = encode_tokens(token_ids)
        with self._lock:
            request = self._running(request_id)
            size, start = self.block_size, len(request.tokens)
            end = start + len(new)
            num_blocks = -(-end // size)
            first = start // size
            duplicate = request.shared_tail and len(new) > 0 and start % size != 0
            shared = [duplicate and self._must_copy(pool, int(t[first])) for pool, t in self._each(request)]
            grow = num_blocks - request.num_blocks
            for pool, copy in zip(self._pools, shared, strict=True):
                if grow + copy > pool.available:
                    raise OutOfBlocks(grow + copy, pool.available)

            copies: list[list[tuple[int, int]]] = []
            for group, pool in enumerate(self._pools):
                table = _room_for(request.tables[group], num_blocks)
                copies.append([])
                if shared[group]:
                    old = table[first : first + 1].copy()
                    table[first] = pool.take(np.array([first + 1], np.int32))[0]
                    copies[-1].append((int(old[0]), int(table[first])))
                    if pool.ref_count[old[0]] > 1:
                        pool.release(old)
                    else:  # nobody else keeps it from being handed out before the copy is made
                        self._retire(request, group, old)
                elif duplicate:
                    pool.disclaim(table[first : first + 1])
                if grow:
                    lengths = np.arange(request.num_blocks + 1, num_blocks + 1, dtype=np.int32)
                    table[request.num_blocks : num_blocks] = pool.take(lengths)
                request.tables[group] = table
            if duplicate:
                request.shared_tail = False
            taken = [t[request.num_blocks : num_blocks].copy() for t in request.tables]
            request.tokens.extend(new)
            request.num_blocks = num_blocks
            return Allocation(
                tables=tuple(t[first:num_blocks].copy() for t in request.tables),
                first_block=first,
                block_size=size,
                cached_spans=[],
                compute_spans=[(start, end)] if end > start else [],
                written=0,
                block_ids=taken[0] if len(taken) == 1 else tuple(taken),
                copies=copies[0] if len(copies) == 1 else copies,
            )

    @staticmethod
    def _must_copy(pool: BlockPool, block: int) -> bool:
        """Whether writing a block would be seen by another holder or by whoever finds it."""
        return bool(pool.complete[block]) or int(pool.ref_count[block]) > 1

    def _each(self, request: _Request) -> list[tuple[BlockPool, Ids]]:
        return list(zip(self._pools, request.tables, strict=True))

    def commit(self, request_id: Hashable, num_tokens: int) -> Any:
        """Says that every position before `num_tokens` has been written: complete blocks become findable.

        Args:
            request_id: A running request.
            num_tokens: Absolute position; what was committed before stays so.

        Returns:
            (old block, new block) for each block that an equal one, completed by another request, replaced in this
            request's table; with several groups one list per group. Old blocks are not handed out again before this
            request's next commit or free.

        Raises:
            KeyError: An unknown request.
            ValueError: More tokens than the request has.
        """
        with self._lock:
            request = self._running(request_id)
            if not 0 <= num_tokens <= len(request.tokens):
                raise ValueError(f"num_tokens: got {num_tokens}, needs 0 to {len(request.tokens)}, its tokens")
            if request.retired is not None:
                self._drop_retired(request)
            first, last = request.committed // self.block_size, num_tokens // self.block_size
            request.committed = max(request.committed, num_tokens)
            replaced: list[list[tuple[int, int]]] = [[] for _ in self._pools]
            if last > first:
                digests = self._digests_up_to(request, last)
                for group in range(len(self._pools)):
                    replaced[group] = self._publish(request, group, first, last, digests)
                self._leave_window(request)
            return replaced[0] if len(replaced) == 1 else replaced

    def _digests_up_to(self, request: _Request, last: int) -> Words:
        """Hashes of blocks `last - n .. last - 1`, those not hashed before; all of them after a deep rollback."""
        if request.chain is None:
            request.chain = self._hasher.chain(*request.keys)
        return request.chain.extend(request.tokens, last)

    def _publish(self, request: _Request, group: int, first: int, last: int, digests: Words) -> list[tuple[int, int]]:
        """Makes blocks [first, last) findable and swaps in the twins of those that already were."""
        pool, table = self._pools[group], request.tables[group]
        if digests.size:
            hashed = table[last - digests.shape[1] : last]
            present = hashed >= 0
            pool.words[:, hashed[present]] = digests[:, present]
        merged = pool.publish(table[first:last])
        if merged:
            old = np.array([pair[0] for pair in merged], np.int32)
            where = first + np.flatnonzero(np.isin(table[first:last], old))
            table[where] = [pair[1] for pair in merged]
            self._retire(request, group, old)
            self._merged += len(merged)
        return merged

    def _retire(self, request: _Request, group: int, ids: Ids) -> None:
        if request.retired is None:
            request.retired = [EMPTY for _ in self._pools]
        request.retired[group] = np.concatenate((request.retired[group], ids))

    def _drop_retired(self, request: _Request) -> None:
        for pool, ids in zip(self._pools, request.retired or (), strict=False):
            pool.release(ids)
        request.retired = None

    def _leave_window(self, request: _Request) -> None:
        """Releases the blocks that no later query of the request reads."""
        for group, spec in enumerate(self.groups):
            last = spec.first_needed(request.committed, self.block_size)
            first = max(request.released[group], spec.sink_blocks(self.block_size))
            if last > first:
                table = request.tables[group]
                ids = table[first:last]
                self._pools[group].release(ids[ids >= 0])
                table[first:last] = -1
                request.released[group] = last

    def rollback(self, request_id: Hashable, num_tokens: int) -> None:
        """Takes back the last tokens of a request (rejected speculation) and the blocks they alone needed.

        Args:
            request_id: A running request.
            num_tokens: How many.

        Raises:
            KeyError: An unknown request.
            ValueError: More tokens than the request has, or blocks of a sliding window are gone that would be read
                again.
        """
        with self._lock:
            request = self._running(request_id)
            length = len(request.tokens) - num_tokens
            if num_tokens < 0 or length < 0:
                raise ValueError(f"num_tokens: got {num_tokens}, needs 0 to {len(request.tokens)}, its tokens")
            size = self.block_size
            committed, num_blocks = min(request.committed, length), -(-length // size)
            for spec, table in zip(self.groups, request.tables, strict=True):
                first = max(spec.first_needed(committed, size), spec.sink_blocks(size))
                if (table[first:num_blocks] < 0).any():
                    raise ValueError(f"num_tokens: got {num_tokens}, needs less: blocks left the window for good")
            for pool, table in self._each(request):
                pool.release(table[num_blocks : request.num_blocks].copy())
            del request.tokens[length:]
            request.committed, request.num_blocks = committed, num_blocks
            request.shared_tail |= length % size != 0
            if request.chain is not None and request.chain.hashed > length // size:
                request.chain = None

    def fork(self, request_id: Hashable, new_request_id: Hashable) -> None:
        """Starts a request that shares everything with a running one (parallel sampling, beam search).

        Whoever of the two first appends to the block they share in part gets a copy of it, listed in
        `Allocation.copies`.

        Raises:
            KeyError: An unknown request.
            ValueError: new_request_id is running.
        """
        with self._lock:
            parent = self._running(request_id)
            if new_request_id in self._requests:
                raise ValueError(f"new_request_id: got {new_request_id!r}, which is running, needs a new one")
            for pool, table in self._each(parent):
                ids = table[: parent.num_blocks]
                pool.share(ids[ids >= 0])
            chain = parent.chain.copy() if parent.chain is not None else None
            child = _Request(
                array("I", parent.tokens), [t.copy() for t in parent.tables], parent.num_blocks, chain, parent.keys
            )
            child.committed = parent.committed
            child.released = list(parent.released)
            child.shared_tail = parent.shared_tail = True
            self._requests[new_request_id] = child

    def free(self, request_id: Hashable) -> None:
        """Ends a request: its complete, committed blocks stay findable until evicted, the others are free.

        Raises:
            KeyError: An unknown request.
        """
        with self._lock:
            request = self._running(request_id)
            del self._requests[request_id]
            if request.retired is not None:
                self._drop_retired(request)
            for pool, table in self._each(request):
                ids = table[: request.num_blocks]
                pool.release(ids[ids >= 0])

    def block_table(self, request_id: Hashable, group: int = 0) -> Ids:
        """Block numbers of a running request in the order of its sequence, [n] int32, -1 for a hole; a copy.

        Raises:
            KeyError: An unknown request.
            IndexError: An unknown group.
        """
        with self._lock:
            request = self._running(request_id)
            if not 0 <= group < len(self._pools):
                raise IndexError(f"group: got {group}, needs 0 to {len(self._pools) - 1}")
            table: Ids = request.tables[group][: request.num_blocks].copy()
            return table

    def stats(self) -> CacheStats:
        """Counters since the manager was made or reset."""
        with self._lock:
            return CacheStats(
                num_blocks=sum(p.num_blocks for p in self._pools),
                free_blocks=sum(p.num_free for p in self._pools),
                cached_blocks=sum(p.num_cached for p in self._pools),
                held_blocks=sum(p.num_held for p in self._pools),
                num_requests=len(self._requests),
                total_requests=self._total_requests,
                queried_tokens=self._queried,
                hit_tokens=sum(self._hits.values()),
                hit_tokens_by_cause=dict(self._hits),
                evictions=sum(p.evictions for p in self._pools),
                merged_blocks=self._merged,
            )

    def reset(self) -> None:
        """Forgets all cached blocks and counters.

        Raises:
            RuntimeError: Requests are running.
        """
        with self._lock:
            if self._requests:
                raise RuntimeError(f"reset: {len(self._requests)} requests are running, needs none; free them first")
            for pool in self._pools:
                pool.reset()
            self._zero_counters()

    def check(self) -> None:
        """Asserts that all is consistent: free + cached + held = all, no block in two places, counts right."""
        with self._lock:
            for group, pool in enumerate(self._pools):
                held = [EMPTY]
                for request in self._requests.values():
                    table = request.tables[group][: request.num_blocks]
                    mine = [table[table >= 0], *(request.retired or [EMPTY] * len(self._pools))[group : group + 1]]
                    assert np.unique(mine[0]).size == mine[0].size, "a request holds a block twice"
                    assert request.num_blocks == -(-len(request.tokens) // self.block_size), (
                        "a table has another length"
                    )
                    assert request.committed <= len(request.tokens), "more committed than there is"
                    held += mine
                pool.check(np.concatenate(held))

    def _running(self, request_id: Hashable) -> _Request:
        try:
            return self._requests[request_id]
        except KeyError:
            raise KeyError(f"request_id: got {request_id!r}, needs a running request") from None


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, needs an int")
    if value < 1:
        raise ValueError(f"{name}: got {value}, needs at least 1")


def _leading(mask: Mask) -> int:
    """How many entries are true before the first that is not."""
    first = int(mask.argmin()) if mask.size else 0
    return mask.size if mask.size and mask[first] else first


def _room_for(table: Ids, num_blocks: int) -> Ids:
    """The table itself, or a copy with room for at least `num_blocks`, doubled so that growth stays cheap."""
    if num_blocks <= table.size:
        return table
    larger = np.full(max(num_blocks, 2 * table.size, 8), -1, np.int32)
    larger[: table.size] = table
    return larger


def _spans(hit: int, reused: Ids, block_size: int) -> list[Span]:
    """Token ranges of the first `hit` blocks and of the blocks `reused`, neighbours joined."""
    if not reused.size:
        return [(0, hit * block_size)] if hit else []
    blocks = np.concatenate((np.arange(hit), reused))
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    return [(int(run[0]) * block_size, (int(run[-1]) + 1) * block_size) for run in np.split(blocks, cuts)]


def _complement(spans: list[Span], num_tokens: int) -> list[Span]:
    """What `spans` leave of [0, num_tokens)."""
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
