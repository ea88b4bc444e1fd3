"""A connector without an engine: what it loads and saves in each step, the bytes of blocks, and errors at start-up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm_shared
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_traffic import scheduled

from benchmarks.engines import vllm_scheduler
from pc.cache.tiers.disk import DiskTier
from pc.cache.tiers.tier import Layout
from pc.integrations.vllm.connector.connector import BlockStore, Planner
from pc.integrations.vllm.connector.layout import (
    check_connector,
    check_options,
    describe,
    digest_of_weights,
    layout_of,
    open_tier,
)

SIZE = 4


class Kept(dict):
    """A tier that lists its keys."""

    def contains_many(self, keys):
        return [key in self for key in keys]


def request(name, known, keys=None, **more):
    """Return a request of vLLM with the tokens known so far and the hashes of its full blocks."""
    keys = keys if keys is not None else [f"{name}{n}".encode() for n in range(known // SIZE)]
    return SimpleNamespace(
        request_id=name, num_tokens=known, block_hashes=keys, skip_reading_prefix_cache=False, **more
    )


def test_a_prompt_that_the_tier_has_whole_leaves_a_token():
    tier = Kept.fromkeys([b"a0", b"a1", b"a2"])
    planner = Planner([tier], SIZE, "f")
    assert planner.find(request("a", 12), 0) == 8
    assert planner.find(request("a", 13), 0) == 12
    assert planner.find(request("a", 13), 4) == 8
    assert planner.find(request("a", 13), 6) == 0
    assert planner.find(request("b", 13), 0) == 0
    del tier[b"a1"]
    assert planner.find(request("a", 13), 0) == 4
    assert planner.find(request("a", 13), 4) == 0


def test_a_block_counts_when_every_rank_has_it():
    planner = Planner([Kept.fromkeys([b"a0", b"a1"]), Kept.fromkeys([b"a0"])], SIZE, "f")
    assert planner.find(request("a", 12), 0) == 4


def test_who_reads_no_prefixes_and_who_only_produces_finds_nothing():
    tier = Kept.fromkeys([b"a0", b"a1"])
    asked = request("a", 12)
    asked.skip_reading_prefix_cache = True
    assert Planner([tier], SIZE, "f").find(asked, 0) == 0
    assert Planner([tier], SIZE, "f", consumes=False).find(request("a", 12), 0) == 0


def admitted(planner, asked, blocks):
    """Look a request up, give it its first blocks, and return the plan of the step that loads what the tier has."""
    planner.admit(asked, blocks, planner.find(asked, 0))
    return planner.plan(scheduled({}))


def test_loads_and_saves_step_by_step():
    planner = Planner([Kept.fromkeys([b"a0", b"a1"])], SIZE, "f")
    asked = request("a", 15)
    plan = admitted(planner, asked, [5, 2])
    assert (plan.loads, plan.saves) == ({"a": {5: b"a0", 2: b"a1"}}, {})
    planner.loaded(["a"], ())
    planner.admit(asked, [5, 2, 7, 1], 0)
    plan = planner.plan(scheduled({"a": 3}, new=[("a", 8, [5, 2, 7, 1])]))
    assert (plan.loads, plan.saves) == ({}, {})
    plan = planner.plan(scheduled({"a": 4}, cached=[("a", 11, None)]))
    assert (plan.loads, plan.saves) == ({}, {7: b"a2"})
    asked.block_hashes.append(b"a3")
    plan = planner.plan(scheduled({"a": 1}, cached=[("a", 15, None)]))
    assert plan.saves == {1: b"a3"}
    assert planner.plan(scheduled({}, finished=["a"])).saves == {}
    assert not planner._requests


def test_drafts_are_not_saved():
    """The step computes 6 tokens, of which vLLM knows one. The block that they would fill has no hash."""
    planner = Planner([Kept()], SIZE, "f")
    asked = request("a", 7)
    planner.admit(asked, [0, 1, 2], planner.find(asked, 0))
    assert planner.plan(scheduled({"a": 7}, new=[("a", 0, [0, 1, 2])])).saves == {0: b"a0"}
    assert planner.plan(scheduled({"a": 6}, cached=[("a", 7, [3])])).saves == {}


def test_blocks_that_could_not_be_loaded_are_not_asked_for_again_and_saved_when_they_are_computed():
    planner = Planner([Kept.fromkeys([b"a0", b"a1", b"a2"])], SIZE, "f")
    asked = request("a", 14)
    admitted(planner, asked, [4, 5, 6])
    planner.loaded(["a"], {5, 6})
    assert planner.find(asked, 0) == 0
    planner.loaded(["a"], {7})  # by the next connector of a MultiConnector
    assert planner.find(asked, 0) == 0
    assert planner.plan(scheduled({"a": 10}, new=[("a", 4, [4, 5, 6, 7])])).saves == {5: b"a1", 6: b"a2"}


def test_who_holds_blocks_that_another_connector_loads_saves_nothing_until_two_more_outputs():
    """The second request shares them in the same step. The third one does not."""
    planner, tables, saves = Planner([Kept()], SIZE, "f"), {"a": [4, 5, 6], "b": [4, 5, 7], "c": [8]}, []
    for name, computed in {"a": 0, "b": 8, "c": 0}.items():
        asked = request(name, 4 * len(tables[name]))
        planner.admit(asked, tables[name], planner.find(asked, computed))
    counts, at = {"a": 4, "b": 4, "c": 4}, {"a": 8, "b": 8, "c": 0}
    saves.append(planner.plan(scheduled(counts, [(name, at[name], tables[name]) for name in counts], sync=True)).saves)
    for _ in range(2):
        planner.loaded((), ())
        saves.append(planner.plan(scheduled(dict.fromkeys("ab", 1), cached=[(name, 12, None) for name in "ab"])).saves)
    assert saves == [{8: b"c0"}, {}, {4: b"a0", 5: b"a1", 6: b"a2", 7: b"b2"}]


def test_a_block_that_could_not_be_loaded_stops_who_hits_it_or_later_ones_until_another_computes_in_it():
    """The first request hits block 4 and computes in block 6. The block before the lost one stays sound."""
    planner, saves = Planner([Kept()], SIZE, "f"), []
    hits = {"a": [4], "sound": [4], "lost": [4, 5], "fresh": [], "after": [5]}
    for name, fresh in {"a": [5, 6], "sound": [7], "lost": [8], "fresh": [5], "after": [8]}.items():
        blocks, computed = hits[name] + fresh, 4 * len(hits[name])
        asked = request(name, 4 * len(blocks))
        planner.admit(asked, blocks, planner.find(asked, computed))
        begin, is_first = (8, True) if name == "a" else (computed, False)
        output = scheduled({name: 4 * len(blocks) - begin}, [(name, begin, blocks)], sync=is_first)
        saves.append(planner.plan(output).saves)
        planner.loaded((), {5} if is_first else ())
        planner.plan(scheduled({}, finished=[name]))
    assert saves == [{}, {7: b"sound1"}, {}, {5: b"fresh0"}, {8: b"after1"}]


def test_a_request_waits_while_another_one_loads_the_same_block():
    """It finds the block in the engine afterwards, and does not hold a copy of its own."""
    planner, made = Planner([Kept.fromkeys([b"a0", b"a1", b"a2"])], SIZE, "f"), {}
    for name, keys in {"one": [b"a0", b"a1"], "two": [b"a0", b"a1", b"a2"], "three": [b"b0"]}.items():
        made[name] = request(name, 4 * len(keys) + 1, keys)
    assert admitted(planner, made["one"], [4, 5]).loads == {"one": {4: b"a0", 5: b"a1"}}
    assert planner.find(made["two"], 0) is None
    assert planner.find(made["two"], 8) == 4
    assert planner.find(made["three"], 0) == 0
    planner.loaded(["one"], ())
    assert planner.find(made["two"], 0) == 12
    admitted(planner, made["two"], [7, 8, 9])
    assert planner.find(made["one"], 0) is None
    planner.forget("two")  # it was aborted
    assert planner.find(made["one"], 0) == 8


def test_a_step_loads_no_more_tokens_than_a_step_computes():
    """The other running requests wait for the loads of a step."""
    planner = Planner([Kept.fromkeys([b"a0", b"a1", b"b0", b"c0"])], SIZE, "f", max_tokens=12)
    made = {name: request(name, 4 * count + 1) for name, count in {"a": 2, "b": 1, "c": 1}.items()}
    planner.admit(made["b"], [4], planner.find(made["b"], 0))
    planner.admit(made["a"], [5, 6], planner.find(made["a"], 0))
    assert planner.find(made["c"], 0) is None
    assert planner.plan(scheduled({})).loads == {"b": {4: b"b0"}, "a": {5: b"a0", 6: b"a1"}}
    assert planner.find(made["c"], 0) == 4


def test_a_resumed_request_has_other_blocks():
    tier = Kept()
    planner = Planner([tier], SIZE, "f")
    asked = request("a", 12)
    planner.admit(asked, [4, 5], planner.find(asked, 0))
    planner.plan(scheduled({"a": 8}, new=[("a", 0, [4, 5])]))
    tier.update(dict.fromkeys([b"a0", b"a1"]))
    assert admitted(planner, asked, [9, 8]).loads == {"a": {9: b"a0", 8: b"a1"}}
    planner.loaded(["a"], ())
    plan = planner.plan(scheduled({"a": 4}, cached=[("a", 8, [9, 8, 1])], resumed=["a"]))
    assert (plan.loads, plan.saves) == ({}, {1: b"a2"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)])
def test_bytes_of_blocks_in_any_layout(dtype, order, tmp_path):
    shape = [9, 2, SIZE, 6]
    inverse = sorted(range(4), key=order.__getitem__)

    def made(name):
        memory = torch.randint(0, 100, [shape[at] for at in order]).to(dtype)
        return memory.permute(inverse)

    caches = {name: made(name) for name in ("x.1", "x.0")}
    before = {name: cache.clone() for name, cache in caches.items()}
    size = 2 * 2 * SIZE * 6 * caches["x.0"].element_size()
    store, tier = BlockStore(caches, size), DiskTier(tmp_path, layout_of("f", 0, size))
    store.save(tier, {3: b"k3", 8: b"k8", 1: b"k1"})
    other = {name: torch.zeros(5, *shape[1:], dtype=dtype) for name in caches}
    wanted = {4: b"k8", 0: b"k1", 2: b"gone", 1: b"k3"}
    assert BlockStore(other, size).load(tier, wanted) == [2, 1]
    for name, cache in other.items():
        assert torch.equal(cache[4], before[name][8])
        assert torch.equal(cache[0], before[name][1])
        assert not cache[1:4].any()
        assert torch.equal(caches[name], before[name])
    with pytest.raises(ValueError, match=f"kv_caches: got {size} bytes a block, needs {size + 1}"):
        BlockStore(caches, size + 1)


def test_layers_that_share_a_cache_are_one_layer_of_a_block(tmp_path):
    """In models such as Gemma 3n, vLLM passes the cache of a layer again for each layer that reads it."""
    cache = torch.randn(4, 2, SIZE, 6)
    caches, size = {"x.1": cache, "x.0": cache}, cache[0].nbytes
    store, tier = BlockStore(caches, size), DiskTier(tmp_path, layout_of("f", 0, size))
    store.save(tier, {3: b"k3"})
    other = torch.zeros_like(cache)
    assert BlockStore({"x.0": other, "x.1": other}, size).load(tier, {1: b"k3"}) == []
    assert torch.equal(other[1], cache[3])


def test_all_layouts_of_vllm_are_strides_of_one_shape():
    """The test above permutes a shape; this one checks that vLLM's layouts are such permutations."""
    assert len(KVCacheLayout) == 6


