"""A pytest plugin for vLLM's own tests, which puts pc's policy behind block pools and tiers in host memory.

PC_VLLM_POLICY names the policy; the default is lru. vLLM's tests read the order of free blocks. For lru, this is the
order in which the policy returns all of them as victims; the plugin then returns them to the policy. Other policies
have no such order, so the tests in `ORDERED` must fail with them, and no others. The tests in `INSIDE` must fail with
every policy, lru too, because they need vLLM's own lru class or the places of chunks.

    PC_VLLM_POLICY=default pytest -p vllm_lru_pool tests/v1/core/test_prefix_caching.py
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from pc.integrations.vllm.eviction import install_policy
from pc.integrations.vllm.eviction.queue import PolicyQueue
from pc.integrations.vllm.offload import OffloadPolicy

POLICY = os.environ.pop("PC_VLLM_POLICY", "lru")  # removed, since vLLM's own scheduler is refused with it
ORDERED = {
    **dict.fromkeys(("test_prefill", "test_prefill_plp", "test_evict"), "compares the blocks taken with those of lru"),
    **dict.fromkeys(
        (
            "test_cache_hit_local_and_external",
            "test_cache_hit_local_and_external_three_groups",
            "test_cache_hit_local_and_external_three_groups_preempt_and_reallocate",
            "test_cache_hit_local_and_external_two_groups_preempt_and_reallocate",
        ),
        "looks at the ends of vLLM's linked list",
    ),
}
"""Tests that read an order of free blocks, which only lru has before it chooses victims."""
INSIDE = {
    **dict.fromkeys(
        (
            "test_lru_batch_eviction_failure_is_atomic",
            "test_lru_repeated_pin_cycles_compact_lazy_heap_entries",
            "test_touch_propagates_to_all_tiers",
        ),
        "looks into vLLM's class",
    ),
    "test_cpu_manager": "one request, of whose chunks no place is known, stores, reads and stores again",
}
"""Tests of the tier that need more than an order of eviction."""
_make = BlockPool.__init__
made = {"block pools": 0, "tiers": 0}


def _make_with_policy(self, *args, **kwargs):
    _make(self, *args, **kwargs)
    made["block pools"] += 1
    install_policy(self, POLICY)


class TierPolicy(OffloadPolicy):
    policy_name = POLICY

    def __init__(self, cache_capacity):
        super().__init__(cache_capacity)
        made["tiers"] += 1


def _in_order(self):
    policy, cached = self._state.policy, []
    waiting = self.num_free_blocks - self.num_empty_blocks
    if waiting:
        ids = self._state.victims(waiting)
        policy.released(ids[::-1].copy())
        cached = [self._blocks[i] for i in ids.tolist()]
    return [*reversed(self._empty), *cached]


HEAD, TAIL = SimpleNamespace(), SimpleNamespace()


def _ends(self):
    """Return the nodes around the free blocks, with the fields that vLLM's tests read."""
    free = _in_order(self)
    HEAD.next_free_block, TAIL.prev_free_block = (free[0], free[-1]) if free else (TAIL, HEAD)
    return HEAD, TAIL


BlockPool.__init__ = _make_with_policy
CachePolicyFactory._registry["lru"] = lambda: TierPolicy
if POLICY == "lru":
    PolicyQueue.get_all_free_blocks = _in_order
    PolicyQueue.fake_free_list_head = property(lambda self: _ends(self)[0])
    PolicyQueue.fake_free_list_tail = property(lambda self: _ends(self)[1])


def pytest_collection_modifyitems(items):
    for item in items:
        ordered = ORDERED if POLICY != "lru" and item.cls is None else {}  # a class has a test_evict of metrics
        reason = (INSIDE | ordered).get(item.originalname)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail the session if no pool or tier was made with the policy, because nothing was tested then."""
    if not all(made.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{made} with {POLICY} behind them")
