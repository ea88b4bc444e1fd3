"""Commands of the pages about vLLM: vLLM's own classes accept them, and they arrive here."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from vllm_page import commands

from pc.integrations.vllm import FEATURES, features
from pc.integrations.vllm.connector.layout import check_options
from pc.integrations.vllm.eviction import read_hint
from pc.integrations.vllm.hidden_states import ASKED


def test_every_request_of_the_page_arrives():
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    pooling = pytest.importorskip("vllm.entrypoints.pooling.pooling.protocol")
    arrived = []
    (pooled,) = commands("curl http://localhost:8000/pooling")
    sent = pooling.PoolingCompletionRequest(**json.loads(pooled[pooled.index("-d") + 1]))
    assert sent.to_pooling_params().task == "token_embed"
    for words in commands("curl http://localhost:8000/v1/completions"):
        sent = protocol.CompletionRequest(**json.loads(words[words.index("-d") + 1]))
        extra = sent.to_sampling_params(16, {}).extra_args
        arrived += list(extra)
        request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
        assert (read_hint(request) is not None) == ("kv_hints" in extra)
        assert bool(extra.get(ASKED)) == (ASKED in extra)
        assert extra.get("pc_reuse", "gap") in features.REUSE
    assert sorted(arrived) == ["kv_hints", ASKED, "pc_reuse"]


def test_every_server_of_the_page_starts_with_options_that_are_known():
    options, offloads = [], []
    for words in commands("vllm serve"):
        variables = dict(word.split("=", 1) for word in words if word.startswith("PC_VLLM"))
        assert set(variables.get("PC_VLLM", "omni").split(",")) <= set(FEATURES)
        for option in ("--additional-config", "--kv-transfer-config"):
            if option in words:
                given = json.loads(words[words.index(option) + 1])
                options += list(given)
                if given.get("kv_connector") == "OffloadingConnector":
                    offloads.append(given["kv_connector_extra_config"])
                elif option == "--kv-transfer-config":
                    check_options(given["kv_connector_extra_config"])
                else:
                    assert set(given) <= {*features.SCHEDULER_OPTIONS, *features.HIDDEN_STATES_OPTIONS}
    assert len(commands("vllm serve")) > 4
    assert {"pc_hidden_states_dir", "kv_connector"} <= set(options)
    policies = pytest.importorskip("vllm.v1.kv_offload.cpu.policies.factory").CachePolicyFactory
    tiers = pytest.importorskip("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
    policy, tier = offloads
    assert policies.get_cache_policy_cls(policy["eviction_policy"], policy["cache_policy_module_path"])
    (behind,) = tier["secondary_tiers"]
    assert tiers.get_tier_class(behind)
    check_options({name: behind[name] for name in behind if name not in ("type", "module_path", "model")})
