"""Random conversations for SGLang's radix cache, through the calls that its scheduler makes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from benchmarks.engines.sglang_radix import PAGE, Request, admit, compute, finish, make_cache
from pc.cache.replay import Trace

LONGEST = 1 << 12


def conversations(seed: int, count: int) -> Trace:
    """Return the blocks of prompts, of which about three of five continue an earlier one."""
    rand, known, requests, fresh = random.Random(seed), [], [], 0
    for _ in range(count):
        if known and rand.random() < 0.6:
            before = list(rand.choice(known[-40:]))
            before = before[: rand.randint(1, len(before))] if rand.random() < 0.2 else before
        else:
            before = []
        more = rand.randint(1, 6)
        blocks = [*before, *range(fresh, fresh + more)]
        fresh += more
        known.append(blocks[:24])
        requests.append(np.array(blocks[:24]))
    return Trace("conversations", PAGE, requests, outputs=[20] * count, times=[float(n) for n in range(count)])


class Traffic:
    """Concurrent requests that are admitted, computed in chunks, aborted and finished at random."""

    def __init__(self, policy: str, core: str, num_pages: int, seed: int, at_once: int = 4) -> None:
        self.cache = make_cache(policy, core, num_pages, at_once, LONGEST)
        self.rand = random.Random(seed)
        self.rows = list(range(1, at_once + 1))
        self.running: list[Request] = []
        self.computed: dict[str, bool] = {}
        self.hits: list[int] = []
        self.number = 0

    def step(self, blocks: list[int]) -> None:
        """End some requests, start one with these blocks, and compute it with probability 0.8."""
        while not self.rows or (self.running and self.rand.random() < 0.3):
            self.end(self.running[self.rand.randrange(len(self.running))])
        tokens = np.array([PAGE * b + n for b in blocks for n in range(PAGE)] + [1 << 30], np.int64)
        extra = np.arange(self.rand.randrange(PAGE)) + (1 << 40) + 64 * self.number
        answer = np.arange(self.rand.randint(1, 40)) + (1 << 41) + 64 * self.number
        request = Request(self.number, np.append(tokens, extra), answer, self.rows.pop())
        self.number += 1
        self.hits.append(admit(self.cache, request))
        self.running.append(request)
        self.computed[request.rid] = self.rand.random() < 0.8
        if self.computed[request.rid]:
            compute(self.cache, request)

    def end(self, request: Request) -> None:
        """End a request, or abort it if it was never computed."""
        self.running.remove(request)
        self.rows.append(request.row)
        if self.computed[request.rid]:
            finish(self.cache, request)
            return
        held = self.cache.req_to_token_pool.req_to_token[request.row]
        begin, end = request.kv.cache_protected_len, -(-len(request.fill_ids) // PAGE) * PAGE
        self.cache.token_to_kv_pool_allocator.free_segment(held[begin:end].long(), start_pos=begin)
        self.cache.unlock(request.lock)
        self.cache.on_release(request, checkpointed=False)

    def check(self) -> None:
        """Check that no page is lost, by SGLang's check of its tree and by ours of the pages' numbers."""
        cache = self.cache
        core = cache.tree_core
        core.sanity_check({}, {})
        nodes: list[Any] = [node for node in core._collect_all_nodes() if node is not core.root_node]
        pages = [page for node in nodes for page in node.pc_pages.tolist()]
        assert sum(len(node.key) for node in nodes) == PAGE * len(pages)
        core.pages.check(pages)
        waiting = 0
        for node in nodes:
            assert (core._node_of[node.pc_pages] == node.id).all()
            locks = node.component_data[0].lock_ref
            assert (core.pages.ref_count[node.pc_pages] == locks).all()
            waiting += len(node.pc_pages) * node.pc_waits
            assert not (node.pc_waits and locks and not core._unreported)
        assert core.pages.num_waiting == waiting
        if not core._unreported:  # the policy does not know yet that these are held
            core.pages.policy.check()
