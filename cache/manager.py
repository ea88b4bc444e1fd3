"""The manager as callers see it. It checks arguments, and runs every verb under one lock.

A verb is a function that changes the manager's state, such as `allocate` or `free`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, overload

from typing_extensions import TypeVar

from ..triton_ops._core.checks import check_integer, check_share
from . import allocate, append, commit, fork, offload, swap
from .allocation import Allocation, AnyAllocation, AppendedTokens, GroupedAllocation, Pairs, PairsT, SlotsT
from .forks import repair_after_fork
from .groups import FullAttention, Group
from .hashing import BlockHasher, TokenIds, encode_tokens
from .keys import NO_KEYS, ExtraKeys, Key, encode_keys
from .listeners import Listener
from .offload import OnEvict
from .policies import EvictionPolicy
from .pool import BlockPool, Hint
from .runs import Slots, Span
from .state import ManagerState
from .table import Ids

if TYPE_CHECKING:
    from .observe.explain import Explanation
    from .observe.stats import CacheStats

REUSES = ("prefix", "gap", "anywhere")
MODES = ("recompute", "swap")

T = TypeVar("T")
AllocationT = TypeVar("AllocationT", bound=AnyAllocation, default=Allocation)


class CacheManager(Generic[AllocationT, PairsT, SlotsT]):
    """A manager of block tables: it finds cached blocks, allocates blocks for requests, and decides which to evict.

    All methods are thread-safe and atomic. A method that raises has changed nothing. This includes interrupts
    (`KeyboardInterrupt`, or an exception that another thread raises in this one), unless the method was already
    complete. If an interrupt undoes a method, the eviction policy may forget what it has learned, and listeners may be
    notified twice. After `os.fork()` the child has its own manager, in the state before any verb that another thread
    was running.

    With one group, results have one array or list; with several groups, one for each group. To a type checker, a
    manager without `groups`, or with a tuple of one group, returns an `Allocation`. A manager with any other sequence
    of groups, such as a list, is a `GroupedCacheManager`, which returns a `GroupedAllocation`.

    Args:
        num_blocks: Number of blocks in each group's cache tensors.
        block_size: Number of tokens in a block.
        policy: Name of an eviction policy (`pc.cache.policies.POLICIES`), its class, or, with one group, an instance.
        hash_algorithm: "sha256", "blake2b" or "xxh3_128"; see `pc.cache.hashing` for the strength of each.
        groups: Specs of the layer groups. None: one group of full attention.
        seed: Makes hashes differ from those of managers with another seed. None: the same hashes everywhere.
        partial_reuse: Whether a prompt also reuses the first tokens of a cached block whose later tokens differ. The
            request gets its own copy of the block (`Allocation.copies`). Needs one group of full attention; costs about
            400 bytes for each block.
        host_blocks: Number of block-sized slots of host memory in each group for `preempt(mode="swap")`.

    Raises:
        TypeError: A number is not an int, or `policy`, `groups` or `seed` has the wrong type.
        ValueError: A number is out of range, or `policy` or `hash_algorithm` is unknown. Or an instance of a policy or
            `partial_reuse` is given with several groups, or `partial_reuse` with a window.
        ImportError: `hash_algorithm` is "xxh3_128", and xxhash is not installed.

    Examples:
        The examples of the methods begin with `manager = pc.CacheManager(num_blocks=8, block_size=4)`.

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
        repair_after_fork(self)

    @property
    def listeners(self) -> list[Listener]:
        """Objects that are notified of published and removed blocks. Append to this list.

        See `Listener` for the rules.
        """
        return self._state.listeners

    @property
    def on_evict(self) -> OnEvict | None:
        """A function that is called with (group, blocks, hashes) of evicted blocks, for a lower tier to store them.

        It runs in the thread of the verb that evicted the blocks, after the verb is complete and before it returns. It
        runs without the manager's lock, so a slow tier blocks no other thread. It may call the manager.

        Until it returns, the blocks still hold the KV of their hashes, because the verb has not returned their slots to
        its caller yet. No other verb allocates them until then. Read the blocks before it returns, or order their copy
        before later writes on the device.

        It returns the hashes that it took, as a list or set, or None; `stats().offloaded_blocks` counts them. If it
        raises, the exception is logged (logger "pc.cache") and counted (`stats().failed_offloads`), its blocks are
        lost, and the verb returns normally. A `KeyboardInterrupt` in it is raised in the verb's caller; the verb
        is complete then.
        """
        return self._state.on_evict

    @on_evict.setter
    def on_evict(self, function: OnEvict | None) -> None:
        self._state.on_evict = function

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The block pool of each group, for reading."""
        return tuple(self._state.pools)

    @property
    def nbytes(self) -> int:
        """Bytes of bookkeeping: fields of blocks, tables, policies, remembered hashes and tokens, and reuse indexes."""
        return self._state.nbytes

    def _run(self, verb: Callable[..., Any], *args: Any) -> Any:
        """Run a verb under the lock, and pass the blocks it has evicted to a tier, if there is one."""
        try:
            if self._state.on_evict is not None:
                return offload.run(self._state, self._lock, verb, args)
            with self._lock: return self._state.run(verb, args)  # fmt: skip  # noqa: E701  see `Evicted.hand_over`
        except TypeError:
            _refuse_unhashable(verb, args)
            raise

    def _read(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that only reads the state, under the lock. Policy hooks may call this too."""
        try:
            with self._lock: self._state.settle(); return function(self._state, *args)  # fmt: skip  # noqa: E701, E702
        except TypeError:
            _refuse_unhashable(function, args)
            raise

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
        """Start a request: find its cached blocks and allocate blocks for the other tokens.

        Args:
            request_id: Any hashable that no running or preempted request has. Ids that are equal are the same id.
            token_ids: The prompt: a list, array or numpy array of integers.
            extra_keys: Keys for what the KV depends on besides tokens: one key or a list. A key is a plain value,
                such as a LoRA's name, or a `KeyAt`. Later changes of the list have no effect.
            salt: Requests with different salts never share a block.
            reuse: "prefix": reuse the leading run of cached blocks. "gap": also reuse cached blocks that come after a
                missing one. "anywhere": after the prefix, also reuse text that is cached at another position or after
                other text, with the same keys and salt (`Allocation.moved`). Such KV is approximate. From the first
                moved token on, blocks get different hashes, so that no request with "prefix" or "gap" ever finds them.
                "anywhere" needs one group of full attention. It finds only blocks published after the first such call,
                and no blocks of a prompt with a `KeyAt`.
            priority: Policies that use priorities keep blocks with a priority above 0 longer. The priority
                also holds for the blocks of the answer.
            ttl: Seconds for which the priority holds. None: until evicted.
            num_tokens: Allocate blocks for only this many tokens of the prompt, or for the cached prefix if it is
                longer. `append` allocates blocks for the next tokens, which are all computed. None: for all.
            segments: With "anywhere", the spans (start, end) of tokens in which to look for text, ascending. A span is
                a document or a tool result, for example. A match never crosses the end of a span. None: the whole
                prompt.

        Returns:
            The allocation of the prompt, or of its first `num_tokens` tokens. At least the last token of a whole prompt
            must be computed. Its slot is -1 if its KV is cached.

        Raises:
            OutOfBlocks: There are too few blocks.
            ValueError: The request id is in use, a token id or another number is out of range, or `reuse` is unknown.
                Or "anywhere" is given with several groups or a window. Or segments are not ascending, or given without
                "anywhere".
            TypeError: `token_ids`, keys, segments or a number have the wrong type.

        Examples:
            >>> allocation = manager.allocate("a", [5, 6, 7, 8, 9], salt="tenant 1")
            >>> allocation.num_cached_tokens, allocation.block_ids.tolist(), allocation.slot_mapping.tolist()
            (0, [0, 1], [0, 1, 2, 3, 4])
        """
        if reuse not in REUSES:
            raise ValueError(f"reuse: got {reuse!r}, needs one of {', '.join(REUSES)}")
        plain = type(priority) is int and not priority and ttl is None
        hint = None if plain else _check_hint(priority, ttl)
        tokens = encode_tokens(token_ids)
        wanted = len(tokens)
        if num_tokens is not None:
            wanted = min(wanted, check_integer("num_tokens", num_tokens, 0, 30))
        keys = NO_KEYS if extra_keys is None and salt is None else encode_keys(extra_keys, salt)
        if reuse == "anywhere" and not self._state.prefix_only:
            raise ValueError("reuse: got 'anywhere' with several groups or a window, needs one group of full attention")
        if segments is not None:
            from .reuse.moved import check_segments

            segments = check_segments(segments, reuse)
        args = (request_id, tokens, keys, reuse, hint, wanted, segments)
        return self._run(allocate.allocate, *args)

    def append(self, request_id: Hashable, token_ids: TokenIds) -> AllocationT:
        """Add tokens to a request and allocate the blocks that they need.

        Args:
            request_id: A running request.
            token_ids: The new tokens. While a prompt is allocated in part, its next tokens.

        Returns:
            The allocation of the new tokens: `block_ids` has the fresh blocks, `compute_spans` all new tokens. If other
            requests share the last block, the request gets a copy of it, listed in `copies`.

        Raises:
            OutOfBlocks: There are too few blocks.
            KeyError: The request is unknown.
            ValueError: A token id is out of range, or the tokens are not the next ones of the prompt.
            TypeError: `token_ids` has the wrong type.

        Examples:
            >>> allocation = manager.allocate("a", range(7))
            >>> step = manager.append("a", [7, 8])
            >>> step.compute_spans, step.slot_mapping.tolist(), step.block_ids.tolist()
            ([(7, 9)], [7, 8], [2])
        """
        return self._run(append.append, request_id, encode_tokens(token_ids))

    def append_each(self, request_ids: Sequence[Hashable], token_ids: TokenIds) -> AppendedTokens[SlotsT, PairsT]:
        """Add one token to each of several requests, at a tenth of the cost of `append` for each.

        All earlier tokens must have been computed; they need not be committed.

        Args:
            request_ids: Running requests, without duplicates.
            token_ids: One token for each request.

        Returns:
            (slots, copies): the slot of each new token, [n] int64, and copies like `Allocation.copies`. With several
            groups, one of each for each group. The result also has the attributes `slot_mapping`, `requests`,
            `query_start_loc` and `positions`, from which you can make a `pc.Step`.

        Raises:
            OutOfBlocks: There are too few blocks. No request has got its token.
            KeyError: A request is unknown.
            ValueError: There are not as many tokens as requests, a request is given twice, or a token id is out of
                range. Or a token is not the next one of a prompt that is allocated in part.
            TypeError: `request_ids` or `token_ids` has the wrong type.

        Examples:
            >>> allocations = [manager.allocate(request, range(6)) for request in ("a", "b")]
            >>> slots, copies = manager.append_each(["a", "b"], [7, 8])
            >>> slots.tolist(), copies
            ([6, 14], [])
        """
        new = encode_tokens(token_ids)
        if not isinstance(request_ids, Collection) or isinstance(request_ids, set | frozenset | str):
            raise TypeError(f"request_ids: got {type(request_ids).__name__}, needs a sequence of running requests")
        if len(new) != len(request_ids):
            raise ValueError(f"token_ids: got {len(new)}, needs one for each of {len(request_ids)} requests")
        return self._run(append.append_each, request_ids, new)

    def commit(self, request_id: Hashable, num_tokens: int) -> PairsT:
        """Publish the complete blocks among a request's first `num_tokens` tokens in the prefix cache.

        The KV of all these tokens must have been written.

        Args:
            request_id: A running request.
            num_tokens: Number of tokens from the start of the request. A number below an earlier one publishes nothing.

        Returns:
            (old block, new block) for each block of this request that was replaced by an equal block of another
            request. With several groups, one list for each group. Old blocks are not allocated again before this
            request's next commit, preempt or free.

        Raises:
            KeyError: The request is unknown.
            TypeError: `num_tokens` is not an int.
            ValueError: `num_tokens` is negative, or more than the request has blocks for.

        Examples:
            >>> both = [manager.allocate(request, range(5)) for request in ("a", "b")]  # compute the same prompt
            >>> manager.commit("a", 5)
            []
            >>> manager.commit("b", 5)  # block 0 of "a" replaces block 2 of "b"
            [(2, 0)]
        """
        if type(num_tokens) is not int:
            num_tokens = check_integer("num_tokens", num_tokens)
        return self._run(commit.commit, request_id, num_tokens)

    def checkpoint(self, request_id: Hashable, num_tokens: int, group: int | None = None) -> int:
        """Allocate a block for the state of a recurrent group after a request's first `num_tokens` tokens.

        Write the state to the block before the next commit of that position. The commit publishes it. A later prompt
        that begins with these tokens starts there, if their KV is still cached. `Allocation.junction` is a position
        where a checkpoint pays, or None.

        Args:
            request_id: A running request.
            num_tokens: A multiple of the block size, at most the number of the request's tokens.
            group: Number of the recurrent group. None: the only one.

        Returns:
            The block. A second call before the commit returns the same block.

        Raises:
            OutOfBlocks: All states of the group are held.
            KeyError: The request is unknown.
            TypeError: `num_tokens` is not an int.
            ValueError: The position is not a block boundary, or is past the request's end. Or the request already
                holds a published state of that position. Or the group is not recurrent.

        Examples:
            >>> manager = pc.CacheManager(8, block_size=4, groups=[pc.FullAttention(), pc.Recurrent(num_blocks=4)])
            >>> allocation = manager.allocate("a", range(10))
            >>> block = manager.checkpoint("a", 8)  # write the state after 8 tokens to this block
            >>> merged = manager.commit("a", 10)
            >>> manager.allocate("b", range(10)).num_cached_tokens
            8
        """
        return self._run(commit.checkpoint, request_id, check_integer("num_tokens", num_tokens), group)

    def rollback(self, request_id: Hashable, num_tokens: int) -> None:
        """Remove the last tokens of a request (rejected speculation) and free the blocks that only they needed.

        If a prompt was allocated in part, its remaining tokens are forgotten, unless `num_tokens` is 0.

        Args:
            request_id: A running request.
            num_tokens: Number of tokens to remove.

        Raises:
            KeyError: The request is unknown.
            TypeError: `num_tokens` is not an int.
            ValueError: The request has fewer tokens, or a sliding window would need blocks that were released. Or,
                with a recurrent group, the request would end at a position without a state. It may end at 0, at the
                committed position (the engine keeps that state), or where the request holds a published state.

        Examples:
            >>> allocation = manager.allocate("a", range(6))
            >>> draft = manager.append("a", [6, 7, 8])
            >>> manager.rollback("a", 2)  # the last two were rejected
            >>> manager.num_tokens("a"), len(manager.block_table("a"))
            (7, 2)
        """
        self._run(fork.rollback, request_id, check_integer("num_tokens", num_tokens))

    def fork(self, request_id: Hashable, new_request_id: Hashable) -> None:
        """Start a request that shares all blocks of a running one (parallel sampling, beam search).

        If the last block is partly filled, the request that appends first gets a copy of it, listed in
        `Allocation.copies`. The new request has the priority and ttl of the running one.

        Raises:
            KeyError: The request is unknown.
            ValueError: `new_request_id` is in use, or the request has tokens that are not committed.

        Examples:
            >>> allocation, merged = manager.allocate("a", range(6)), manager.commit("a", 6)
            >>> manager.fork("a", "b")
            >>> manager.append("b", [9]).copies  # "b" gets a copy of the block that both share
            [(1, 2)]
        """
        self._run(fork.fork, request_id, new_request_id)

    def free(self, request_id: Hashable, returns: float | None = None) -> None:
        """End a request, running or preempted. Its complete, committed blocks stay published; the others become free.

        Args:
            request_id: The request.
            returns: Probability that the conversation resumes soon, 0 to 1, if the caller knows something: a tool call
                is pending, or the user has closed the chat. With 0, the policies that use hints (`default`, `priority`)
                evict first the blocks that only this conversation used. None: unknown.

        Raises:
            KeyError: The request is unknown.
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
        """Take a running request's blocks away until `resume`. Its tokens are kept.

        Args:
            request_id: A running request.
            mode: "recompute": KV that is no longer cached at `resume` is computed again. "swap": the KV that later
                queries read goes to host memory. If a group has too few slots, the KV up to the last block boundary
                that fits goes there, and the rest is treated as with "recompute". With a recurrent group, this is
                the last boundary that has a state.

        Returns:
            Pairs (block, host slot) to copy before anything is written. With several groups, one list for each group,
            each with its own slots.

        Raises:
            KeyError: The request is unknown.
            ValueError: The mode is unknown.

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
        """Return the running request to preempt first: of those with the lowest priority, the last that started.

        A resumed request counts as started when it was resumed. Return None if no request is running.

        Examples:
            >>> first, second = manager.allocate("a", range(4)), manager.allocate("b", range(4), priority=1)
            >>> manager.victim()
            'a'
        """
        return self._read(ManagerState.victim)

    def resume(self, request_id: Hashable) -> AllocationT:
        """Give a preempted request blocks again.

        Returns:
            An allocation like that of `allocate`. `loads` lists (host slot, block) to copy before anything is written;
            with several groups, one list for each group. The slots stay in use until this request's next commit,
            preempt or free.

        Raises:
            KeyError: The request is not preempted.
            OutOfBlocks: There are too few blocks. The request stays preempted.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=2, block_size=4, host_blocks=4)
            >>> allocation, merged = manager.allocate("a", range(8)), manager.commit("a", 8)
            >>> pairs = manager.preempt("a", "swap")
            >>> other = manager.allocate("b", range(50, 58))  # evicts the blocks of "a"
            >>> manager.free("b")
            >>> manager.resume("a").loads  # copy these host slots back to these blocks
            [(0, 0), (1, 1)]
        """
        return self._run(swap.resume, request_id)

    def block_table(self, request_id: Hashable, group: int = 0) -> Ids:
        """Return a copy of a running request's block table: [n] int32, in sequence order, -1 where it holds none.

        Raises:
            KeyError: The request is unknown.
            TypeError: `group` is not an int.
            IndexError: The group is unknown.

        Examples:
            >>> allocation = manager.allocate("a", range(9))
            >>> manager.block_table("a")
            array([0, 1, 2], dtype=int32)
        """
        return self._read(ManagerState.table, request_id, check_integer("group", group))

    def num_tokens(self, request_id: Hashable) -> int:
        """Return the number of tokens of a running request that have blocks, whether computed or not.

        Raises:
            KeyError: The request is unknown.

        Examples:
            >>> allocation, step = manager.allocate("a", range(9)), manager.append("a", [9])
            >>> manager.num_tokens("a")
            10
        """
        return len(self._read(ManagerState.get, request_id).tokens)

    def block_hashes(self, request_id: Hashable) -> list[bytes]:
        """Return the hashes of a running request's full blocks, in order, written or not, for a lookup in a lower tier.

        A prompt that is allocated in part has the hashes of all its blocks.

        Raises:
            KeyError: The request is unknown.

        Examples:
            >>> allocation = manager.allocate("a", range(9))
            >>> [key.hex()[:8] for key in manager.block_hashes("a")]
            ['f2ca9d08', 'da4290a1']
        """
        return self._read(ManagerState.block_hashes, request_id)

    def explain(
        self, token_ids: TokenIds, extra_keys: ExtraKeys = None, salt: Key = None, below: Any = None
    ) -> Explanation:
        """Explain how far a prompt is cached, why no further, and what other kinds of reuse would save. Change nothing.

        The time is proportional to the number of remembered tokens and evictions. The manager remembers the latest
        evictions, and the latest tokens, about 16 for each block. It never shows text of another salt.

        Args:
            token_ids: The prompt, as for `allocate`.
            extra_keys: Its keys, as for `allocate`.
            salt: Its salt.
            below: A function that returns whether a lower tier has the block with a hash. Such blocks count as cached.

        Raises:
            ValueError: A token id is out of range.
            TypeError: `token_ids` or keys have the wrong type, or `below` is no function.

        Examples:
            >>> allocation, merged = manager.allocate("a", range(20, 32)), manager.commit("a", 12)
            >>> found = manager.explain([20, 21, 22, 23, 24, 25, 7, 27, 28])
            >>> found.matched, found.reason, found.position, found.there[:2]
            (4, 'token', 6, (26, 27))
        """
        from .observe import explain

        return self._run(explain.explain, encode_tokens(token_ids), encode_keys(extra_keys, salt), below)

    def stats(self) -> CacheStats:
        """Return the counters since the manager was made or reset.

        Examples:
            >>> allocation = manager.allocate("a", range(9))
            >>> manager.stats().held_blocks, manager.stats().hit_rate
            (3, 0.0)
        """
        from .observe.stats import stats

        return self._read(stats)

    def reset(self) -> None:
        """Forget all cached blocks and counters.

        Raises:
            RuntimeError: Requests are running or preempted, or `on_evict` is still saving blocks.

        Examples:
            >>> allocation, merged = manager.allocate("a", range(9)), manager.commit("a", 9)
            >>> manager.free("a")
            >>> manager.reset()
            >>> manager.stats().cached_blocks
            0
        """
        self._run(ManagerState.reset)

    def check(self) -> None:
        """Assert that the state is consistent: free + cached + held = all, each block in one place, counts right.

        Examples:
            >>> allocation = manager.allocate("a", range(9))
            >>> manager.check()
        """
        from .observe.check import check

        self._read(check)

    def _after_fork(self) -> None:
        """Take a new lock in a child process, and undo a verb that another thread of the parent was running."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()
            self._state.undo(False)
            self._state.settle()


def _free(state: ManagerState, request_id: Hashable, returns: float | None) -> None:
    """End a request; see `CacheManager.free`."""
    if request_id in state.preempted:
        del state.preempted[request_id]
        return
    request = state.running.get(request_id) or state.get(request_id)
    state.begin()
    state.release(request_id, request, returns)


def _check_hint(priority: Any, ttl: Any) -> Hint | None:
    """Check a priority and a ttl; return them, or None if they say nothing."""
    hint: Hint = (check_integer("priority", priority, -(1 << 31), 31), ttl)
    if ttl is not None and not isinstance(ttl, Real):
        raise TypeError(f"ttl: got {type(ttl).__name__}, needs seconds or None")
    if ttl is not None and not float(ttl) >= 0:
        raise ValueError(f"ttl: got {ttl}, needs at least 0 seconds")
    return hint if hint[0] or ttl is not None else None


def _refuse_unhashable(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Raise TypeError if a request id among the arguments of a function of the state cannot be hashed."""
    for name, value in zip(function.__code__.co_varnames[1:], args, strict=False):
        for request_id in value if name == "request_ids" else [value] if name.endswith("request_id") else ():
            try:
                hash(request_id)
            except TypeError:  # noqa: PERF203
                raise TypeError(f"{name}: got {type(request_id).__name__}, needs a hashable") from None
