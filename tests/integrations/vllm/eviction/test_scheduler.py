"""The scheduler classes in vLLM's engine, chosen by the environment or by name, give the same tokens."""

from __future__ import annotations

import pytest
import vllm_engine

from pc.cache.policies import POLICIES


def prompts():
    made = vllm_engine.random_prompts(2, 70, 90, 110, 60, 100)
    return [*made, made[0][:64] + made[1], *made]


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.mark.parametrize("policy", ["lru", "default"])
def test_chosen_by_the_environment(model_path, monkeypatch, policy):
    """lru has the same hits as vLLM. There are few blocks, so that it evicts and preempts."""
    found = []
    for ours in (False, True):
        if ours:  # vLLM's own scheduler raises for it
            monkeypatch.setenv("PC_VLLM_POLICY", policy)
        features = ["eviction"] if ours else []
        with vllm_engine.engine(model_path("llama"), features, num_gpu_blocks_override=12) as (llm, seen):
            assert type(scheduler_of(llm)).__name__ == ("PolicyScheduler" if ours else "Scheduler")
            found.append(vllm_engine.generate(llm, prompts(), max_tokens=30))
            if ours:
                state = scheduler_of(llm).block_pool.policy_state
                assert type(state.policy).__name__ == POLICIES[policy].__name__
            assert seen["preemptions"] > 0
    assert found[0][0] == found[1][0]
    if policy == "lru":
        assert found[0][1] == found[1][1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_chosen_by_name(model_path, asynchronous):
    kind = "AsyncPolicyScheduler" if asynchronous else "PolicyScheduler"
    options = {
        "scheduler_cls": f"pc.integrations.vllm.eviction.{kind}",
        "async_scheduling": asynchronous,
        "additional_config": {"pc_policy": "lfu"},
        "num_gpu_blocks_override": 12,
    }
    with vllm_engine.engine(model_path("llama"), num_gpu_blocks_override=12) as (llm, _):
        expected, _ = vllm_engine.generate(llm, prompts(), max_tokens=30)
    with vllm_engine.engine(model_path("llama"), **options) as (llm, _):
        assert type(scheduler_of(llm)).__name__ == kind
        assert type(scheduler_of(llm).block_pool.policy_state.policy).__name__ == "LFU"
        found, _ = vllm_engine.generate(llm, prompts(), max_tokens=30)
        assert llm.reset_prefix_cache()
        again, cached = vllm_engine.generate(llm, prompts()[:1])
    assert found == expected
    assert again[0][0] == expected[0][0][:12]
    assert cached == [0]


def test_diffusion_models_are_refused():
    """They need vLLM's own scheduler, which knows the widths of their canvases."""
    from types import SimpleNamespace

    from pc.integrations.vllm.eviction import PolicyScheduler

    with pytest.raises(ValueError, match="got one of pc for a diffusion model"):
        PolicyScheduler(SimpleNamespace(kv_transfer_config=None, diffusion_config="some"))


@pytest.mark.parametrize("within", [False, True], ids=["alone", "among others"])
def test_the_connector_that_looks_ahead_is_refused(within):
    from types import SimpleNamespace

    from vllm.config import KVTransferConfig

    from pc.integrations.vllm.eviction import PolicyScheduler

    transfer = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    if within:
        others = [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, transfer]
        transfer = transfer | {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": others}}
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**transfer))
    with pytest.raises(ValueError, match="kv_connector: got SimpleCPUOffloadConnector"):
        PolicyScheduler(config)
