"""The manager: what callers see of it, every argument checked, every verb under one lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, overload
from weakref import WeakSet

from typing_extensions import TypeVar

from ..triton_ops._checks import check_integer, check_share
from . import allocate, append, commit, fork, offload, swap
from .allocation import Allocation, AppendedTokens, BaseAllocation, CacheStats, GroupedAllocation, Pairs, PairsT, SlotsT
from .arguments import check_hint, check_segments
from .groups import FullAttention, Group
from .hashing import BlockHasher, TokenIds, encode_tokens, split_digests
from .keys import NO_KEYS, ExtraKeys, Key, encode_keys
from .listeners import Listener
from .offload import OnEvict
from .policies import EvictionPolicy
from .pool import BlockPool
from .runs import Slots, Span
from .state import REMOVAL, ManagerState
from .table import Ids

if TYPE_CHECKING:
    from .observe.explain import Explanation

REUSES = ("prefix", "gap", "anywhere")
MODES = ("recompute", "swap")

AllocationT = TypeVar("AllocationT", bound=BaseAllocation, default=Allocation)


class CacheManager(Generic[AllocationT, PairsT, SlotsT]):
    """Gives requests block tables, finds what is cached, and decides what is evicted.

    All methods may be called from several threads; each is atomic. A method that raises has changed nothing, also when
    what it raises is an interrupt that came in the middle of it (`KeyboardInterrupt`, an exception that another thread
    raises in this one); or it had been completed when the interrupt came. An interrupt that is undone may cost the
    eviction policy what it had learned, and listeners may be notified of the same twice. After `os.fork()` the child
    has a manager of its own in the state before the verbs that other threads were running.

    With one group results are `Allocation`, arrays and lists; with several, `GroupedAllocation` and one of each per
    group. To a type checker a manager without `groups`, or with a tuple of one, is of the first kind
    (`CacheManager`), one with another sequence of the second (`GroupedCacheManager`).

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

    Examples:
        Those of its methods begin with `manager = pc.CacheManager(num_blocks=8, block_size=4)`.

        >>> manager = pc.CacheManager(num_blocks=64, block_size=4)
        >>> document = list(range(100, 130))
        >>> first = manager.allocate("a", document + [1, 2])
        >>> first.compute_spans  # compute these tokens, write their KV to first.slot_mapping
        [(0, 32)]
        >>> manager.commit("a", 32)
        []
        >>> manager.free("a")
        >>> manager.allocate("b", document + [3, 4]).compute_spans
        [(28, 32)]
    """

    @overload
    def __init__(
        self: CacheManager[Allocation, Pairs, Slots],
        num_blocks: int,
        block_size: int = 16,
        policy: str | EvictionPolicy | type[EvictionPolicy] = "default",
        hash_algorithm: str = "sha256",
        groups: tuple[Group] | None = None,
        seed: int | None = None,
        host_blocks: int = 0,
        partial_reuse: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self: CacheManager[GroupedAllocation, list[Pairs], tuple[Slots, ...]],
        num_blocks: int,
        block_size: int = 16,
        policy: str | EvictionPolicy | type[EvictionPolicy] = "default",
        hash_algorithm: str = "sha256",
        groups: Sequence[Group] = ...,
        seed: int | None = None,
        host_blocks: int = 0,
        partial_reuse: bool = False,
    ) -> None: ...

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
        num_blocks = check_integer("num_blocks", num_blocks, 1, 30)
        block_size = check_integer("block_size", block_size, 1, 30)
        host_blocks = check_integer("host_blocks", host_blocks, 0, 30)
        specs = (FullAttention(),) if groups is None else tuple(groups) if isinstance(groups, Sequence) else ()
        if not specs or not all(isinstance(g, Group) for g in specs):
            raise TypeError(f"groups: got {groups!r}, needs a list of specs, such as [pc.FullAttention()], or None")
        if len(specs) > 1 and isinstance(policy, EvictionPolicy):
            raise ValueError("policy: got one instance for several groups, needs a name or a class")
        hasher = BlockHasher(hash_algorithm, block_size, seed)
        self._state = ManagerState(num_blocks, hasher, specs, policy, host_blocks)
        if partial_reuse:
            if not self._state.prefix_only:
                raise ValueError("partial_reuse: got several groups or a window, needs one group of full attention")
            self._state.reuses = self._state.with_reuse("partial")
        self.block_size, self.hash_algorithm, self.seed = block_size, hash_algorithm, seed
        self.groups: tuple[Group, ...] = specs
        self._lock = threading.RLock()
        _MANAGERS.add(self)

    @property
    def listeners(self) -> list[Listener]:
        """Hear of stores and removals; append to it. See `Listener` for what they may do."""
        return self._state.listeners.registered

    @property
    def on_evict(self) -> OnEvict | None:
        """Called with (group, blocks, hashes) of blocks that were evicted, for a lower tier.

        It is called without the manager's lock, so that a slow tier stops no other thread, in the thread of the verb
        that evicted them, once that is done and before it returns. The blocks have their next request, which cannot
        know their slots yet, and until it returns they are not handed out again: so they still hold what their hashes
        say. Read them, or order their copy before later writes. It may call the manager. It returns the hashes it took,
        as a list or set, or None; `stats().offloaded_blocks` counts them. If it raises, that is logged (logger
        "pc.cache") and counted (`stats().failed_offloads`), its blocks are lost, and the verb returns as if it had not.
        A `KeyboardInterrupt` in it goes to the caller of the verb, which is done.
        """
        return self._state.on_evict

    @on_evict.setter
    def on_evict(self, function: OnEvict | None) -> None:
        self._state.on_evict = function

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The block pool of each group, to look at."""
        return tuple(self._state.pools)

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping: fields, tables, policies, remembered hashes and texts, the index of text."""
        return self._state.nbytes + self._state.index_bytes + self._state.history.nbytes

    def _run(self, verb: Callable[..., Any], *args: Any) -> Any:
        """Runs a verb under the lock; what it has evicted is handed to a tier, where there is one."""
        if self._state.on_evict is not None:
            return offload.run(self._state, self._lock, verb, args)
        with self._lock: return self._state.run(verb, args)  # fmt: skip  # noqa: E701  in one line no interrupt is between

    def allocate(
        self,
        request_id: Hashable,
        token_ids: TokenIds,
        extra_keys: ExtraKeys = None,
        salt: Key = None,
        reuse: str = "prefix",
        priority: int = 0,
        ttl: float | None = None,
        num_tokens: int | None = None,
        segments: Sequence[Span] | None = None,
    ) -> AllocationT:
        """Starts a request: finds its cached blocks and takes blocks for the rest.

        Args:
            request_id: Any hashable that no running request has; one that equals another is the same id.
            token_ids: The prompt: list, array or numpy array of integers.
            extra_keys: What decides the KV besides tokens: one key or a list of several, plain (LoRA name) or `KeyAt`.
                Read now: what becomes of the list later does not matter.
            salt: Requests with different salts never share a block.
            reuse: "prefix": the leading run of cached blocks. "gap": cached blocks behind a missing one too.
                "anywhere": behind the prefix also text that is cached at another position, or behind other text, with
                the same keys and salt (`Allocation.moved`). Such KV is approximate: blocks from there on have an
                identity of their own, which no request with "prefix" or "gap" ever finds. With one group of full
                attention. Blocks published after the first such request are found so, not those of a prompt with a
                `KeyAt`.
            priority: Above 0 asks policies that honour it to keep the blocks longer, generated ones too.
            ttl: Seconds for which the priority holds; None: until evicted.
            num_tokens: Take blocks for so many tokens of the prompt only, or as many as are cached if these are more;
                `append` takes those for its next tokens. None: for all.
            segments: With "anywhere": the spans (start, end) of tokens in which text may be found, ascending, none
                across two of them (documents, tool results). None: in all of the prompt.

        Returns:
            Block ids of the prompt, or its part. At least the last token of a whole prompt is to be computed; its
            slot is -1 when its KV is there.

        Raises:
            OutOfBlocks: Too few blocks.
            ValueError: A request id in use, a token id out of range, an unknown `reuse`, num_tokens below 0,
                "anywhere" with several groups or a window, segments without it or not ascending.
            TypeError: token_ids or keys of the wrong type.

        Examples:
            >>> allocation = manager.allocate("a", [5, 6, 7, 8, 9], salt="tenant 1")
            >>> allocation.num_cached_tokens, allocation.block_ids.tolist(), allocation.slot_mapping.tolist()
            (0, [0, 1], [0, 1, 2, 3, 4])
        """
        if reuse not in REUSES:
            raise ValueError(f"reuse: got {reuse!r}, needs one of {', '.join(REUSES)}")
        if type(priority) is not int or priority or ttl is not None:
            priority = check_hint(priority, ttl)
        tokens = encode_tokens(token_ids)
        wanted = len(tokens)
        if num_tokens is not None:
            wanted = min(wanted, check_integer("num_tokens", num_tokens, 0, 30))
        keys = NO_KEYS if extra_keys is None and salt is None else encode_keys(extra_keys, salt)
        if reuse == "anywhere" and not self._state.prefix_only:
            raise ValueError("reuse: got 'anywhere' with several groups or a window, needs one group of full attention")
        if segments is not None:
            segments = check_segments(segments, reuse)
        args = (request_id, tokens, keys, reuse, priority, ttl, wanted, segments)
        return self._run(allocate.allocate, *args)

    def append(self, request_id: Hashable, token_ids: TokenIds) -> AllocationT:
        """Adds tokens to a request and takes the blocks they need.

        Args:
            request_id: A running request.
            token_ids: The new tokens. While a prompt is allocated in part, its next ones.

        Returns:
            The allocation of the new tokens: block_ids has the blocks newly taken, compute_spans all new tokens.
            `copies` is not empty when other requests see the last block: the request gets a copy of it.

        Raises:
            OutOfBlocks: Too few blocks.
            KeyError: An unknown request.
            ValueError: A token id out of range, or tokens that are not the next ones of the prompt.
            TypeError: token_ids of the wrong type.

        Examples:
            >>> allocation = manager.allocate("a", range(7))
            >>> step = manager.append("a", [7, 8])
            >>> step.compute_spans, step.slot_mapping.tolist(), step.block_ids.tolist()
            ([(7, 9)], [7, 8], [2])
        """
        return self._run(append.append, request_id, encode_tokens(token_ids))

    def append_each(self, request_ids: Sequence[Hashable], token_ids: TokenIds) -> AppendedTokens[SlotsT, PairsT]:
        """Adds one token to each of several requests: `append` for a step of decoding, at a tenth of its cost.

        Every token before has been computed, committed or not.

        Args:
            request_ids: Running requests, each once.
            token_ids: One token for each.

        Returns:
            (slots, copies): the slot of each new token, [n] int64, and what `Allocation.copies` is; with several
            groups one of each per group. Its attributes are what a `Step` is made of.

        Raises:
            OutOfBlocks: Too few blocks; no request has got its token.
            KeyError: An unknown request.
            ValueError: Another number of tokens than of requests, a request given twice, a token id out of range.

        Examples:
            >>> allocations = [manager.allocate(request, range(6)) for request in ("a", "b")]
            >>> slots, copies = manager.append_each(["a", "b"], [7, 8])
            >>> slots.tolist(), copies
            ([6, 14], [])
        """
        new = encode_tokens(token_ids)
        if len(new) != len(request_ids):
            raise ValueError(f"token_ids: got {len(new)}, needs one for each of {len(request_ids)} requests")
        return self._run(append.append_each, request_ids, new)

    def commit(self, request_id: Hashable, num_tokens: int) -> PairsT:
        """Says that every position before `num_tokens` has been written: publishes complete blocks in the prefix cache.

        Args:
            request_id: A running request.
            num_tokens: Absolute position; what was committed before stays so.

        Returns:
            (old block, new block) for each block that an equal one, completed by another request, replaced in this
            request's table; with several groups one list per group. Old blocks are not handed out again before this
            request's next commit or free.

        Raises:
            KeyError: An unknown request.
            ValueError: More tokens than the request has blocks for.

        Examples:
            >>> both = [manager.allocate(request, range(5)) for request in ("a", "b")]  # compute the same prompt
            >>> manager.commit("a", 5)
            []
            >>> manager.commit("b", 5)  # block 0 of the first takes the place of its block 2
            [(2, 0)]
        """
        if type(num_tokens) is not int:
            num_tokens = check_integer("num_tokens", num_tokens)
        return self._run(commit.commit, request_id, num_tokens)

    def checkpoint(self, request_id: Hashable, num_tokens: int, group: int | None = None) -> int:
        """Takes a block for the state of a recurrent group behind `num_tokens` tokens.

        Write the state there before the next commit of that position, which publishes it: a later prompt with
        these tokens and their KV then begins there. `Allocation.junction` names positions where that pays.

        Args:
            request_id: A running request.
            num_tokens: A multiple of the block size, at most the request's tokens.
            group: Which recurrent group; None: the only one.

        Returns:
            The block, the same again when asked for twice before the commit.

        Raises:
            OutOfBlocks: All states of the group are held.
            KeyError: An unknown request.
            ValueError: No block boundary, past the request's end, a state that it holds already, or another group.

        Examples:
            >>> manager = pc.CacheManager(8, block_size=4, groups=[pc.FullAttention(), pc.Recurrent(num_blocks=4)])
            >>> allocation = manager.allocate("a", range(10))
            >>> block = manager.checkpoint("a", 8)  # where the state behind token 8 is to be written
            >>> merged = manager.commit("a", 10)
            >>> manager.allocate("b", range(10)).num_cached_tokens
            8
        """
        return self._run(commit.checkpoint, request_id, check_integer("num_tokens", num_tokens), group)

    def rollback(self, request_id: Hashable, num_tokens: int) -> None:
        """Takes back the last tokens of a request (rejected speculation) and the blocks they alone needed.

        What a prompt that was allocated in part had still to come is forgotten, but with no token taken back.

        Args:
            request_id: A running request.
            num_tokens: How many.

        Raises:
            KeyError: An unknown request.
            ValueError: More tokens than the request has, or blocks of a sliding window are gone that would be read
                again. With a recurrent group, no state is there: it has to end at a state that the request holds, or
                at the committed position, whose state the engine has kept.

        Examples:
            >>> allocation = manager.allocate("a", range(6))
            >>> draft = manager.append("a", [6, 7, 8])
            >>> manager.rollback("a", 2)  # the last two were rejected
            >>> manager.num_tokens("a"), len(manager.block_table("a"))
            (7, 2)
        """
        self._run(fork.rollback, request_id, check_integer("num_tokens", num_tokens))

    def fork(self, request_id: Hashable, new_request_id: Hashable) -> None:
        """Starts a request that shares everything with a running one (parallel sampling, beam search).

        The first to append to a block that they share in part gets a copy of it, listed in `Allocation.copies`.
        Priority and ttl are the parent's.

        Raises:
            KeyError: An unknown request.
            ValueError: new_request_id is running, or the request has tokens that are not committed.

        Examples:
            >>> allocation, merged = manager.allocate("a", range(6)), manager.commit("a", 6)
            >>> manager.fork("a", "b")
            >>> manager.append("b", [9]).copies  # its own copy of the block they share
            [(1, 2)]
        """
        self._run(fork.fork, request_id, new_request_id)

    def free(self, request_id: Hashable, returns: float | None = None) -> None:
        """Ends a request, running or preempted: its complete, committed blocks stay published, the others are free.

        Args:
            request_id: The request.
            returns: Probability that its conversation goes on soon, 0 to 1, where the caller knows something: a tool
                call is pending, the window was closed. With 0 the policies that honour it (`hazard`,
                `priority`) evict first what only this conversation used. None: unknown.

        Raises:
            KeyError: An unknown request.
            TypeError: `returns` is not a number.
            ValueError: `returns` is not between 0 and 1.

        Examples:
            >>> allocation, merged = manager.allocate("a", range(6)), manager.commit("a", 6)
            >>> manager.free("a", returns=0.9)  # a tool call is pending: the conversation most likely goes on
            >>> manager.stats().cached_blocks, manager.stats().free_blocks
            (1, 7)
        """
        if returns is not None:
            returns = check_share("returns", returns)
        self._run(_free, request_id, returns)

    def preempt(self, request_id: Hashable, mode: str = "recompute") -> PairsT:
        """Takes a running request's blocks away until `resume`; its tokens are kept.

        Args:
            request_id: A running request.
            mode: "recompute": what is not cached any more at `resume` is computed again. "swap": what later queries
                read of its KV goes to host memory. Where a group has too few slots for that, what they read at the
                last block boundary before for which the slots suffice; the rest as with "recompute". With a recurrent
                group the last boundary with a state.

        Returns:
            (block, host slot) to be copied before anything is written; with several groups one list per group, each
            with slots of its own.

        Raises:
            KeyError: An unknown request.
            ValueError: An unknown mode.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=8, block_size=4, host_blocks=4)
            >>> allocation, merged = manager.allocate("a", range(8)), manager.commit("a", 8)
            >>> manager.preempt("a", "swap")  # copy these blocks to these host slots
            [(0, 0), (1, 1)]
        """
        if mode not in MODES:
            raise ValueError(f"mode: got {mode!r}, needs {' or '.join(MODES)}")
        return self._run(swap.preempt, request_id, mode == "swap")

    def victim(self) -> Hashable:
        """The running request to preempt first: of the lowest priority the one started last; None when none runs.

        Examples:
            >>> first, second = manager.allocate("a", range(4)), manager.allocate("b", range(4), priority=1)
            >>> manager.victim()
            'a'
        """
        with self._lock:
            self._state.settle()
            order = [(r.priority, -i, request_id) for i, (request_id, r) in enumerate(self._state.running.items())]
            return min(order, key=lambda row: row[:2])[2] if order else None

    def resume(self, request_id: Hashable) -> AllocationT:
        """Gives a preempted request blocks again.

        Returns:
            As `allocate` does; `loads` lists (host slot, block) to be copied before anything is written, with several
            groups one list per group. The slots are in use until this request's next commit, preempt or free.

        Raises:
            KeyError: A request that is not preempted.
            OutOfBlocks: Too few blocks; the request stays preempted.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=2, block_size=4, host_blocks=4)
            >>> allocation, merged = manager.allocate("a", range(8)), manager.commit("a", 8)
            >>> pairs = manager.preempt("a", "swap")
            >>> other = manager.allocate("b", range(50, 58))  # takes the blocks
            >>> manager.free("b")
            >>> manager.resume("a").loads  # copy these host slots back to these blocks
            [(0, 0), (1, 1)]
        """
        return self._run(swap.resume, request_id)

    def block_table(self, request_id: Hashable, group: int = 0) -> Ids:
        """Block numbers of a running request in the order of its sequence, [n] int32, -1 for a hole; a copy.

        Raises:
            KeyError: An unknown request.
            IndexError: An unknown group.

        Examples:
            >>> allocation = manager.allocate("a", range(9))
            >>> manager.block_table("a")
            array([0, 1, 2], dtype=int32)
        """
        group = check_integer("group", group)
        with self._lock:
            self._state.settle()
            request = self._state.get(request_id)
            if not 0 <= group < len(self.groups):
                raise IndexError(f"group: got {group}, needs 0 to {len(self.groups) - 1}")
            return request.tables[group][: request.num_blocks].copy()

    def num_tokens(self, request_id: Hashable) -> int:
        """Tokens of a running request that have blocks, those not computed yet included.

        Raises:
            KeyError: An unknown request.

        Examples:
            >>> allocation, step = manager.allocate("a", range(9)), manager.append("a", [9])
            >>> manager.num_tokens("a")
            10
        """
        with self._lock:
            self._state.settle()
            return len(self._state.get(request_id).tokens)

    def block_hashes(self, request_id: Hashable) -> list[bytes]:
        """The hashes of a running request's full blocks, in order, written or not: what a lower tier is asked for.

        Of a prompt that is allocated in part all of them.

        Raises:
            KeyError: An unknown request.

        Examples:
            >>> allocation = manager.allocate("a", range(9))
            >>> [key.hex()[:8] for key in manager.block_hashes("a")]
            ['f2ca9d08', 'da4290a1']
        """
        with self._lock:
            self._state.settle()
            request, hasher = self._state.get(request_id), self._state.hasher
            tokens = request.tokens + request.pending if request.pending else request.tokens
            return split_digests(hasher.hash_blocks(tokens, request.keys))

    def explain(
        self, token_ids: TokenIds, extra_keys: ExtraKeys = None, salt: Key = None, below: Any = None
    ) -> Explanation:
        """Say how far a prompt is cached, why no further, and what other kinds of reuse would save; changes nothing.

        It takes time in proportion to what is remembered: the latest text, of as many tokens as the pool would hold in
        blocks of 16, and the latest evictions. Text of another salt is never shown.

        Args:
            token_ids: The prompt, as for `allocate`.
            extra_keys: Its keys, as for `allocate`.
            salt: Its salt.
            below: Returns whether a lower tier has the block of a hash; blocks that it has count as cached.

        Raises:
            ValueError: A token id out of range.
            TypeError: token_ids or keys of the wrong type.

        Examples:
            >>> allocation, merged = manager.allocate("a", range(20, 32)), manager.commit("a", 12)
            >>> found = manager.explain([20, 21, 22, 23, 24, 25, 7, 27, 28])
            >>> found.matched, found.reason, found.position, found.there[:2]
            (4, 'token', 6, (26, 27))
        """
        from .observe import explain

        return self._run(explain.explain, encode_tokens(token_ids), encode_keys(extra_keys, salt), below)

    def stats(self) -> CacheStats:
        """Counters since the manager was made or reset.

        Examples:
            >>> allocation = manager.allocate("a", range(9))
            >>> manager.stats().held_blocks, manager.stats().hit_rate
            (3, 0.0)
        """
        with self._lock:
            self._state.settle()
            return self._state.stats()

    def reset(self) -> None:
        """Forgets all cached blocks and counters.

        Raises:
            RuntimeError: Requests are running.

        Examples:
            >>> allocation, merged = manager.allocate("a", range(9)), manager.commit("a", 9)
            >>> manager.free("a")
            >>> manager.reset()
            >>> manager.stats().cached_blocks
            0
        """
        self._run(ManagerState.reset)

    def check(self) -> None:
        """Asserts that all is consistent: free + cached + held = all, no block in two places, counts right.

        Examples:
            >>> allocation = manager.allocate("a", range(9))
            >>> manager.check()
        """
        with self._lock:
            self._state.settle()
            self._state.check()


_MANAGERS: WeakSet[CacheManager[Any, Any, Any]] = WeakSet()
"""All that there are, for a child process."""


def _after_fork() -> None:
    """Free the managers of a child process from the verbs of threads that it does not have."""
    for manager in list(_MANAGERS):
        if not manager._lock._is_owned():  # type: ignore[attr-defined]
            manager._lock = threading.RLock()
            manager._state.undo(False)
            manager._state.settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _free(state: ManagerState, request_id: Hashable, returns: float | None) -> None:
    request = state.running.get(request_id)
    if request is None and request_id in state.preempted:
        swap.drop(state, request_id)
    else:
        request = request or state.get(request_id)
        state.snapshot = REMOVAL
        state.release(request_id, request, returns)