def test_other_weights_have_another_digest(tmp_path):
    from safetensors.torch import save_file

    def digest(values):
        save_file({"w": values}, tmp_path / "model.safetensors")
        return digest_of_weights(SimpleNamespace(model=str(tmp_path), revision=None))

    values = torch.zeros(300_000)
    first = digest(values)
    assert digest(values.clone()) == first
    values[200_000:] = 1
    assert digest(values) != first
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="without weights"):
        digest_of_weights(SimpleNamespace(model=str(tmp_path / "none"), revision=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "disk", "path": "x", "capacity": 1}, "got 'capacity', needs some of tier, model"),
        ({"tier": "disk"}, "got no 'path'"),
        ({"tier": "mooncake", "master": "x"}, "got no 'metadata_server'"),
        ({}, "tier: got None, needs 'disk', 'mooncake' or"),
        ({"tier": "redis"}, "tier: got 'redis'"),
        ({"tier": ["disk"]}, r"tier: got \['disk'\], needs 'disk', 'mooncake' or"),
        ({"tier": "disk", "path": None}, "got no 'path'"),
        ({"tier": "disk", "path": "x", "capacity_bytes": "1e9"}, "capacity_bytes: got '1e9', needs an integer"),
        ({"tier": "disk", "path": "x", "capacity_bytes": 0}, "capacity_bytes: got 0, needs an integer of at least 1"),
        ({"tier": "mooncake", "batch_blocks": 0}, "batch_blocks: got 0, needs an integer of at least 1"),
        ({"tier": "mooncake", "segment_bytes": -1}, "segment_bytes: got -1, needs an integer of at least 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        open_tier(options, Layout("m", {"kv": ((4,), torch.uint8)}))


@pytest.mark.parametrize("tier", [{"tier": "disk", "path": "x"}, {"tier": "module:function", "capacity_bytes": "any"}])
@pytest.mark.parametrize("value", ["1000", 0, 1.5, True])
def test_options_that_only_a_worker_reads_are_refused_at_the_start(tier, value):
    for served in (None, 1, 1e9):
        check_options(tier | {"writer_bytes": served})
    with pytest.raises(ValueError, match=f"writer_bytes: got {value!r}, needs an integer of at least 1"):
        check_options(tier | {"writer_bytes": value})


def test_a_float_without_a_fraction_is_an_integer(tmp_path):
    tier = open_tier({"tier": "disk", "path": str(tmp_path), "capacity_bytes": 1e9}, Layout("m", {}))
    assert repr(tier.capacity_bytes) == "1000000000"


def configuration(**changes):
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    cache = {"prefix_caching_hash_algo": "sha256", "prefix_match_unit": None, "enable_prefix_caching": True}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{name: changes.get(name, value) for name, value in parallel.items()}),
        cache_config=SimpleNamespace(**{name: changes.get(name, value) for name, value in cache.items()}),
        lora_config=changes.get("lora_config"),
        diffusion_config=changes.get("diffusion_config"),
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=changes.get("media", 0)),
            runner_type=changes.get("runner_type", "generate"),
            is_prefix_caching_supported=changes.get("served", False),
        ),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: got 2, needs 1"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size: got 2, needs 1"),
        ({"lora_config": "some"}, "lora_config: got adapters"),
        ({"diffusion_config": "some"}, "got a diffusion model"),
        ({"prefix_caching_hash_algo": "xxhash"}, "differ from process to process"),
        ({"prefix_match_unit": 8}, "prefix_match_unit: got 8"),
        ({"runner_type": "pooling"}, "pooler_config: got a pooler that needs the rows of all tokens"),
        ({"enable_prefix_caching": False}, "mm_processor_cache_gb: got 0 without prefix caching"),
    ],
)
def test_configurations_that_blocks_cannot_stand_for_are_refused(changes, message, monkeypatch):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    one = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    check_connector(configuration(), one)
    check_connector(configuration(enable_prefix_caching=False, media=4), one)
    check_connector(configuration(runner_type="pooling", served=True), one)
    with pytest.raises(ValueError, match=message):
        check_connector(configuration(**changes), one)
    state = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))
    for specs in ([spec, spec], [state], []):
        with pytest.raises(ValueError, match="needs one group of attention layers"):
            check_connector(
                configuration(), SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs])
            )


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 4096},
        {"model_impl": "transformers"},
        {"quantization_config": {"ignore": ["lm_head"]}},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"do_normalize": False})},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_change_what_a_model_computes_change_the_fingerprint(changes):
    """With LongRoPE, for example, max_model_len decides the frequencies of the keys."""
    scheduler = vllm_scheduler.make_scheduler(None, 8)
    config, caches = scheduler.vllm_config, scheduler.kv_cache_config
    before = describe(config, caches, {"model": "x"})
    assert describe(config, caches, {"model": "x"}) == before
    for name, value in changes.items():
        setattr(config.model_config, name, value)
    assert describe(config, caches, {"model": "x"}) != before


