"""The manager: requests on one side, block pools on the other."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .allocation import Allocation, CacheStats
from .groups import FullAttention, Group, Tensors
from .hashing import BlockHasher, TokenIds, Words, encode_tokens
from .matching import Match, cached_part, cached_spans, complement, match_groups
from .partial import PartialIndex
from .policies import EvictionPolicy, make_policy
from .pool import EMPTY, BlockPool, OutOfBlocks
from .preemption import HostSlots, Preempted
from .request import Request
from .table import Ids

NO_WORDS: Words = np.empty((0, 0), np.uint64)

MEMO_BYTES = 80
"""Memory a block for remembered hashes: with it, all bookkeeping of a block stays under 256 bytes."""

REUSES = ("prefix", "gap")


class Listener(Protocol):
    """Hears of every block that becomes findable or ceases to be; called under the manager's lock."""

    def stored(
        self, group: int, hashes: list[bytes], parent: bytes | None, token_ids: list[int], extra_keys: Any
    ) -> None:
        """A run of blocks of one sequence became findable; `parent` is the hash of the block before, if any."""

    def removed(self, group: int, hashes: list[bytes]) -> None:
        """Blocks are about to lose their content."""

    def cleared(self) -> None:
        """The manager was reset."""


class CacheManager:
    """Gives requests block tables, finds what is cached, and decides what is evicted.

    All methods may be called from several threads; each is atomic. A method that raises has changed nothing.

    Attributes:
        on_evict: Called with (group, blocks, hashes) when blocks are about to lose their content, for a lower tier: it
            has to read them before it returns.
        listeners: Hear of stores and removals; see `Listener`.

    Args:
        num_blocks: Blocks of each group's cache tensors.
        block_size: Tokens a block.
        policy: Name of an eviction policy (`pc.cache.policies.POLICIES`), its class, or (one group) an instance.
        hash_algorithm: "sha256", "blake2b" or "xxh3_128"; see `pc.cache.hashing` for what each promises.
        groups: Specs of the layer groups; None: one group of full attention.
        seed: Makes hashes differ from those of managers with another seed; None: the same everywhere.
        partial_reuse: Whether a prompt that agrees with a cached block in its first tokens only reuses those, through
            a copy (`Allocation.copies`). With one group of full attention; costs about 400 bytes a block.
        host_blocks: Block-sized slots of host memory that `preempt(mode="swap")` may use.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: str | EvictionPolicy | type[EvictionPolicy] = "default",
        hash_algorithm: str = "sha256",
        groups: Sequence[Group] | None = None,
        seed: int | None = None,
        host_blocks: int = 0,
        partial_reuse: bool = False,
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
        self.seed = seed
        self.groups = specs
        self._hasher = BlockHasher(hash_algorithm, block_size, seed, MEMO_BYTES * num_blocks)
        self._pools = [BlockPool(g.num_blocks or num_blocks, self._hasher, make_policy(policy)) for g in specs]
        self._simple = len(specs) == 1 and isinstance(specs[0], FullAttention | Tensors)
        for group, pool in enumerate(self._pools):
            pool.on_evict = partial(self._evicted, group)
        self.listeners: list[Listener] = []
        self.on_evict: Callable[[int, Ids, list[bytes]], None] | None = None
        if partial_reuse and not self._simple:
            raise ValueError("partial_reuse: got several groups or a window, needs one group of full attention")
        self._partial = PartialIndex(block_size) if partial_reuse else None
        self._requests: dict[Hashable, Request] = {}
        self._writers: dict[bytes, Hashable] = {}
        self._preempted: dict[Hashable, Preempted] = {}
        self._host = HostSlots(host_blocks)
        self._lock = threading.RLock()
        self._zero_counters()

    def _zero_counters(self) -> None:
        self._total_requests = 0
        self._queried = 0
        self._hits = {"prefix": 0, "gap": 0, "partial": 0}
        self._merged = 0
        self._preemptions = 0

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The block pool of each group, to look at."""
        return tuple(self._pools)

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping: fields, tables and policies of all pools, and remembered hashes."""
        return sum(pool.nbytes + pool.policy.nbytes for pool in self._pools) + self._hasher.memo.nbytes

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
            self._check_new("request_id", request_id)
            chain = self._hasher.chain(*keys)
            digests = chain.extend(tokens, len(tokens) // self.block_size)
            request = Request(tokens, [], 0, chain, keys)
            request.priority = priority
            return self._allocate(request_id, request, digests, reuse, priority, ttl)

    def _allocate(
        self,
        request_id: Hashable,
        request: Request,
        digests: Words,
        reuse: str,
        priority: int,
        ttl: float | None,
        saved: Preempted | None = None,
    ) -> Allocation:
        size, num_tokens, chain = self.block_size, len(request.tokens), request.chain
        assert chain is not None
        num_blocks = -(-num_tokens // size)
        if self._simple and reuse == "prefix":
            ids = self._pools[0].leading(digests, chain.path)
            match = Match(ids.size, EMPTY, [ids])
        else:
            match = match_groups(self.groups, self._pools, digests, num_tokens, size, reuse == "gap")
        hit, reused = match.hit, match.reused
        position = min(hit * size, max(num_tokens - 1, 0))
        if self._simple and not reused.size:
            tables, holds = [np.empty(num_blocks, np.int32)], [match.listed[0][:hit]]
            tables[0][:hit] = holds[0]
        else:
            tables = [
                cached_part(group, match, ids, num_blocks, position, size)
                for group, ids in zip(self.groups, match.listed, strict=True)
            ]
            holds = [table[table >= 0] for table in tables]
        fresh = np.arange(hit, num_blocks, dtype=np.int32)
        where: Any = slice(hit, num_blocks)
        if reused.size:
            where = fresh = np.setdiff1d(fresh, reused, assume_unique=True)
        source, common = EMPTY, 0
        swapped_in = saved is not None and len(saved.slots) > hit
        # A block that comes back from the host must not be overwritten by a copy of one that begins like it.
        if self._partial is not None and fresh.size and not reused.size and not swapped_in:
            source, common = self._begins_alike(request, digests, hit)
        if source.size and fresh.size > self._pools[0].available - self._pools[0].unreferenced(
            np.concatenate((holds[0], source))
        ):
            source, common = EMPTY, 0
        for pool, ids in zip(self._pools, holds, strict=True):
            if fresh.size > pool.num_free:
                available = pool.available - pool.unreferenced(ids)
                if fresh.size > available:
                    raise OutOfBlocks(fresh.size, available)

        full = digests[hit:] if not reused.size else digests[fresh[: fresh.searchsorted(len(digests))]]
        for pool, ids, table in zip(self._pools, holds, tables, strict=True):
            if ids.size:
                pool.hold(ids)
            if source.size:
                pool.hold(source)
            if fresh.size:
                table[where] = pool.take(fresh + 1, full)
            if priority or ttl is not None:
                pool.policy.hinted(table[table >= 0], priority, ttl)
        if self._simple:
            self._pools[0].note(chain.path, tables[0])
        chain.path = []
        request.tables, request.num_blocks = tables, num_blocks
        request.released = [0] * len(tables)
        request.committed = min(hit * size, num_tokens) + common
        if source.size:
            request.retire(0, source)
        self._requests[request_id] = request
        wait_for = self._announce(request_id, request, digests[hit].tobytes()) if hit < len(digests) else None

        cached, written = cached_spans(match, num_tokens, size)
        if common:
            cached = [(0, hit * size + common)]
        loads: list[tuple[int, int]] = []
        if saved is not None and swapped_in:
            loads = list(zip(saved.slots[hit:], tables[0][hit : len(saved.slots)].tolist(), strict=True))
            covered = min(saved.committed, len(saved.slots) * size)
            written = covered == num_tokens
            cached = [(0, covered - written)] if covered > written else []
        tables = [table.copy() for table in tables]
        allocation = Allocation(
            tables=tables,
            first_block=0,
            block_size=size,
            cached_spans=cached,
            compute_spans=complement(cached, num_tokens),
            written=written,
            copies=[[(int(source[0]), int(tables[0][hit]))]] if common else [[] for _ in tables],
            wait_for=wait_for,
            loads=loads,
        )
        if saved is not None:
            return allocation
        self._total_requests += 1
        self._queried += num_tokens
        self._hits["prefix"] += position
        self._hits["partial"] += common
        self._hits["gap"] += allocation.num_cached_tokens - position - common
        return allocation

    def _begins_alike(self, request: Request, digests: Words, hit: int) -> tuple[Ids, int]:
        """A cached block that begins as the prompt goes on behind `hit` blocks, and how many tokens they share."""
        chain, start = request.chain, hit * self.block_size
        if self._partial is None or chain is None or chain.root is None or request.tables:
            return EMPTY, 0
        parent = digests[hit - 1].tobytes() if hit else chain.root
        end = min(start + self.block_size, len(request.tokens) - 1)
        block_hash, common = self._partial.longest(parent, request.tokens[start:end])
        if block_hash is None:
            return EMPTY, 0
        ids = self._pools[0].table.find(np.frombuffer(block_hash, np.uint64)[None])
        return (ids, common) if ids[0] >= 0 else (EMPTY, 0)

    def _announce(self, request_id: Hashable, request: Request, digest: bytes) -> Hashable:
        """Says that a request computes the block of this hash, unless another one does: then returns who."""
        writer = self._writers.setdefault(digest, request_id)
        if writer != request_id:
            return writer
        request.writing = digest
        return None

    def _withdraw(self, request: Request) -> None:
        if request.writing is not None:
            del self._writers[request.writing]
            request.writing = None

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
            first, old_blocks = start // size, request.num_blocks
            copies = self._make_room(request, end) if end > start else [[] for _ in self._pools]
            request.tokens.extend(new)
            return Allocation(
                tables=[table[first : request.num_blocks].copy() for table in request.tables],
                first_block=first,
                new_block=old_blocks,
                block_size=size,
                cached_spans=[],
                compute_spans=[(start, end)] if end > start else [],
                written=False,
                copies=copies,
            )

    def append_each(self, request_ids: Sequence[Hashable], token_ids: TokenIds) -> tuple[Any, Any]:
        """Adds one token to each of several requests: `append` for a step of decoding, at a tenth of its cost.

        Args:
            request_ids: Running requests, each once.
            token_ids: One token for each.

        Returns:
            (slots, copies): the slot of each new token, [n] int64, and what `Allocation.copies` is; with several
            groups one of each per group.

        Raises:
            OutOfBlocks: Too few blocks; no request has got its token.
            KeyError: An unknown request.
            ValueError: Another number of tokens than of requests, a request given twice, a token id out of range.
        """
        new = encode_tokens(token_ids)
        if len(new) != len(request_ids):
            raise ValueError(f"token_ids: got {len(new)}, needs one for each of {len(request_ids)} requests")
        size = self.block_size
        with self._lock:
            rows = [self._running(request_id) for request_id in request_ids]
            if len(set(request_ids)) < len(rows):
                raise ValueError("request_ids: got a request twice, needs each once")
            slow = [row for row in rows if row.shared_tail or len(row.tokens) % size == 0]
            for pool in self._pools:  # a copy or a new block at most for each, never both
                if len(slow) > pool.available:
                    needed = sum(self._blocks_to_take(row, len(row.tokens) + 1)[0] for row in slow)
                    if needed > pool.available:
                        raise OutOfBlocks(needed, pool.available)
            copies: list[list[tuple[int, int]]] = [[] for _ in self._pools]
            for row in slow:
                for group, pairs in enumerate(self._make_room(row, len(row.tokens) + 1)):
                    copies[group] += pairs
            slots = []
            for table in zip(*(row.tables for row in rows), strict=True):
                blocks = [ids[row.num_blocks - 1] for ids, row in zip(table, rows, strict=True)]
                offsets = [len(row.tokens) % size for row in rows]
                slots.append(np.array(blocks, np.int64) * size + np.array(offsets, np.int64))
            for row, token in zip(rows, new, strict=True):
                row.tokens.append(token)
        if len(self._pools) == 1:
            return (slots[0] if slots else np.empty(0, np.int64)), copies[0]
        return slots, copies

    def _blocks_to_take(self, request: Request, end: int) -> tuple[int, list[bool]]:
        """Blocks of each group that a request needs to reach `end` tokens, and the groups that need one as a copy."""
        start, size = len(request.tokens), self.block_size
        first = start // size
        split = request.shared_tail and start % size != 0
        shared = [split and self._must_copy(pool, int(table[first])) for pool, table in self._each(request)]
        return -(-end // size) - request.num_blocks + any(shared), shared

    def _make_room(self, request: Request, end: int) -> list[list[tuple[int, int]]]:
        """Takes the blocks that a request needs to reach `end` tokens; the copies to make, per group."""
        start, size = len(request.tokens), self.block_size
        first, old_blocks, num_blocks = start // size, request.num_blocks, -(-end // size)
        copies: list[list[tuple[int, int]]] = [[] for _ in self._pools]
        if num_blocks == old_blocks and not request.shared_tail:
            return copies
        needed, shared = self._blocks_to_take(request, end)
        for pool in self._pools:
            if needed > pool.available:
                raise OutOfBlocks(needed, pool.available)
        for group, pool in enumerate(self._pools):
            table = request.grown_table(group, num_blocks)
            if shared[group]:
                copies[group].append(self._replace_shared(request, group, first))
            if num_blocks > old_blocks:
                lengths = np.arange(old_blocks + 1, num_blocks + 1, dtype=np.int32)
                table[old_blocks:num_blocks] = pool.take(lengths)
        request.shared_tail = False
        request.num_blocks = num_blocks
        return copies

    def _replace_shared(self, request: Request, group: int, block: int) -> tuple[int, int]:
        """Puts a fresh block in the place of one that others see: (its number, the fresh one's)."""
        pool, table = self._pools[group], request.tables[group]
        old = table[block : block + 1].copy()
        table[block] = pool.take(np.array([block + 1], np.int32))[0]
        if pool.ref_count[old[0]] > 1:
            pool.release(old)
        else:  # nobody else keeps it from being handed out before the copy is made
            request.retire(group, old)
        return int(old[0]), int(table[block])

    @staticmethod
    def _must_copy(pool: BlockPool, block: int) -> bool:
        """Whether writing a block would be seen by another holder or by whoever finds it."""
        return bool(pool.complete[block]) or int(pool.ref_count[block]) > 1

    def _each(self, request: Request) -> list[tuple[BlockPool, Ids]]:
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
            if request.retired is not None or request.loading:
                self._drop_retired(request)
            first, last = request.committed // self.block_size, num_tokens // self.block_size
            request.committed = max(request.committed, num_tokens)
            replaced: list[list[tuple[int, int]]] = [[] for _ in self._pools]
            if last > first:
                self._withdraw(request)
                digests = self._digests_up_to(request, last)
                for group in range(len(self._pools)):
                    replaced[group] = self._publish(request, group, first, last, digests)
                if not self._simple:
                    self._leave_window(request)
                if request.chain is not None and request.chain.hashed > last:
                    following = self._pools[0].words[request.tables[0][last]]
                    self._announce(request_id, request, following.tobytes())
            return replaced[0] if len(replaced) == 1 else replaced

    def _digests_up_to(self, request: Request, last: int) -> Words:
        """Hashes of blocks `last - n .. last - 1`, those not hashed before; all of them after a deep rollback."""
        if request.chain is None:
            request.chain = self._hasher.chain(*request.keys)
        elif request.chain.hashed >= last:
            return NO_WORDS
        return request.chain.extend(request.tokens, last)

    def _publish(self, request: Request, group: int, first: int, last: int, digests: Words) -> list[tuple[int, int]]:
        """Makes blocks [first, last) findable and swaps in the twins of those that already were."""
        pool, table = self._pools[group], request.tables[group]
        if digests.size:
            hashed = table[last - len(digests) : last]
            present = hashed >= 0
            pool.words[hashed[present]] = digests[present]
        complete = pool.table.contains(table[first:last]) if self.listeners or self._partial else None
        old, new = pool.publish(table[first:last])
        if complete is not None:
            stored = (~complete & ~np.isin(table[first:last], old)).nonzero()[0] + first
            self._tell_stored(request, group, stored)
            self._index_stored(request, pool, stored)
        if not old.size:
            return []
        where = first + np.isin(table[first:last], old).nonzero()[0]
        table[where] = new
        request.retire(group, old)
        self._merged += old.size
        return list(zip(old.tolist(), new.tolist(), strict=True))

    def _tell_stored(self, request: Request, group: int, blocks: npt.NDArray[np.intp]) -> None:
        """Tells the listeners of blocks that became findable, a run of neighbours at a time."""
        pool, table, size = self._pools[group], request.tables[group], self.block_size
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
            if not run.size:
                continue
            start, end = int(run[0]), int(run[-1]) + 1
            parent = pool.digests_of(table[start - 1 : start])[0] if start and table[start - 1] >= 0 else None
            hashes = pool.digests_of(table[start:end])
            for listener in self.listeners:
                tokens = request.tokens[start * size : end * size].tolist()
                listener.stored(group, hashes, parent, tokens, request.keys[0])

    def _index_stored(self, request: Request, pool: BlockPool, blocks: npt.NDArray[np.intp]) -> None:
        """Notes the tokens of blocks that became findable, for prompts that begin like them."""
        root = request.chain.root if request.chain is not None else None
        if self._partial is None or root is None:
            return
        table, size = request.tables[0], self.block_size
        for block in blocks.tolist():
            parent = pool.digests_of(table[block - 1 : block])[0] if block else root
            own = pool.digests_of(table[block : block + 1])[0]
            self._partial.add(parent, own, request.tokens[block * size : (block + 1) * size])

    def _evicted(self, group: int, ids: Ids) -> None:
        if self.on_evict is None and not self.listeners and self._partial is None:
            return
        hashes = self._pools[group].digests_of(ids)
        if self._partial is not None:
            self._partial.remove(hashes)
        if self.on_evict is not None:
            self.on_evict(group, ids, hashes)
        for listener in self.listeners:
            listener.removed(group, hashes)

    def _drop_retired(self, request: Request) -> None:
        if request.loading:
            self._host.give_back(request.loading)
            request.loading = []
        for pool, ids in zip(self._pools, request.retired or (), strict=False):
            pool.release(ids)
        request.retired = None

    def _leave_window(self, request: Request) -> None:
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
                self._withdraw(request)

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
            self._check_new("new_request_id", new_request_id)
            for group, pool in enumerate(self._pools):
                pool.share(parent.held(group))
            chain = parent.chain.copy() if parent.chain is not None else None
            child = Request(
                array("I", parent.tokens), [t.copy() for t in parent.tables], parent.num_blocks, chain, parent.keys
            )
            child.committed = parent.committed
            child.released = list(parent.released)
            child.shared_tail = parent.shared_tail = True
            self._requests[new_request_id] = child

    def free(self, request_id: Hashable) -> None:
        """Ends a request, running or preempted: its complete, committed blocks stay findable, the others are free.

        Raises:
            KeyError: An unknown request.
        """
        with self._lock:
            if request_id in self._preempted:
                self._host.give_back(self._preempted.pop(request_id).slots)
                return
            self._release(request_id, self._running(request_id))

    def _release(self, request_id: Hashable, request: Request) -> None:
        del self._requests[request_id]
        self._drop_retired(request)
        self._withdraw(request)
        for group, pool in enumerate(self._pools):
            pool.release(request.held(group))

    def preempt(self, request_id: Hashable, mode: str = "recompute") -> list[tuple[int, int]]:
        """Takes a running request's blocks away until `resume`; its tokens are kept.

        Args:
            request_id: A running request.
            mode: "recompute": what is not cached any more at `resume` is computed again. "swap": the KV of its leading
                blocks goes to host memory, as far as slots are free; the rest as with "recompute". Groups other than
                one of full attention are always recomputed.

        Returns:
            (block, host slot) to be copied before anything is written.

        Raises:
            KeyError: An unknown request.
            ValueError: An unknown mode.
        """
        if mode not in ("recompute", "swap"):
            raise ValueError(f"mode: got {mode!r}, needs recompute or swap")
        with self._lock:
            request = self._running(request_id)
            saved = Preempted(request.tokens, request.keys, request.committed, request.priority)
            pairs: list[tuple[int, int]] = []
            if mode == "swap" and self._simple:
                written = request.tables[0][: -(-request.committed // self.block_size)].tolist()
                saved.slots = self._host.take(len(written))
                pairs = list(zip(written, saved.slots, strict=False))
            self._release(request_id, request)
            self._preempted[request_id] = saved
            self._preemptions += 1
            return pairs

    def victim(self) -> Hashable:
        """The running request to preempt first: of the lowest priority the one started last; None when none runs."""
        with self._lock:
            order = [(r.priority, -i, request_id) for i, (request_id, r) in enumerate(self._requests.items())]
            return min(order, key=lambda row: row[:2])[2] if order else None

    def resume(self, request_id: Hashable) -> Allocation:
        """Gives a preempted request blocks again.

        Returns:
            As `allocate` does; `loads` lists (host slot, block) to be copied before anything is written. The slots are
            in use until this request's next commit, preempt or free.

        Raises:
            KeyError: A request that is not preempted.
            OutOfBlocks: Too few blocks; the request stays preempted.
        """
        with self._lock:
            if request_id not in self._preempted:
                raise KeyError(f"request_id: got {request_id!r}, needs a preempted request")
            saved = self._preempted[request_id]
            chain = self._hasher.chain(*saved.keys)
            digests = chain.extend(saved.tokens, len(saved.tokens) // self.block_size)
            request = Request(saved.tokens, [], 0, chain, saved.keys)
            request.priority = saved.priority
            allocation = self._allocate(request_id, request, digests, "prefix", 0, None, saved)
            del self._preempted[request_id]
            request.loading = saved.slots
            return allocation

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

    def num_tokens(self, request_id: Hashable) -> int:
        """Tokens of a running request, those not computed yet included.

        Raises:
            KeyError: An unknown request.
        """
        with self._lock:
            return len(self._running(request_id).tokens)

    def block_hashes(self, request_id: Hashable) -> list[bytes]:
        """The hashes of a running request's full blocks, in order, written or not: what a lower tier is asked for.

        Raises:
            KeyError: An unknown request.
        """
        with self._lock:
            request = self._running(request_id)
            chain = self._hasher.chain(*request.keys)
            words = chain.extend(request.tokens, len(request.tokens) // self.block_size)
            raw, width = words.tobytes(), 8 * self._hasher.words
            return [raw[i : i + width] for i in range(0, len(raw), width)]

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
                residency=tuple(np.sum([p.residency()[0] for p in self._pools], axis=0).tolist()),
                residency_sum=sum(p.residency()[1] for p in self._pools),
                preemptions=self._preemptions,
                host_blocks=self._host.count - self._host.num_free,
            )

    def reset(self) -> None:
        """Forgets all cached blocks and counters.

        Raises:
            RuntimeError: Requests are running.
        """
        with self._lock:
            if count := len(self._requests) + len(self._preempted):
                raise RuntimeError(f"reset: {count} requests are running or preempted, needs none; free them first")
            for pool in self._pools:
                pool.reset()
            self._zero_counters()
            if self._partial is not None:
                self._partial.clear()
            for listener in self.listeners:
                listener.cleared()

    def check(self) -> None:
        """Asserts that all is consistent: free + cached + held = all, no block in two places, counts right."""
        with self._lock:
            for group, pool in enumerate(self._pools):
                held = [EMPTY]
                for request in self._requests.values():
                    mine = [request.held(group), *((request.retired or [])[group : group + 1])]
                    assert np.unique(mine[0]).size == mine[0].size, "a request holds a block twice"
                    assert request.num_blocks == -(-len(request.tokens) // self.block_size), (
                        "a table has another length"
                    )
                    assert request.committed <= len(request.tokens), "more committed than there is"
                    held += mine
                pool.check(np.concatenate(held))
            slots = [s for saved in self._preempted.values() for s in saved.slots]
            self._host.check(slots + [s for request in self._requests.values() for s in request.loading])

    def _check_new(self, name: str, request_id: Hashable) -> None:
        if request_id in self._requests or request_id in self._preempted:
            raise ValueError(f"{name}: got {request_id!r}, which is running, needs a new one")

    def _running(self, request_id: Hashable) -> Request:
        try:
            return self._requests[request_id]
        except KeyError:
            raise KeyError(f"request_id: got {request_id!r}, needs a running request") from None


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, needs an int")
    if value < 1:
        raise ValueError(f"{name}: got {value}, needs at least 1")
