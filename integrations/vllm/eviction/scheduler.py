"""vLLM's schedulers with an eviction policy for their block pool, hints for the policy, and jumps over cached tokens.

A jump lets a prompt skip cached blocks that lie after a missing block.
"""

from __future__ import annotations

from typing import Any

from ...hints import Hint, extra_args, read_or_warn
from ..api import (
    AsyncScheduler,
    BlockPool,
    Scheduler,
    SchedulingPolicy,
    available,
    become_stock,
    log_off,
    logger,
    with_hooks,
)
from ..compression.options import ASKED as COMPRESS
from ..compression.options import read_options
from ..compression.scheduler import Compression, why_no_compression
from ..features import REUSE, announce, asked_of_scheduler, chosen_policy, keeps_rows
from ..metrics import COUNTERS, policy_counts
from ..reasons import asks, asks_for_rows, can_serve
from .chunks import make_chunks
from .explaining import ASKED, Misses, why_not_explained
from .jumps import Jumps, why_no_jumps
from .moved import why_no_moves
from .pool import PolicyBlockPool, install_policy
from .waiting import WaitingPrefixes

PEEKING = ("SimpleCPUOffloadConnector",)
"""Connectors of vLLM that walk through the queue of free blocks ahead of time."""


@with_hooks
class PolicyScheduler(Scheduler):
    """vLLM's scheduler with a policy of `pc.cache` (`scheduler_cls`, with `async_scheduling=False`).

    If the installed vLLM lacks what the policy needs, the scheduler becomes vLLM's own and logs why. Reuse after gaps,
    reuse of moved text, fixed chunks and explanations need more of vLLM. The scheduler disables each of them that vLLM
    cannot serve, and logs why.
    """

    block_pool: PolicyBlockPool
    kv_cache_manager: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None:
            within = transfer.kv_connector_extra_config.get("connectors", ())  # of a MultiConnector
            for name in (transfer.kv_connector, *(each.get("kv_connector") for each in within)):
                if name in PEEKING:
                    raise ValueError(f"kv_connector: got {name}, which needs vLLM's own order of eviction")
        if vllm_config.diffusion_config is not None:
            raise ValueError("scheduler_cls: got one of pc for a diffusion model, needs vLLM's own")
        super().__init__(vllm_config, *args, **kwargs)
        if not self._can_have_policy():
            become_stock(self)
            return
        self.block_pool = install_policy(self.kv_cache_manager.block_pool, chosen_policy(vllm_config))
        self._awaited = WaitingPrefixes(lambda: self.waiting)
        if not self.block_pool.policy_state.is_lru:  # lru keeps vLLM's own order
            self.block_pool.free_block_queue.waiting = self._awaited
        # Workers do not see which new blocks a KV connector fills. So they drop the hidden states of all new blocks.
        self.block_pool.fresh_numbers = None if transfer is None else []
        self._hints: dict[str, Hint] = {}
        self._hinted: dict[str, list[int]] = {}
        self.counts = dict.fromkeys(COUNTERS, 0)
        """Counts since the start, by the names that `..metrics` describes."""
        self._export = policy_counts(vllm_config)
        self._reuse = asked_of_scheduler(vllm_config, "pc_reuse")
        self._reuse_asked: dict[str, str] = {}
        self.chunks = make_chunks(self, asked_of_scheduler(vllm_config, "pc_chunk"))
        self.jumps = self._make_jumps()
        self._misses: Misses | None = None
        self._unexplained: set[str] = set()
        self.clips = self.chunks is not None or self.jumps is not None
        self.compression: Compression | None = None
        """The compression of prompts; None until a request asks for it."""
        self._parts: list[Compression | Jumps] = [] if self.jumps is None else [self.jumps]
        """The collaborators that act before and after each step, in their order before a step."""
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        announce(vllm_config)

    def _can_have_policy(self) -> bool:
        """Return whether the installed vLLM and its block pool allow a policy; log why if they do not."""
        if not available("eviction", scheduler=self):
            return False
        kind = type(self.kv_cache_manager.block_pool)
        if not issubclass(kind, BlockPool):
            log_off("eviction", f"got a block pool of {kind}, needs vLLM's")
            return False
        return True

    def _make_jumps(self) -> Jumps | None:
        """Return the jumps over gaps and moved text that the engine allows, or None. Log what it does not allow.

        The log is a warning if the user asked for the feature.
        """
        log = logger.info_once if self._reuse in ("", "prefix") else logger.warning_once
        if not can_serve("eviction.gap", self, why_no_jumps, "what is cached after a gap is not reused", log):
            return None
        served = available("eviction.anywhere", scheduler=self)
        jumps = Jumps(self, why_no_moves(self) if served else "this release of vLLM")
        if self._reuse == "anywhere":
            jumps.follow()
        elif jumps.cannot_move:
            logger.info_once("text that moved is not reused under %s", jumps.cannot_move)
        return jumps

    def add_request(self, request: Any) -> None:
        """Add a request, and read its hint and options. An invalid hint is logged and ignored."""
        extra = extra_args(request)
        if asks_for_rows(request) and not keeps_rows(self.vllm_config):
            logger.warning_once("pc_hidden_states and pc_prompt_logprobs have no effect without PC_VLLM=hidden_states")
        if extra.get(COMPRESS) is not None:
            self._will_compress(request)
        if asks(extra, ASKED):
            self._will_explain(request.request_id)
        asked = extra.get("pc_reuse")
        if asked is not None:
            if not isinstance(asked, str) or asked not in REUSE:
                known = ", ".join(REUSE)
                logger.warning("pc_reuse of request %s: got %.100r, needs one of %s", request.request_id, asked, known)
                asked = "prefix"
            if asked == "anywhere" and self.jumps is not None:
                self.jumps.follow()
            self._reuse_asked[request.request_id] = asked
        hint, readable = read_or_warn(request, request.request_id, logger)
        self.counts["unreadable_hints"] += not readable
        if hint is not None:
            self.counts["hints"] += 1
            self._hints[request.request_id] = hint
            self.kv_cache_manager.allocate_slots = self._allocate_hinted  # slower, so only from the first hint on
        super().add_request(request)

    def _will_compress(self, request: Any) -> None:
        """Plan the compression of a request's prompt, or log why the request stays exact."""
        try:
            options = read_options(extra_args(request))
        except (TypeError, ValueError) as error:
            logger.warning("request %s stays exact: %s", request.request_id, error)
            return
        if self.compression is None:
            if not can_serve("compression", self, why_no_compression, f"{COMPRESS}: requests stay exact"):
                return
            self.compression = Compression(self)
            self._parts.insert(0, self.compression)
            self.clips = True
        if options is not None:
            self.compression.add(request, options)

    def _will_explain(self, request_id: str) -> None:
        """Plan to explain a request's miss when it is admitted, and record requests that end from now on."""
        if self._misses is None:
            message = f"{ASKED}: misses are not explained"
            if not can_serve("eviction.explain", self, why_not_explained, message):
                return
            self._misses = Misses(self)
        self._unexplained.add(request_id)
        self.clips = True

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step. With a KV connector, the step names the blocks that were newly allocated."""
        self._awaited.is_stale = True
        for part in self._parts:
            part.start_step()
        output = super().schedule(*args, **kwargs)
        for part in reversed(self._parts):
            part.finish_step(output)
        if self.block_pool.fresh_numbers is not None:
            output.pc_fresh_blocks, self.block_pool.fresh_numbers = self.block_pool.fresh_numbers, []
        return output

    def clip_chunk(self, allowed: int, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many of the `allowed` tokens a request computes in this step.

        vLLM calls this for each request of a step. A chunk ends before a cached run, at the end of a fixed chunk, or at
        the end of a text that is compressed.
        """
        if self._misses is not None and request.request_id in self._unexplained:
            self._unexplained.remove(request.request_id)
            logger.info("request %s: %s", request.request_id, self._misses.explain(request, self.jumps))
        if self.compression is not None and request.request_id in self.compression.plans:
            return self.compression.clip(request, num_computed_tokens, allowed)
        if self.chunks is not None:
            return self.chunks.clip(request, num_computed_tokens, allowed)
        jumps, admits = self.jumps, request.num_computed_tokens == 0
        if jumps is None or not (admits or jumps.pinned or jumps.pieces):
            return allowed
        reuse = self._reuse_asked.get(request.request_id, self._reuse)
        if admits and reuse != "prefix" and jumps.plan(request, num_computed_tokens, reuse == "anywhere"):
            self._allocate_slots = jumps.allocate  # slower, so only from the first gap on
            if not self.counts["hints"]:
                self.kv_cache_manager.allocate_slots = jumps.allocate
        return jumps.clip(request, num_computed_tokens, allowed)

    def _allocate_hinted(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Allocate, and pass the request's hint to the policy for its new blocks."""
        blocks = self._allocate_slots(request, *args, **kwargs)
        hint = self._hints.get(request.request_id)
        if hint is not None and hint.ranges and blocks is not None:
            self._pass_on(request.request_id, hint)
        return blocks

    def _pass_on(self, request_id: str, hint: Hint) -> None:
        """Pass a request's hint to the policy for the blocks that it has got since the last call."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        done = self._hinted.setdefault(request_id, [0] * len(managers))
        for group, manager in enumerate(managers):
            blocks, size = manager.req_to_blocks[request_id], manager.block_size
            begin, done[group] = min(done[group], len(blocks)), len(blocks)
            for each in hint.ranges:
                end = len(blocks) if each.end is None else min(len(blocks), -(-each.end // size))
                ids = [b.block_id for b in blocks[max(begin, each.start // size) : end] if not b.is_null]
                if ids:
                    self.block_pool.policy_state.hinted(ids, each.priority, each.ttl)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's statistics of a step, and export the policy's own."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            queue = self.block_pool.free_block_queue
            of_queue = {"evicted_blocks": queue.num_evicted, "returned_blocks": queue.num_returned}
            self._export(self.counts | of_queue | {"kept_blocks": queue.num_kept})
        return stats

    def before_preemption(self, request: Any) -> None:
        """Forget which blocks have a request's hint, so that its hint is passed for all its blocks when it resumes.

        With priorities, vLLM may preempt a request that it has already scheduled in this step. The KV of the step's
        blocks is then never written, although they have hashes. This method removes these hashes.
        """
        self._hinted.pop(request.request_id, None)
        if self.policy != SchedulingPolicy.PRIORITY:
            return
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            blocks = manager.req_to_blocks.get(request.request_id, ())
            rest = blocks[request.num_computed_tokens // manager.block_size :]
            self.block_pool.evict_blocks({block.block_id for block in rest if block.block_hash is not None})

    def before_release(self, request: Any) -> None:
        """Unpin the cached blocks that a request has not reached yet, and record that the request holds no blocks."""
        for part in reversed(self._parts):
            part.release(request)

    def before_end(self, request: Any) -> None:
        """Notify the policy of a request's end."""
        self._reuse_asked.pop(request.request_id, None)
        self._unexplained.discard(request.request_id)
        if self._misses is not None:
            self._misses.remember(request)
        if self.compression is not None:
            self.compression.forget(request)
        hint = self._hints.pop(request.request_id, None)
        self._hinted.pop(request.request_id, None)
        self.block_pool.policy_state.finished(request.num_output_tokens, None if hint is None else hint.returns)


class AsyncPolicyScheduler(PolicyScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with a policy of `pc.cache` (`scheduler_cls`)."""