def test_draft_models_change_the_fingerprint_unless_the_weights_have_a_name(tmp_path):
    """The layers of a draft model are in the blocks too."""
    scheduler = vllm_scheduler.make_scheduler(None, 8)
    config, caches = scheduler.vllm_config, scheduler.kv_cache_config
    folders = [tmp_path / name for name in ("model", "a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "x.safetensors").write_bytes(folder.name.encode())
    config.model_config.model = str(folders[0])
    found, named = [describe(config, caches, {})], {describe(config, caches, {"model": "x"})}
    for folder in folders:
        config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(folder)))
        found.append(describe(config, caches, {}))
        named.add(describe(config, caches, {"model": "x"}))
    assert found[0] == found[1]  # n-grams have no layers, and vLLM names the model itself
    assert len({*found}) == 3
    assert len(named) == 1


HYBRID = (
    r"kv_transfer_config: got TierConnector for a model with recurrent layers \(Granite.*\), needs .* attention layers "
    r"alone: .* hybrid KV cache manager, .* without --kv-transfer-config"
)


@pytest.mark.parametrize("hybrid", [True, False])
def test_hybrid_models_are_refused_where_vllm_first_asks_a_connector(hybrid):
    """vLLM asks before it groups layers, and does the same if the hybrid cache manager is switched on explicitly."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**vllm_shared.transfer({"tier": "disk", "path": "x"})),
        model_config=SimpleNamespace(is_hybrid=hybrid, architectures=["GraniteMoeHybridForCausalLM"]),
    )
    if hybrid:
        with pytest.raises(ValueError, match=HYBRID):
            get_kv_connector_cache_layout(config)
    else:
        assert get_kv_connector_cache_layout(config) is None
