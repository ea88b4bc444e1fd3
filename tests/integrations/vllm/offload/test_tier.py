"""A tier of ours behind vLLM's host memory: chunks are loaded as they were stored, or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip(
    "vllm", minversion="0.33", reason="needs vLLM 0.33, which takes policies from outside: make vllm-quick"
)

from vllm.v1.kv_offload.base import Locality, LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from benchmarks.engines.vllm_replay import make_context
from pc.integrations.vllm.offload.tier import chunk_layout

SIZE = 4096
CONTEXT = ReqContext("request")


def key(number, group=0):
    return make_offload_key(number.to_bytes(16, "big"), group)


def make_config(**changed):
    fields = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"))],
        model=SimpleNamespace(name="model", dtype="bfloat16", max_model_len=4096),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=SimpleNamespace(**fields),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="NHD",
    )
    for name, value in changed.items():
        *holders, last = name.split("__")
        holder = config
        for each in holders:
            holder = getattr(holder, each)
        setattr(holder, last, value)
    return config


@pytest.fixture
def make(tmp_path):
    """Return tiers with a directory and memory of their own, which are shut down at the end."""
    made = []

    def make_one(chunks=8, spec=None, **options):
        memory = np.zeros((chunks, SIZE), np.int8)
        given = {"type": "TierManager", "module_path": "pc.integrations.vllm.offload", "model": "m", "tier": "disk"}
        spec = spec or SimpleNamespace(config=make_config())
        options = given | {"path": str(tmp_path)} | options
        tier = SecondaryTierFactory.create_secondary_tier(options, memoryview(memory), spec)
        made.append(tier)
        return tier, memory

    yield make_one
    for tier in made:
        tier.shutdown()


def moved(tier, number, keys, places, is_promotion=False):
    """Return the result of one transfer."""
    job = TransferJob(number, keys, np.array(places), is_promotion, CONTEXT)
    tier.submit_load(job) if is_promotion else tier.submit_store(job)
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert result.job_id == number
    return result


def found_in(tier, keys, context=CONTEXT, ended=True):
    deadline = time.monotonic() + 10
    while LookupResult.RETRY in (found := [tier.lookup(each, context) for each in keys]):
        assert time.monotonic() < deadline
        tier.on_schedule_end(None)
        time.sleep(0.001)
    if ended:
        tier.on_request_finished(context)
    return [each is LookupResult.HIT for each in found]


def fill(memory, places, seed):
    rows = np.random.default_rng(seed).integers(-128, 128, (len(places), SIZE)).astype(np.int8)
    memory[places] = rows
    return rows


def test_chunks_come_back_in_another_process_place(make):
    """Chunks stored from some places are read into others, by a second tier with the same directory."""
    tier, memory = make(locality="REMOTE", threads=2)
    assert tier.locality is Locality.REMOTE
    rows = fill(memory, [1, 5, 6], seed=1)
    assert moved(tier, 1, [key(1), key(2), key(2, group=1)], [1, 5, 6]).success
    other, there = make()
    assert found_in(other, [key(1), key(2), key(3), key(2, group=1)]) == [True, True, False, True]
    result = moved(other, 7, [key(2, group=1), key(1)], [0, 3], is_promotion=True)
    assert result.success
    assert result.transfer_bytes == 2 * SIZE
    np.testing.assert_array_equal(there[[0, 3]], rows[[2, 0]])
    assert not there[[1, 2, 4, 5, 6, 7]].any()
    assert not other.has_pending_work()


def test_a_job_that_ends_while_it_is_looked_at(make):
    """The job is reported now or still running, because an engine without other work would not ask again."""
    tier, _ = make()
    is_done = iter([False, True])
    tier._running = [SimpleNamespace(done=lambda: next(is_done), result=lambda: ("result", []))]
    assert list(tier.get_finished_jobs()) or tier.has_pending_work()


@pytest.mark.parametrize(
    "changed",
    [
        {"model__dtype": "float16"},
        {"model__max_model_len": 8192},
        {"cache__tokens_per_hash": 32},
        {"cache__blocks_per_chunk": 4},
        {"parallel__tp_size": 2},
        {"kv_cache_layout": "HND"},
        {"canonical_layout": True},
        {"groups": [SimpleNamespace(tokens_per_block=16, layer_names=("a", "c"))]},
    ],
)
def test_chunks_of_others_are_never_read(make, changed):
    tier, _ = make()
    assert moved(tier, 1, [key(1)], [0]).success
    other, memory = make(spec=SimpleNamespace(config=make_config(**changed)))
    assert found_in(other, [key(1)]) == [False]
    assert not moved(other, 1, [key(1)], [0], is_promotion=True).success
    assert not memory.any()


def test_another_models_chunks_are_never_read(make):
    tier, _ = make()
    assert moved(tier, 1, [key(1)], [0]).success
    assert found_in(make(model="another")[0], [key(1)]) == [False]
    config = make_config()
    assert chunk_layout(config, "m", SIZE) != chunk_layout(config, "m", 2 * SIZE)


def test_a_lost_chunk_is_computed_and_those_before_it_are_kept(make, tmp_path):
    tier, memory = make()
    rows = fill(memory, [0, 1, 2], seed=2)
    keys = [key(1), key(2), key(3)]
    assert moved(tier, 1, keys, [0, 1, 2]).success
    (entry,) = tmp_path.rglob(f"{bytes(keys[1]).hex()}-1.block")
    entry.write_bytes(entry.read_bytes()[:-7])
    assert found_in(tier, keys, ended=False) == [True] * 3
    with pytest.warns(RuntimeWarning, match="a block on disk is dropped"):
        result = moved(tier, 2, keys, [5, 6, 7], is_promotion=True)
    assert not result.success
    assert list(result.successful_keys) == keys[:1]
    np.testing.assert_array_equal(memory[5], rows[0])
    assert not memory[[6, 7]].any()
    assert found_in(tier, keys) == [True, False, False]  # otherwise vLLM would ask for them repeatedly
    assert found_in(tier, keys) == [True, False, True]


def test_what_cannot_be_written_is_missed_later(make, monkeypatch, warnings):
    tier, memory = make()
    fill(memory, [0, 1], seed=3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            result = moved(tier, 1, [key(1), key(2)], [0, 1])
        assert not result.success
    assert found_in(tier, [key(1), key(2)]) == [False, False]
    assert moved(tier, 2, [key(1), key(2)], [0, 1]).success

    def broken(*_: object) -> None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(type(tier._tier), "get_many", broken)
    result = moved(tier, 3, [key(1)], [4], is_promotion=True)
    assert not result.success
    assert result.successful_keys is None
    assert not memory[4].any()
    assert "a transfer of 1 chunks failed: RuntimeError: the store is gone" in warnings[-1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": None}, "model: got None, needs a name for these weights"),
        ({"model": ""}, "model: got '', needs a name"),
        ({"threads": 0}, "threads: got 0, needs an integer of at least 1"),
        ({"tier": "dsik"}, "tier: got 'dsik', needs 'disk', 'mooncake'"),
        ({"capacity": 1}, "got 'capacity', needs some of"),
    ],
)
def test_options_are_checked(make, options, error):
    with pytest.raises(ValueError, match=error):
        make(**options)


def test_vllms_manager_moves_chunks_through_the_tier(make):
    """With vLLM's own tiers before ours, a prompt's chunks that host memory evicted are loaded with their bytes."""
    tier, memory = make(chunks=4)
    primary = CPUPrimaryTierOffloadingManager(
        num_chunks=4,
        mmap_region=SimpleNamespace(create_kv_memoryview=lambda: memoryview(memory)),
        cache_policy="pc_default",
        cache_policy_module_path="pc.integrations.vllm.offload",
    )
    manager = TieringOffloadingManager(primary, [tier])
    held: dict[bytes, np.ndarray] = {}

    def wait_until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not done():
            assert time.monotonic() < deadline
            manager.on_schedule_end(SimpleNamespace(new_req_ids=(), preempted_req_ids=()))
            time.sleep(0.001)

    for document in range(3):
        keys = [key(10 * document + n) for n in range(3)]
        context = make_context(str(document), keys, 32)
        manager.on_new_request(context)
        stored = manager.prepare_store(keys, context)
        rows = fill(memory, list(stored.store_spec.chunk_ids), seed=document)
        held |= dict(zip(stored.keys_to_store, rows, strict=True))
        manager.complete_store(keys, context)
        wait_until(lambda: not tier.has_pending_work() and not tier.get_finished_jobs())
        manager.on_request_finished(context)
    assert len(held) == 9

    keys = [key(n) for n in range(3)]
    again = make_context("again", keys, 32)
    manager.on_new_request(again)
    wait_until(lambda: all(manager.lookup(each, again) is LookupResult.HIT for each in keys))
    spec = manager.prepare_load(keys, again)
    for place, each in zip(spec.chunk_ids, keys, strict=True):
        np.testing.assert_array_equal(memory[place], held[each])
    manager.complete_load(keys, again)
    manager.on_request_finished(again)


def test_the_manager_is_vllms(make):
    tier, _ = make()
    assert isinstance(tier, SecondaryTierFactory.get_tier_class({"type": "example"}).__mro__[1])
    assert CPUOffloadingManager(4, "pc_lru", "pc.integrations.vllm.offload")._policy.__module__.startswith("vllm.")
