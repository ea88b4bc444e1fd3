"""The cache that transformers' scheduler sees, over a `CacheManager`. Each session has one.

A request gets blocks when its tokens are scheduled. The manager's policy evicts single blocks. Blocks of ended
requests stay published for every later session of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np

from .....cache.allocation import Pairs
from ...admit import PromptRequests
from ...prompts import Prompt
from ...store.kept import PromptStore
from ..packed import PackedSpan

NAME = "full_attention"  # the kind of layer that transformers sees, for blocks of all layers


_numbers = itertools.count()


class ScheduledBlocks:
    """The cache of one session in place of transformers' `PagedAttentionCache`. Only the session's thread calls it.

    It is also the only allocator of its blocks that transformers' buffers and offloading see.
    """

    index = 0  # the next three describe it as an allocator
    layer_type = NAME
    blocks_per_sector = 1
    write_trash_index = read_trash_index = 0
    read_cache_limit = 0  # reads need no index, so no budget and no memory for it
    max_tokens_read = 1
    max_blocks_per_request = 0
    max_decode_fast_path_length = 0

    def __init__(
        self,
        shared: PromptStore,
        keys: Callable[[PromptStore], tuple[str, ...]],
        watch: Callable[[], Callable[[], bool]],
        sharing: bool,
        max_batch_tokens: int,
    ) -> None:
        # `keys` returns a starting request's extra keys. `watch` returns a function that returns whether the model is
        # unchanged since that moment.
        self.shared, self._keys, self._watch = shared, keys, watch
        self._unchanged = watch()
        self.manager, self.storage = shared.manager, shared.storage
        self.num_blocks = min(pool.num_blocks for pool in self.manager.pools)
        self.capacity = self.num_blocks * self.manager.block_size  # tokens of the longest possible request
        self.max_batch_tokens = min(max_batch_tokens, max(self.capacity // 2, 1))
        self.bytes_per_sector = self.bytes_per_block = self.storage.bytes_per_block
        self.tokens_per_page = self.manager.block_size
        self.block_table: dict[str, list[int]] = {}  # of transformers' own blocks, which do not exist here
        self.use_prefix_sharing = self.allow_block_sharing = sharing
        self.pool = SimpleNamespace(try_to_free_sectors=lambda: None)  # transformers' sectors do not exist here
        self.waiting: dict[str, Any] = {}  # waiting requests of transformers' scheduler
        # Requests of the current schedule: without room, with room, and new ones.
        self.refused: list[Any] = []
        self.scheduled: set[Hashable] = set()
        self.arrived: set[str] = set()
        self._held: dict[str, Prompt] = {}  # admitted requests; a fork has no allocation
        self._deferred: set[str] = set()
        self._spans: list[PackedSpan] = []
        self._copies: list[tuple[int, Pairs]] = []
        self.number = next(_numbers)  # the first word of its requests' ids

    @property
    def cache_allocators(self) -> dict[str, ScheduledBlocks]:
        """The allocators, by kind of layer. Not an attribute: a cycle would keep interrupted requests alive."""
        return {NAME: self}

    def look(self) -> None:
        """Stop publishing for running requests if the model has changed. Called before and after each pass."""
        if not self._unchanged():
            self._unchanged = self._watch()
            for prompt in self._held.values():
                prompt.owner.stale = True  # nothing more is published

    def begin(self) -> None:
        """Start a schedule."""
        self.look()
        self.shared.sweep()  # blocks of deleted sessions
        self.scheduled.clear()
        self.refused.clear()
        self.arrived.clear()
        self._deferred.clear()
        self._spans = []

    def take_step(self) -> tuple[list[PackedSpan], list[tuple[int, Pairs]]]:
        """Return the spans of the prepared batch, and the block copies that must run before it."""
        spans, copies = self._spans, self._copies
        self._spans, self._copies = [], []
        return spans, copies

    def others_hold(self) -> bool:
        """Return whether other sessions hold blocks that this session does not hold."""
        tables = [prompt.blocks.tables for prompt in self._held.values()]
        mine = {(group, block) for own in tables for group, table in enumerate(own) for block in table.tolist()}
        return bool(self.manager.stats().held_blocks > sum(block >= 0 for _, block in mine))

    def is_first(self) -> bool:
        """Return whether this session has requests and none with a lower number has. It goes first if all are stuck."""
        running = [ids for owner, ids in list(self.shared.running.items()) if owner() is not None]
        return self.number == min((int(name.partition(" ")[0]) for ids in running for name in ids), default=-1)

    def let_go(self) -> None:
        """Free the blocks that waiting requests hold, because the session with the lowest number may need them."""
        for request_id in [request_id for request_id in self._held if request_id in self.waiting]:
            self._take_back(request_id)

    # The interface for the scheduler, in the order of a request's life.

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Start a request with the cached blocks of its prompt and return the number of cached tokens.

        At least one token of the prompt remains to be computed.
        """
        self._take_back(request_id)
        allocation: Any = self._start(self.waiting[request_id], prompt_ids).allocation
        if (
            allocation.wait_for in self.scheduled
        ):  # a request of this step computes the prompt's next block, so this one waits
            self._take_back(request_id)
            self._deferred.add(request_id)
            return 0
        return int(allocation.num_cached_tokens)

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Allocate blocks for a request's next tokens. Return False if there are too few."""
        if dry_run:
            needed = self.needs_new_blocks(state.request_id, state.current_len(), request_len)
            return self.count_storable_requests([{NAME: needed}]) == 1
        if state.request_id in self._deferred:
            return False
        if state.request_id not in self._held:
            self._start(state, state.initial_tokens)
        blocks = self._held[state.request_id].blocks
        if not blocks.hold(_tokens(state, blocks.held, state.current_len() + request_len)):
            self.refused.append(state)
            return False
        self._copies += blocks.copies
        blocks.copies = []
        self.scheduled.add(blocks.request_id)
        return True

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Return a dictionary that is not empty, so that `mark_complete_blocks` is called for every request."""
        return {NAME: 1}

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Add a request to the step. `pack` computes the slots of all requests together."""
        self._spans.append((self._held[request_id].blocks, past_length, query_length))

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Publish the complete blocks of a request."""
        prompt = self._held.get(state.request_id)
        if prompt is not None and not prompt.owner.stale:
            blocks, length = prompt.blocks, state.current_len()
            if any(self.manager.commit(blocks.request_id, length)):
                # The step that read the replaced blocks has ended, and a second commit frees them at once.
                self.manager.commit(blocks.request_id, length)
            blocks.look()

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: dict[str, tuple[list[int], list[int]]]
    ) -> list[str]:
        """Fork a request: start requests that share all of its blocks. The first write to a shared block copies it."""
        prompt, length = self._held[src_state.request_id], src_state.current_len()
        blocks = prompt.blocks
        if blocks.held > length:
            self.manager.rollback(blocks.request_id, blocks.held - length)
            blocks.held, blocks.known = length, min(blocks.known, length)
            blocks.look()
        for request_id in dst_req_ids:
            fork = copy(prompt)
            fork.request_id, fork.allocation = f"{self.number} {request_id}", None
            fork.blocks = prompt.owner.branch(blocks, fork.request_id)
            self._held[request_id] = fork
        return list(dst_req_ids)

    def perform_cache_copy(self, copy_src_and_dst: dict[str, tuple[list[int], list[int]]]) -> None:
        """Do nothing, because blocks are copied at the first write."""

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """End a request, if it was started. Its complete blocks stay published in every case."""
        prompt = self._held.pop(request_id, None)
        if prompt is not None:
            prompt.owner.end(prompt.request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """End every request of the session."""
        for request_id in list(self._held):
            self.free_blocks(request_id)

    def reset(self) -> None:
        """End every request of the session. Cached blocks stay."""
        self.free_all_requests()
        self.begin()

    # How full the cache is.

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Return the most blocks per group that a request's next tokens need, including one for a copy."""
        prompt, size = self._held.get(request_id), self.manager.block_size
        have = 0 if prompt is None else -(-prompt.blocks.held // size)
        return max(-(-(past_length + query_length) // size) - have, 0) + 1

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Return the length of a request at the end of a step."""
        return past_length + query_length

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Return how many of the requests, in order, have room."""
        room = min(pool.available for pool in self.manager.pools)
        for count, needed in enumerate(list_blocks_needed):
            room -= needed[NAME]
            if room < 0:
                return count
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Return the share, or the number, of blocks that can be allocated in the fullest group."""
        return min(pool.available / (pool.num_blocks if relative else 1) for pool in self.manager.pools)

    def evict_cached_blocks(self) -> bool:
        """Return False: cached blocks are evicted one by one when a request needs them."""
        return False

    def _start(self, state: Any, prompt_ids: list[int]) -> Prompt:
        """Admit a request's prompt and return it."""
        keys: tuple[Any, ...] = self._keys(self.shared)
        if not self.use_prefix_sharing:
            keys = (*keys, f"alone {self.number} {state.request_id}")
        requests = PromptRequests(self.shared, keys, getattr(state, "salt", None))
        prompt = Prompt(f"{self.number} {state.request_id}", np.array(prompt_ids, np.int64), 0, [0])
        requests.admit(prompt)
        prompt.owner, self._held[state.request_id] = requests, prompt
        return prompt

    def _take_back(self, request_id: str) -> None:
        """Cancel the search of a request that got no room for its first token."""
        prompt = self._held.get(request_id)
        if prompt is not None:
            if prompt.allocation is not None:
                self.shared.subtract(1, len(prompt.tokens), prompt.allocation.num_cached_tokens)
            self.free_blocks(request_id)


def _tokens(state: Any, start: int, end: int) -> list[int]:
    """Return a request's tokens at positions `start` to `end`, from its prompt and answer."""
    prompt: list[int] = state.initial_tokens
    tokens = prompt[start:end]
    if end > len(prompt):
        tokens = tokens + state.generated_tokens[max(start - len(prompt), 0) : end - len(prompt)]
    return tokens
