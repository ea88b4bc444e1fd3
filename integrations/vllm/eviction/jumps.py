"""Prefill that jumps over cached blocks after a gap, and over text that moved (`moved`).

vLLM reuses only a leading run of cached blocks. If blocks in between were evicted, the later runs are pinned when the
request is admitted. Their KV is exact, because a block's hash covers all tokens before it. The request's chunk ends
where the gap ends, and the next step continues after the run. A worker only sees a request with more computed tokens.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

from ..api import (
    KVCacheBlocks,
    NewRequestData,
    RequestStatus,
    find_cached,
    group_ending,
    logger,
    token_ids,
)
from ..reasons import chain_reasons, clipping_reasons, first_reason
from ..scheduler_output import slots_of
from .moved import MIN_TOKENS, Contents, CopiedSpan, moved_from


class Jumps:
    """The parts of prompts that requests jump over: later runs of cached blocks, and text that is cached elsewhere.

    The blocks of these parts are pinned, with one more reference each, from the request's admission on. For a run, the
    request's block table takes over the references. For moved text, they are dropped when the step that copies the text
    is sent. When the request ends, its other pinned blocks are released.
    """

    def __init__(self, scheduler: Any, cannot_move: str) -> None:
        self.cannot_move = cannot_move
        """Why text that moved is not reused, or ""."""
        self._cache = scheduler.kv_cache_manager
        self._manager = self._cache.coordinator.single_type_managers[0]
        self._pool = self._cache.block_pool
        self._group = group_ending(self._manager.kv_cache_group_id)
        self._size = self._manager.block_size
        self._min_blocks = -(-MIN_TOKENS // self._size)
        self._max_model_len = scheduler.max_model_len
        self._requests = scheduler.requests
        self._sends_anew = scheduler.use_v2_model_runner
        self._allocate_slots = self._cache.allocate_slots
        self.contents = Contents(self._pool, self._size)
        self._planned: tuple[Any, dict[int, Any], list[CopiedSpan]] | None = None
        self.pinned: dict[str, dict[int, Any]] = {}
        """The blocks that each request will jump over, by their place in its block table, ascending."""
        self.pieces: dict[str, list[CopiedSpan]] = {}
        """The text that each request will skip because it is cached elsewhere, ascending."""
        self._moving: dict[str, list[CopiedSpan]] = {}  # pieces to copy in the next step
        self._unsent: dict[str, list[Any]] = {}  # blocks added by jumps that no worker knows yet
        self.counts: dict[str, int] = scheduler.counts

    def follow(self) -> None:
        """Index the text of blocks from now on, or log why text that moved is not reused."""
        if self.cannot_move:
            logger.warning_once("text that moved is not reused under %s", self.cannot_move)
        else:
            self.contents.follow()

    def plan(self, request: Any, num_computed: int, anywhere: bool = False) -> bool:
        """Find a request's later runs and, with `anywhere`, its moved text; return whether there is any.

        `allocate` pins these blocks when vLLM admits the request.
        """
        self._planned = None
        if self._cache.prefix_cache_lookup_enabled(request):
            first, rest = divmod(num_computed, self._size)
            # After a jump, runner V2 gets the request as a new one, which would lack the media of computed tokens.
            runs = {} if rest or (self._sends_anew and request.mm_features) else self._later_runs(request, first)
            pieces = self.contents.find(request, num_computed, runs) if anywhere else []
            self._planned = (request, runs, pieces) if runs or pieces else None
        return self._planned is not None

    def _planned_for(self, request: Any) -> tuple[dict[int, Any], list[CopiedSpan]]:
        """Return the planned runs and moved text of a request, if `plan` was called for it last."""
        planned = self._planned
        return planned[1:] if planned is not None and planned[0] is request else ({}, [])

    def clip(self, request: Any, num_computed: int, num_new: int) -> int:
        """Return the number of tokens of a chunk that come before the next run or piece."""
        runs, pieces = self._planned_for(request)
        runs = runs or self.pinned.get(request.request_id, {})
        pieces = pieces or self.pieces.get(request.request_id, [])
        ends: list[int] = [number * self._size for number in [*runs][:1]] + [piece.begin for piece in pieces[:1]]
        return min(num_new, *(end - num_computed for end in ends)) if ends else num_new

    def _later_runs(self, request: Any, first: int) -> dict[int, Any]:
        """Return the runs of cached blocks after the uncached block `first` and before the last token's block."""
        found: dict[int, Any] = {}
        run: dict[int, Any] = {}
        for number in range(first, self._num_reachable(request)):
            block = self._cached(request, number)
            if block is not None:
                run[number] = block
            elif run:
                found, run = self._with_run(found, run), {}
        return self._with_run(found, run)

    def _with_run(self, found: dict[int, Any], run: dict[int, Any]) -> dict[int, Any]:
        """Return the found runs with one more, if it is long enough."""
        return found | run if len(run) >= self._min_blocks else found

    def _num_reachable(self, request: Any) -> int:
        """Return how many of a request's first blocks a jump may reach: not the block of the last token."""
        count: int = min(len(request.block_hashes), (request.num_tokens - 1) // self._size)
        return count

    def _cached(self, request: Any, number: int) -> Any:
        """Return the cached block with the content of a request's block, or None."""
        return find_cached(self._pool, request.block_hashes[number] + self._group)

    def allocate(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Allocate slots, in place of vLLM's method.

        Pin planned runs, and the source blocks of pieces that fit. Add blocks of past jumps to the result.
        """
        runs, found = self._planned_for(request)
        self._planned = None
        pieces = self._fitting(request, list(runs.values()), found, **kwargs) if found else []
        for piece in pieces:
            self._pool.touch(piece.blocks)
        new = self._allocate(request, runs, num_new_tokens, *args, **kwargs)
        if new is None:
            self._unpin(pieces)
        elif pieces:
            self.pieces[request.request_id] = pieces
        return new

    def _fitting(self, request: Any, runs: list[Any], found: list[CopiedSpan], **kwargs: Any) -> list[CopiedSpan]:
        """Return the first pieces whose sources fit next to the whole request and the blocks of its runs."""
        room, held = self._room(request, runs, **kwargs), set(map(id, runs))
        for count, piece in enumerate(found):
            room -= sum(block.ref_cnt == 0 and id(block) not in held for block in piece.blocks)
            if room < 0:
                return found[:count]
            held.update(map(id, piece.blocks))
        return found

    def _allocate(self, request: Any, runs: dict[int, Any], num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Pin the runs of a request if all of them fit, and return its new blocks."""
        if runs:
            blocks = list(runs.values())
            if not kwargs.get("full_sequence_must_fit") or self._room(request, blocks, **kwargs) >= 0:
                # Pin the runs first. Otherwise the pool could evict them for the gap's new blocks.
                self._pool.touch(blocks)
                given = kwargs | {"full_sequence_must_fit": False}
                new = self._allocate_slots(request, num_new_tokens, *args, **given)
                if new is not None:
                    self.pinned[request.request_id] = runs
                    return new
                self._pool.free_blocks(reversed(blocks))
        new = self._allocate_slots(request, num_new_tokens, *args, **kwargs)
        unsent = self._unsent.get(request.request_id)
        if new is not None and unsent and not self._sends_anew and request.status == RequestStatus.RUNNING:
            return KVCacheBlocks(([*unsent, *new.blocks[0]],))
        return new

    def _unpin(self, pieces: list[CopiedSpan]) -> None:
        """Release the source blocks of pieces."""
        for piece in pieces:
            self._pool.free_blocks(reversed(piece.blocks))

    def _room(self, request: Any, blocks: list[Any], **kwargs: Any) -> int:
        """Return how many blocks a whole request leaves free. vLLM's own check would count pinned blocks twice."""
        lead = kwargs["new_computed_blocks"].blocks[0]
        need = -(-min(request.num_tokens, self._max_model_len) // self._size)
        need -= sum(block.ref_cnt > 0 for block in (*lead, *blocks))
        need += self._cache.watermark_blocks if kwargs.get("has_scheduled_reqs", True) else 0
        return int(self._pool.get_num_free_blocks() - need)

    def start_step(self) -> None:
        """Let requests jump over runs and pieces if all tokens before them are computed or in the running step."""
        for name, pins in list(self.pinned.items()):
            self._jump(self._requests[name], pins)
            if not pins:
                del self.pinned[name]
        self.contents.enter_published()
        for name, pieces in list(self.pieces.items()):
            self._move(self._requests[name], pieces)
            if not pieces:
                del self.pieces[name]

    def _move(self, request: Any, pieces: list[CopiedSpan]) -> None:
        """Let a request skip the piece at its position, which workers then copy."""
        name, (begin, end, *_) = request.request_id, pieces[0]
        if request.num_computed_tokens != begin:
            return
        if begin // self._size < moved_from(request):
            self._rename(request, begin // self._size)
        request.num_computed_tokens = end
        self._moving.setdefault(name, []).append(pieces.pop(0))
        self._unsent.setdefault(name, [])
        self._count("moved_tokens", request, end - begin)

    def _rename(self, request: Any, number: int) -> None:
        """Replace the hashes of block `number` of a request and of all later blocks by hashes that no prompt has."""
        exact = request.block_hashes[number]
        request.block_hashes[number:] = [sha256(b"pc.moved" + exact).digest()[: len(exact)]]
        request.update_block_hashes()
        request.pc_moved_from = number

    def _jump(self, request: Any, pins: dict[int, Any]) -> None:
        """Let a request skip the cached run at its position: add the blocks to its table, and count the tokens."""
        begin, rest = divmod(request.num_computed_tokens, self._size)
        table, name = self._manager.req_to_blocks[request.request_id], request.request_id
        if rest or len(table) < begin:  # fewer blocks: the step that copies moved text has not been scheduled yet
            return
        assert len(table) == begin <= next(iter(pins))
        taken: list[Any] = []
        pieces = self.pieces.get(name)  # a jump past the beginning of a piece would leave it behind
        end = pieces[0].begin // self._size if pieces else self._num_reachable(request)
        for number in range(begin, end):
            block = pins.pop(number, None)
            if block is None:  # another request may have filled it since
                block = self._cached(request, number)
                if block is None:
                    break
                self._pool.touch([block])
            taken.append(block)
        if not taken:
            return
        table += taken
        self._manager.num_cached_block[name] = len(table)
        request.num_computed_tokens = len(table) * self._size
        self._unsent.setdefault(name, []).extend(taken)
        self._count("jumped_tokens", request, len(taken) * self._size)

    def _count(self, counter: str, request: Any, tokens: int) -> None:
        """Count tokens that a request skips, and count them as cached in vLLM's statistics."""
        self.counts[counter] += tokens
        stats, prefill = self._cache.prefix_cache_stats, request.prefill_stats
        if request.num_preemptions:
            return
        if prefill is not None:
            prefill.num_local_cached_tokens += tokens
            prefill.num_cached_tokens += tokens
            prefill.num_computed_tokens -= tokens
        if stats is not None:
            stats.hits += tokens

    def finish_step(self, output: Any) -> None:
        """Record which blocks were sent, and name the slots that workers copy and rotate.

        Requests that have jumped are sent to runner V2 as new requests.
        """
        for name in self._unsent.keys() & output.num_scheduled_tokens.keys():
            del self._unsent[name]
            if self._sends_anew:  # runner V2 counts computed tokens itself, and reads the count of a new request only
                self._send_anew(output, self._requests[name])
        moves = []
        for name in self._moving.keys() & output.num_scheduled_tokens.keys():
            pieces = self._moving.pop(name)
            table = [block.block_id for block in self._manager.req_to_blocks[name]]
            for piece in pieces:
                targets = slots_of(table, self._size, piece.begin, piece.end - piece.begin)
                moves.append((piece.slots, targets, piece.deltas))
            self._unpin(pieces)  # their next owner writes to them in a later step
        if moves:
            output.pc_moves = moves

    def _send_anew(self, output: Any, request: Any) -> None:
        """Replace a request's part of the step by a new request, with all of its blocks and computed tokens."""
        cached = output.scheduled_cached_reqs
        at = cached.req_ids.index(request.request_id)
        blocks = self._cache.get_block_ids(request.request_id)
        whole = NewRequestData.from_request(request, blocks, token_ids(request))
        output.scheduled_new_reqs.append(replace(whole, num_computed_tokens=cached.num_computed_tokens[at]))
        for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens):
            del column[at]

    def release(self, request: Any) -> None:
        """Unpin the blocks and sources of a request that is preempted or has ended."""
        name = request.request_id
        self._unsent.pop(name, None)
        pins = self.pinned.pop(name, None)
        if pins:
            self._pool.free_blocks(reversed(pins.values()))
        self._unpin(self.pieces.pop(name, []) + self._moving.pop(name, []))


def why_no_jumps(scheduler: Any) -> str:
    """Return why jumps over gaps are impossible in an engine, or ""."""
    own = {
        "fixed chunks": scheduler.chunks is not None,
        "no prefix caching": not scheduler.kv_cache_manager.enable_caching,
    }
    return first_reason(own | chain_reasons(scheduler) | clipping_reasons(scheduler))
