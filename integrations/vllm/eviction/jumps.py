"""Prefill that jumps over what is cached behind a gap: exact KV, since vLLM's hash of a block covers all before it.

vLLM takes a leading run of cached blocks alone. Where blocks in between are gone, a request's later runs are pinned
when it is admitted; its chunk ends where the gap does, and the step after goes on behind the run. A worker sees a
request that has computed more than it was told to, and needs no code of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from ..reasons import clipping_reasons, first_reason

MIN_TOKENS = 64
"""Of a run that is worth a jump: it ends a chunk, so it may cost a step, which takes as long as 38 tokens of prefill
where SmolLM2 runs on a CPU (results/cpu/vllm_cpu.csv); beside steps of other requests it costs nothing."""


class GapJumps:
    """Later runs of cached blocks, by request: pinned from admission on, joined to its table as it comes to them.

    A block is pinned by a reference of its own, which goes over to the table, or is given back with the request.
    """

    def __init__(self, scheduler: Any) -> None:
        self._cache = scheduler.kv_cache_manager
        self._manager = self._cache.coordinator.single_type_managers[0]
        self._pool = self._cache.block_pool
        self._group = make_block_hash_with_group_id(b"", self._manager.kv_cache_group_id)
        self._size = self._manager.block_size
        self._min_blocks = -(-MIN_TOKENS // self._size)
        self._max_model_len = scheduler.max_model_len
        self._requests = scheduler.requests
        self._sends_anew = scheduler.use_v2_model_runner
        self._allocate_slots = self._cache.allocate_slots
        self._planned: tuple[Any, dict[int, Any], list[Any]] | None = None
        self.pinned: dict[str, dict[int, Any]] = {}
        """By request the blocks that it will jump over, by their place in its table, ascending."""
        self._unsent: dict[str, list[Any]] = {}
        self.num_jumped_tokens = self.num_moved_tokens = 0

    @property
    def is_busy(self) -> bool:
        """Whether a chunk of a request that runs may have to be clipped."""
        return bool(self.pinned)

    def holds(self) -> Iterator[Any]:
        """Blocks that are pinned, as often as they are."""
        for pins in self.pinned.values():
            yield from pins.values()

    def plan(self, request: Any, num_computed: int, anywhere: bool = False) -> bool:
        """Whether a request that is about to be admitted has later runs, or moved text, which `allocate` then pins."""
        self._planned = None
        if self._cache.prefix_cache_lookup_enabled(request):
            first, rest = divmod(num_computed, self._size)
            # Media are sent to runner V2 with a new request alone, and stripped by what it has computed.
            runs = {} if rest or (self._sends_anew and request.mm_features) else self._behind(request, first)
            pieces = self.find_moved(request, num_computed, runs) if anywhere else []
            self._planned = (request, runs, pieces) if runs or pieces else None
        return self._planned is not None

    def find_moved(self, request: Any, num_computed: int, runs: dict[int, Any]) -> list[Any]:
        """Text behind a hit that is cached elsewhere, between later runs; here none is looked for."""
        return []

    def _planned_for(self, request: Any) -> tuple[dict[int, Any], list[Any]]:
        """Later runs and moved text of a request, if it is the one that is about to be admitted."""
        planned = self._planned
        return planned[1:] if planned is not None and planned[0] is request else ({}, [])

    def clip(self, request: Any, num_computed: int, num_new: int) -> int:
        """What of a chunk lies in front of the next run."""
        runs = self._planned_for(request)[0] or self.pinned.get(request.request_id)
        return min(num_new, next(iter(runs)) * self._size - num_computed) if runs else num_new

    def _behind(self, request: Any, first: int) -> dict[int, Any]:
        """Cached blocks from block number `first` on, which is not; the last token is always computed."""
        found: dict[int, Any] = {}
        run: dict[int, Any] = {}
        for number in range(first, self._last(request)):
            block = self._cached(request, number)
            if block is not None:
                run[number] = block
            elif run:
                found, run = self._with_run(found, run), {}
        return self._with_run(found, run)

    def _with_run(self, found: dict[int, Any], run: dict[int, Any]) -> dict[int, Any]:
        return found | run if len(run) >= self._min_blocks else found

    def _last(self, request: Any) -> int:
        """Blocks that may be jumped over, counted from a request's first."""
        last: int = min(len(request.block_hashes), (request.num_tokens - 1) // self._size)
        return last

    def _cached(self, request: Any, number: int) -> Any:
        return self._pool.cached_block_hash_to_block.get_one_block(request.block_hashes[number] + self._group)

    def allocate(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """In place of vLLM's `allocate_slots`: pins what was planned, and puts what was jumped over in front."""
        runs, _ = self._planned_for(request)
        self._planned = None
        if runs:
            blocks = list(runs.values())
            if not kwargs.get("full_sequence_must_fit") or self._room(request, blocks, **kwargs) >= 0:
                # Before the gap's blocks are taken, which could be these.
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

    def _room(self, request: Any, blocks: list[Any], **kwargs: Any) -> int:
        """Blocks that stay free beside a whole request: vLLM's check would count what is pinned as taken and needed."""
        lead = kwargs["new_computed_blocks"].blocks[0]
        need = -(-min(request.num_tokens, self._max_model_len) // self._size)
        need -= sum(block.ref_cnt > 0 for block in (*lead, *blocks))
        need += self._cache.watermark_blocks if kwargs.get("has_scheduled_reqs", True) else 0
        return int(self._pool.get_num_free_blocks() - need)

    def start_step(self) -> None:
        """Takes requests that have computed a gap, or will have in the step before, to behind the run."""
        for name, pins in list(self.pinned.items()):
            self._jump(self._requests[name], pins)
            if not pins:
                del self.pinned[name]

    def _jump(self, request: Any, pins: dict[int, Any]) -> None:
        begin, rest = divmod(request.num_computed_tokens, self._size)
        if rest:
            return
        table, name = self._manager.req_to_blocks[request.request_id], request.request_id
        assert len(table) == begin <= next(iter(pins))
        taken: list[Any] = []
        for number in range(begin, self._last(request)):
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
        self.num_jumped_tokens += len(taken) * self._size
        self._count(request, len(taken) * self._size)

    def _count(self, request: Any, tokens: int) -> None:
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
        """Counts what was sent, and sends requests of the step that have jumped to runner V2 as new ones."""
        for name in self._unsent.keys() & output.num_scheduled_tokens.keys():
            del self._unsent[name]
            if self._sends_anew:  # it counts computed tokens by itself, and takes a count of a new request alone
                self._send_anew(output, self._requests[name])

    def _send_anew(self, output: Any, request: Any) -> None:
        cached = output.scheduled_cached_reqs
        at = cached.req_ids.index(request.request_id)
        blocks = self._cache.get_block_ids(request.request_id)
        whole = NewRequestData.from_request(request, blocks, request._all_token_ids)
        output.scheduled_new_reqs.append(replace(whole, num_computed_tokens=cached.num_computed_tokens[at]))
        for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens):
            del column[at]

    def release(self, request: Any) -> None:
        """A request is preempted or has ended."""
        self._unsent.pop(request.request_id, None)
        pins = self.pinned.pop(request.request_id, None)
        if pins:
            self._pool.free_blocks(reversed(pins.values()))


def why_no_jumps(scheduler: Any) -> str:
    """What of an engine makes jumps over gaps impossible, or ""."""
    encodes = {"an encoder": scheduler.is_encoder_decoder or scheduler.ec_connector is not None}
    return why_not_one_chain(scheduler) or first_reason(encodes | clipping_reasons(scheduler))


def why_not_one_chain(scheduler: Any) -> str:
    """What of an engine's cache is more than one chain of blocks, or ""."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    reasons = {
        "no prefix caching": not scheduler.kv_cache_manager.enable_caching,
        "several groups of layers, windows or states": [type(each) for each in managers] != [FullAttentionManager],
        "blocks of another size than their hashes": managers[0].block_size != scheduler.hash_block_size,
    }
    return first_reason(reasons)
