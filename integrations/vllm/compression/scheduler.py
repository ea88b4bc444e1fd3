"""Compression in vLLM's scheduler: when a prompt is compressed, and which blocks hold the tokens that stay.

When a prompt has been computed, its best tokens are packed into a few blocks at the front of the request's block table.
Null blocks fill the rest of the prompt's places, and the other blocks are freed. Positions, slots and rotary embeddings
do not change. The worker packs the tokens before the forward pass of the same step, and leaves the null blocks out of
the tables that attention reads.

If only a part of a prompt is compressed, its packed blocks may be published under keys made of its tokens and the
options. Later requests then hit them like a cached prefix.

The prompt of a preempted request is computed and compressed again. Exact blocks of a prompt are published as usual.
Blocks that were computed after a compressed prompt are never published.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from ...presses import QUERIES, WINDOW
from ..api import (
    KVCacheBlocks,
    SchedulingPolicy,
    find_cached,
    logger,
    make_block_hash_with_group_id,
    preempt,
    token_ids,
)
from ..reasons import asks_for_rows, chain_reasons, clipping_reasons, first_reason, replays_whole_steps
from .options import ASKED, CompressionOptions


class Packing(NamedTuple):
    """Work of a worker before a step: pack the kept tokens of a request's prompt from `sources` into `targets`.

    Attributes:
        request_id: The request whose block table changes.
        press: The press that scores tokens.
        tokens: Number of first tokens of the prompt, which the press scores.
        sources: The prompt's whole blocks. In the table, `targets` and then null blocks replace them.
        targets: Blocks for the kept tokens. Some may be among `sources`.
        tail: The block with the scored tokens after `sources`, which stay in place. None: there are none.
        peer: None: the worker packs the tokens now. Otherwise `targets` already hold them, and only the table changes:
            `peer` is the request that packed these blocks, or "" if they were found in the cache.
        by_head: Whether each KV head has its own number of blocks.
    """

    request_id: str
    press: str
    tokens: int
    sources: list[int]
    targets: list[int]
    tail: int | None
    peer: str | None
    by_head: bool


@dataclass
class PromptPlan:
    """A plan for one request: the part of its prompt that is compressed, and how much of it stays.

    Attributes:
        options: The options of the request.
        tokens: Number of first tokens of the prompt, which the press scores.
        whole: Number of whole blocks of these tokens, which are compressed.
        keep: Number of packed blocks that replace them.
        name: An identity: requests with equal names keep the same tokens.
        keys: The keys of shared packed blocks; [] if they are not shared.
        state: "waiting" until the prompt has been computed, then "compressed", or "exact" if compression frees no
            block. "found" from a hit of packed blocks until the request holds them.
        is_compressed: Whether the prompt was compressed (True) or stays exact (False), also after a preemption. None:
            not decided yet.
    """

    options: CompressionOptions
    tokens: int
    whole: int
    keep: int
    name: tuple[Any, ...]
    keys: list[bytes]
    state: str = "waiting"
    is_compressed: bool | None = None

    def stay_exact(self) -> bool:
        """Choose the exact prompt. Return True, because the request can continue at once."""
        self.state, self.is_compressed = "exact", False
        return True


@dataclass
class Compression:
    """The compression of prompts in one scheduler, used if `why_no_compression` gives no reason against it.

    Attributes:
        plans: The plan of each request that asked for compression, by its id.
        freed: Hashes of the exact blocks that compression dropped, the latest last, at most as many as the pool has
            blocks.
    """

    scheduler: Any
    plans: dict[str, PromptPlan] = field(default_factory=dict)
    freed: dict[bytes, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts: dict[str, int] = self.scheduler.counts
        self._cache = self.scheduler.kv_cache_manager
        self._manager = self._cache.coordinator.single_type_managers[0]
        self._pool = self._cache.block_pool
        self._size: int = self._manager.block_size
        self._peers: defaultdict[tuple[Any, ...], dict[str, PromptPlan]] = defaultdict(dict)
        self._packings: list[Packing] = []
        self._stalled: list[Any] = []
        self._stuck_steps = 0  # the last steps, in which nothing ran and some requests waited for blocks
        config = self.scheduler.vllm_config
        self._captures = replays_whole_steps(config.compilation_config, config.device_config.device_type)
        coordinator = self._cache.coordinator
        self._find, self._publish = self._cache.get_computed_blocks, coordinator.cache_blocks
        self._cache.get_computed_blocks, coordinator.cache_blocks = self.find, self.publish

    def add(self, request: Any, options: CompressionOptions) -> None:
        """Plan the compression of a new request, or log once why it stays exact."""
        size, prompt = self._size, request.num_prompt_tokens
        tokens = prompt
        if options.until is not None and options.until < prompt:
            tokens = options.until // size * size
        whole = tokens // size
        keep = math.ceil(options.budget * whole - 1e-9)
        reasons = refusals(request) | {
            f"budgets below {WINDOW} tokens": keep * size < WINDOW,
            "budgets by head beside full CUDA graphs": options.heads == "ada" and self._captures,
        }
        if reason := first_reason(reasons):
            logger.warning_once("%s: the request stays exact; not served: %s", ASKED, reason)
        elif keep < whole:
            rest = tuple(token_ids(request)[whole * size : tokens])
            name = (request.block_hashes[whole - 1], rest, options) if request.block_hashes else (request.request_id,)
            asks = options.until is not None and options.heads == "same" if options.share is None else options.share
            keys = self._keys(name, keep) if asks and request.block_hashes and tokens < prompt else []
            plan = PromptPlan(options, tokens, whole, keep, name, keys)
            self.plans[request.request_id] = self._peers[name][request.request_id] = plan

    def _keys(self, name: tuple[Any, ...], keep: int) -> list[bytes]:
        """Return the keys of a plan's packed blocks, made of the text, the options, and the place of each block."""
        text, _, options = name
        group = self._manager.kv_cache_group_id
        digests = (sha256(bytes(text) + repr((options, place)).encode()).digest() for place in range(keep))
        return [make_block_hash_with_group_id(digest, group) for digest in digests]

    def find(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the cached blocks of a request, in place of vLLM's own method.

        A hit ends before the queries that presses read. They are always computed, so the tokens that stay do not depend
        on the cache. Blocks after the compressed text are no hits either, because other requests may have computed them
        from the exact prompt.
        """
        blocks, count, *rest = self._find(request, *args, **kwargs)
        plan = self.plans.get(request.request_id)
        if plan is not None:
            if plan.state != "exact" and self._cache.prefix_cache_lookup_enabled(request):
                packed = self._shared(plan)
                plan.state = "waiting" if packed is None else "found"
                if packed is not None:
                    nulls = [self._pool.null_block] * (plan.whole - plan.keep)
                    return KVCacheBlocks(([*packed, *nulls],)), plan.tokens, *rest
            limit = max(plan.tokens - max(QUERIES[plan.options.press], WINDOW), 0) // self._size
            if count > limit * self._size:
                blocks, count = KVCacheBlocks((list(blocks.blocks[0])[:limit],)), limit * self._size
        return blocks, count, *rest

    def _shared(self, plan: PromptPlan) -> list[Any] | None:
        """Return the shared packed blocks of a plan if all are cached, else None."""
        found = [find_cached(self._pool, key) for key in plan.keys]
        return None if None in found or not found else found

    def publish(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Publish a request's blocks, in place of vLLM's own method; not the blocks after a compressed prompt."""
        plan = self.plans.get(request.request_id)
        if plan is None or plan.state not in ("found", "compressed"):
            self._publish(request, *args, **kwargs)
        elif plan.state == "found":
            self._count_compressed(request, plan)

    def _count_compressed(self, request: Any, plan: PromptPlan) -> None:
        """Record and count that a request holds packed blocks now."""
        plan.state, plan.is_compressed = "compressed", True
        self.counts["compressed_requests"] += 1
        self.counts["recompressed_requests"] += request.num_preemptions > 0

    def clip(self, request: Any, num_computed: int, num_new: int) -> int:
        """Return the number of tokens that a request may compute in this step, at most `num_new`.

        A chunk ends at the end of the compressed text. The prompt is compressed before the next chunk. While the
        pool has too few blocks for the packed tokens, the request computes nothing. Beside CUDA graphs of whole steps,
        no chunk with queries that a press reads has a single token. While no request runs, an answer that has begun
        after a compressed prompt is resumed only if the pool has room for the packed blocks and all tokens after them,
        because sessions that share the prompt's exact blocks may keep them.
        """
        plan = self.plans[request.request_id]
        if plan.state != "waiting":
            return num_new  # it has packed blocks, or stays exact
        resumes_alone = request.num_computed_tokens == 0 and not self.scheduler.running  # else others would overtake it
        if resumes_alone and plan.is_compressed and self._packed_peer(plan) is None:
            own = plan.keep + math.ceil(request.num_tokens / self._size) - plan.whole
            if own > self._pool.get_num_free_blocks():
                return 0
        left = plan.tokens - num_computed
        if left > 0:
            count = min(num_new, left)
            if self._captures:  # a step of single tokens may replay a graph, which saves no queries
                if left - count == 1:
                    count -= 1
                if count == 1 and left <= QUERIES[plan.options.press]:
                    count = 0
            return count
        if num_new and not self._compress(request, plan):
            self._stalled.append(request)
            return 0
        return num_new

    def _compress(self, request: Any, plan: PromptPlan) -> bool:
        """Compress a prompt that has been computed; return False if the pool has too few blocks to pack it into."""
        pool, whole, before = self._pool, plan.whole, self._pool.get_num_free_blocks()
        table = self._manager.req_to_blocks[request.request_id]
        old, reused, peer = table[:whole], set[int](), self._packed_peer(plan)
        packed = self._shared(plan) if peer is None else self._manager.req_to_blocks[peer][: plan.keep]
        origin, by_head = None if packed is None else peer or "", plan.options.heads == "ada"
        if packed is not None:
            pool.touch(packed)
        else:
            alone = self._held_alone(plan, old)
            if plan.is_compressed is None and len(alone) <= plan.keep:  # it would not free any block
                return plan.stay_exact()
            packed = self._take(alone, plan.keep)
            if packed is None:
                return False
            reused = {block.block_id for block in packed} & {block.block_id for block in old}
            if plan.keys:
                self._pool.cache_packed_blocks(request, packed, plan.keys)
        tail = table[whole].block_id if plan.tokens > whole * self._size else None
        table[:whole] = [*packed, *[pool.null_block] * (whole - plan.keep)]
        pool.free_blocks([block for block in reversed(old) if block.block_id not in reused])
        sources, targets = ([block.block_id for block in blocks] for blocks in (old, packed))
        self._packings.append(
            Packing(request.request_id, plan.options.press, plan.tokens, sources, targets, tail, origin, by_head)
        )
        self._count_compressed(request, plan)
        self.freed |= dict.fromkeys(request.block_hashes[:whole])
        while len(self.freed) > len(pool.blocks):
            del self.freed[next(iter(self.freed))]
        self.counts["compression_freed_blocks"] += max(pool.get_num_free_blocks() - before, 0)
        return True

    def _packed_peer(self, plan: PromptPlan) -> str | None:
        """Return a running request that already holds the packed blocks of this plan, or None."""
        return next((name for name, peer in self._peers[plan.name].items() if peer.state == "compressed"), None)

    def _held_alone(self, plan: PromptPlan, blocks: list[Any]) -> list[Any]:
        """Return the blocks of a prompt that are held only by requests with the same plan that still wait."""
        peers = self._peers[plan.name].items()
        tables = [self._manager.req_to_blocks.get(name, ()) for name, peer in peers if peer.state == "waiting"]
        holders = [sum(len(table) > at and table[at] is block for table in tables) for at, block in enumerate(blocks)]
        return [block for block, count in zip(blocks, holders, strict=True) if block.ref_cnt == count]

    def _take(self, alone: list[Any], keep: int) -> list[Any] | None:
        """Return `keep` blocks to pack into; None while they are lacking.

        It prefers unpublished blocks of the request, then free blocks, then its published blocks, which it evicts.
        """
        private = [block for block in alone if block.ref_cnt == 1]
        unknown = [block for block in private if block.block_hash is None][:keep]
        num_free = min(keep - len(unknown), self._pool.get_num_free_blocks())
        lost = [block for block in private if block.block_hash is not None][: keep - len(unknown) - num_free]
        if len(unknown) + num_free + len(lost) < keep:
            return None
        if lost:
            self._pool.evict_blocks({block.block_id for block in lost})
        return [*unknown, *lost, *(self._pool.get_new_blocks(num_free) if num_free else [])]

    def start_step(self) -> None:
        """If no request can run because some wait for blocks, preempt one after another until one can be compressed.

        The youngest is preempted first; with priority scheduling, the youngest of the lowest priority. If the last
        request cannot be compressed either, it stays exact. If its answer has begun after a compressed prompt, it is
        preempted too: a session that waits for input may hold the blocks, and needs more to go on.
        A request that does not wait may be about to end, so it has one more step.
        """
        running, waiting, self._stalled = self.scheduler.running, self._stalled, []
        if not self._stuck_steps or (self._stuck_steps == 1 and any(each not in waiting for each in running)):
            return
        while running and not any(
            each in waiting and self._compress(each, self.plans[each.request_id]) for each in running
        ):
            if len(running) == 1 and not (running[0] in waiting and self.plans[running[0].request_id].is_compressed):
                if running[0] in waiting:
                    self.plans[running[0].request_id].stay_exact()
                return
            is_ranked = self.scheduler.policy == SchedulingPolicy.PRIORITY
            victim = max(running, key=lambda each: (each.priority, each.arrival_time)) if is_ranked else running[-1]
            running.remove(victim)
            preempt(self.scheduler, victim)

    def finish_step(self, output: Any) -> None:
        """Add to a step's output the prompts that workers pack before its forward pass, and the queries that they save.

        `pc_queries` has for each request the number of last rows of its chunk whose queries a press will read.
        """
        queries = {}
        for name in self.plans.keys() & output.num_scheduled_tokens.keys():
            plan, count = self.plans[name], output.num_scheduled_tokens[name]
            first = plan.tokens - QUERIES[plan.options.press]
            rows = min(self.scheduler.requests[name].num_computed_tokens - first, count)
            if plan.state == "waiting" and first < plan.tokens and rows > 0:
                queries[name] = rows
        output.pc_packings, output.pc_queries, self._packings = self._packings, queries, []
        is_stuck = bool(self._stalled) and not output.num_scheduled_tokens
        self._stuck_steps = self._stuck_steps + 1 if is_stuck else 0

    def release(self, request: Any) -> None:
        """Record that a request holds no blocks any more, because it is preempted or has ended."""
        plan = self.plans.get(request.request_id)
        if plan is not None:
            plan.state = "exact" if plan.is_compressed is False else "waiting"

    def exact_tokens(self, request: Any) -> int:
        """Return the number of a request's first tokens whose KV was computed from the exact, uncompressed text."""
        plan = self.plans.get(request.request_id)
        is_packed = plan is not None and plan.state in ("found", "compressed")
        return plan.tokens if plan is not None and is_packed else int(request.num_tokens)

    def forget(self, request: Any) -> None:
        """Drop a request that has ended."""
        plan = self.plans.pop(request.request_id, None)
        if plan is not None:
            peers = self._peers[plan.name]
            del peers[request.request_id]
            if not peers:
                del self._peers[plan.name]


def refusals(request: Any) -> dict[str, Any]:
    """Return the reasons against compressing a request, each with a value that is true if it applies."""
    return {
        "sessions": request.resumable,
        "images or sound": request.mm_features,
        "prompts of embeddings": request.prompt_embeds is not None,
        "hidden states of each token": asks_for_rows(request),
    }


def why_no_compression(scheduler: Any) -> str:
    """Return the reason why an engine cannot compress, or "". Workers reported theirs when the engine started."""
    model = scheduler.vllm_config.model_config
    workers: str = getattr(model, "pc_cannot_compress", "an engine without PC_VLLM=compression")
    own = {"fixed chunks": scheduler.chunks is not None, workers: workers}
    return first_reason(chain_reasons(scheduler) | clipping_reasons(scheduler) | own)
