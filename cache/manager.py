"""The manager: what callers see of it, every argument checked, every method under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from operator import index
from typing import Any

import numpy as np

from . import allocate, append, commit, fork, rollback, swap
from .allocation import Allocation, CacheStats
from .groups import FullAttention, Group
from .hashing import BlockHasher, TokenIds, encode_tokens
from .listeners import Listener
from .policies import EvictionPolicy
from .pool import BlockPool
from .request import Request
from .state import ManagerState
from .table import Ids

REUSES = ("prefix", "gap")
MODES = ("recompute", "swap")


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
        partial_reuse: Whether a prompt that agrees with a cached block in its first tokens only reuses those, through
            a copy (`Allocation.copies`). With one group of full attention; costs about 400 bytes a block.
        host_blocks: Block-sized slots of host memory, of each group, that `preempt(mode="swap")` may use.
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
        num_blocks = _count("num_blocks", num_blocks)
        block_size = _count("block_size", block_size)
        host_blocks = _count("host_blocks", host_blocks, 0)
        specs = (FullAttention(),) if groups is None else tuple(groups)
        if not specs or not all(isinstance(g, Group) for g in specs):
            raise TypeError(f"groups: got {groups!r}, needs a sequence of pc.cache group specs")
        if len(specs) > 1 and isinstance(policy, EvictionPolicy):
            raise ValueError("policy: got one instance for several groups, needs a name or a class")
        self._state = ManagerState(
            num_blocks,
            BlockHasher(hash_algorithm, block_size, seed),
            specs,
            policy,
            host_blocks,
            partial_reuse,
        )
        if partial_reuse and not self._state.simple:
            raise ValueError("partial_reuse: got several groups or a window, needs one group of full attention")
        self.block_size = block_size
        self.hash_algorithm = hash_algorithm
        self.seed = seed
        self.groups = specs
        self._lock = threading.RLock()

    @property
    def listeners(self) -> list[Listener]:
        """Hear of stores and removals; append to it."""
        return self._state.listeners.listeners

    @property
    def on_evict(self) -> Callable[[int, Ids, list[bytes]], None] | None:
        """Called with (group, blocks, hashes) when blocks are about to lose their content, for a lower tier.

        It has to read them before it returns.
        """
        return self._state.listeners.on_evict

    @on_evict.setter
    def on_evict(self, function: Callable[[int, Ids, list[bytes]], None] | None) -> None:
        self._state.listeners.on_evict = function

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The block pool of each group, to look at."""
        return tuple(self._state.pools)

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping: fields, tables and policies of all pools, and remembered hashes."""
        return self._state.nbytes

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
        if priority or ttl is not None:
            _check_hint(priority, ttl)
        tokens = encode_tokens(token_ids)
        keys = (extra_keys, salt)
        with self._lock:
            self._check_new("request_id", request_id)
            chain = self._state.hasher.chain(*keys)
            digests = chain.extend(tokens, len(tokens) // self.block_size)
            request = Request(tokens, chain, keys)
            request.priority = priority
            return allocate.allocate(self._state, request_id, request, digests, reuse, priority, ttl)

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
            return append.append(self._state, self._running(request_id), new)

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
        with self._lock:
            requests = [self._running(request_id) for request_id in request_ids]
            if len(set(request_ids)) < len(requests):
                raise ValueError("request_ids: got a request twice, needs each once")
            slots, copies = append.append_each(self._state, requests, new)
        return (slots[0], copies[0]) if len(slots) == 1 else (slots, copies)

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
        if type(num_tokens) is not int:
            num_tokens = _integer("num_tokens", num_tokens)
        with self._lock:
            request = self._running(request_id)
            if not 0 <= num_tokens <= len(request.tokens):
                raise ValueError(f"num_tokens: got {num_tokens}, needs 0 to {len(request.tokens)}, its tokens")
            replaced = commit.commit(self._state, request_id, request, num_tokens)
            return replaced[0] if len(replaced) == 1 else replaced

    def rollback(self, request_id: Hashable, num_tokens: int) -> None:
        """Takes back the last tokens of a request (rejected speculation) and the blocks they alone needed.

        Args:
            request_id: A running request.
            num_tokens: How many.

        Raises:
            KeyError: An unknown request.
            ValueError: More tokens than the request has, or blocks of a sliding window or a recurrent state are gone
                that would be read again.
        """
        if type(num_tokens) is not int:
            num_tokens = _integer("num_tokens", num_tokens)
        with self._lock:
            request = self._running(request_id)
            if not 0 <= num_tokens <= len(request.tokens):
                raise ValueError(f"num_tokens: got {num_tokens}, needs 0 to {len(request.tokens)}, its tokens")
            rollback.rollback(self._state, request, num_tokens)

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
            self._state.running[new_request_id] = fork.fork(self._state, parent)

    def free(self, request_id: Hashable, returns: float | None = None) -> None:
        """Ends a request, running or preempted: its complete, committed blocks stay findable, the others are free.

        Args:
            request_id: The request.
            returns: Probability that its conversation goes on soon, 0 to 1, where the caller knows something: a tool
                call is pending, the window was closed. With 0 the policies that heed it (`default`, `hazard`,
                `priority`) give up first what nobody but this conversation used. None: unknown.

        Raises:
            KeyError: An unknown request.
            TypeError: `returns` is not a number.
            ValueError: `returns` is not between 0 and 1.
        """
        if returns is not None:
            returns = _probability("returns", returns)
        with self._lock:
            if request_id in self._state.preempted:
                swap.drop(self._state, request_id)
            else:
                self._state.release(request_id, self._running(request_id), returns)

    def preempt(self, request_id: Hashable, mode: str = "recompute") -> Any:
        """Takes a running request's blocks away until `resume`; its tokens are kept.

        Args:
            request_id: A running request.
            mode: "recompute": what is not cached any more at `resume` is computed again. "swap": what later queries
                read of its KV goes to host memory. Where a group has too few slots for that, what they read at the
                last block boundary before for which the slots suffice; the rest as with "recompute". Of a recurrent
                group the state is taken to be the one at the committed position, so commit what was computed.

        Returns:
            (block, host slot) to be copied before anything is written; with several groups one list per group, each
            with slots of its own.

        Raises:
            KeyError: An unknown request.
            ValueError: An unknown mode.
        """
        if mode not in MODES:
            raise ValueError(f"mode: got {mode!r}, needs {' or '.join(MODES)}")
        with self._lock:
            pairs = swap.preempt(self._state, request_id, self._running(request_id), mode == "swap")
            return pairs[0] if len(pairs) == 1 else pairs

    def victim(self) -> Hashable:
        """The running request to preempt first: of the lowest priority the one started last; None when none runs."""
        with self._lock:
            order = [(r.priority, -i, request_id) for i, (request_id, r) in enumerate(self._state.running.items())]
            return min(order, key=lambda row: row[:2])[2] if order else None

    def resume(self, request_id: Hashable) -> Allocation:
        """Gives a preempted request blocks again.

        Returns:
            As `allocate` does; `loads` lists (host slot, block) to be copied before anything is written, with several
            groups one list per group. The slots are in use until this request's next commit, preempt or free.

        Raises:
            KeyError: A request that is not preempted.
            OutOfBlocks: Too few blocks; the request stays preempted.
        """
        with self._lock:
            saved = self._state.preempted.get(request_id)
            if saved is None:
                raise KeyError(f"request_id: got {request_id!r}, needs a preempted request")
            allocation = swap.resume(self._state, request_id, saved)
            del self._state.preempted[request_id]
            return allocation

    def block_table(self, request_id: Hashable, group: int = 0) -> Ids:
        """Block numbers of a running request in the order of its sequence, [n] int32, -1 for a hole; a copy.

        Raises:
            KeyError: An unknown request.
            IndexError: An unknown group.
        """
        with self._lock:
            request = self._running(request_id)
            if not 0 <= group < len(self.groups):
                raise IndexError(f"group: got {group}, needs 0 to {len(self.groups) - 1}")
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
            hasher = self._state.hasher
            words = hasher.chain(*request.keys).extend(request.tokens, len(request.tokens) // self.block_size)
            raw, width = words.tobytes(), 8 * hasher.words
            return [raw[i : i + width] for i in range(0, len(raw), width)]

    def stats(self) -> CacheStats:
        """Counters since the manager was made or reset."""
        with self._lock:
            return self._state.stats()

    def reset(self) -> None:
        """Forgets all cached blocks and counters.

        Raises:
            RuntimeError: Requests are running.
        """
        with self._lock:
            if count := len(self._state.running) + len(self._state.preempted):
                raise RuntimeError(f"reset: {count} requests are running or preempted, needs none; free them first")
            self._state.reset()

    def check(self) -> None:
        """Asserts that all is consistent: free + cached + held = all, no block in two places, counts right."""
        with self._lock:
            self._state.check()

    def _check_new(self, name: str, request_id: Hashable) -> None:
        if request_id in self._state.running or request_id in self._state.preempted:
            raise ValueError(f"{name}: got {request_id!r}, which is running, needs a new one")

    def _running(self, request_id: Hashable) -> Request:
        try:
            return self._state.running[request_id]
        except KeyError:
            raise KeyError(f"request_id: got {request_id!r}, needs a running request") from None


def _integer(name: str, value: Any) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}: got {type(value).__name__}, needs an int") from None


def _count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}: got bool, needs an int")
    if (number := _integer(name, value)) < least:
        raise ValueError(f"{name}: got {value}, needs at least {least}")
    return number


def _probability(name: str, value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a number between 0 and 1, or None")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: got {value}, needs a probability between 0 and 1, or None")
    return float(value)


def _check_hint(priority: Any, ttl: Any) -> None:
    if not -(1 << 31) <= _integer("priority", priority) < 1 << 31:
        raise ValueError(f"priority: got {priority}, needs 32 bits")
    if ttl is None:
        return
    if not isinstance(ttl, int | float | np.number):
        raise TypeError(f"ttl: got {type(ttl).__name__}, needs seconds or None")
    if not ttl >= 0:
        raise ValueError(f"ttl: got {ttl}, needs at least 0 seconds")
