"""Blocks shared by engines: one process answers from what another computed; if that is gone, nothing wrong is read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

import mooncake_servers
import vllm_engine
import vllm_shared
from vllm.v1.kv_cache_layout import KVCacheLayout

from pc.cache.disk import DiskTier
from pc.cache.tier import Layout
from pc.integrations.vllm.connector.blocks import BlockStore
from pc.integrations.vllm.connector.connector import check_connector
from pc.integrations.vllm.connector.layout import digest_of_weights, layout_of, open_tier
from pc.integrations.vllm.connector.plans import Blocks, Planner

ROOT = Path(__file__).parents[3]
SIZE = 4


class Kept(dict):
    """A tier that says what it has."""

    def contains_many(self, keys):
        return [key in self for key in keys]


def request(name, known, keys=None, **more):
    """A request of vLLM: tokens known so far, and the hashes of its full blocks."""
    keys = keys if keys is not None else [f"{name}{n}".encode() for n in range(known // SIZE)]
    return SimpleNamespace(
        request_id=name, num_tokens=known, block_hashes=keys, skip_reading_prefix_cache=False, **more
    )


def step(counts, new=(), cached=(), resumed=(), finished=()):
    """What vLLM's scheduler says: `(name, first position, blocks)` of new and of running requests."""
    names = [name for name, _, _ in cached]
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=at, block_ids=(blocks,)) for name, at, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names,
            resumed_req_ids=set(resumed),
            new_block_ids=[None if blocks is None else (blocks,) for _, _, blocks in cached],
            num_computed_tokens=[at for _, at, _ in cached],
        ),
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


def test_loads_and_saves_step_by_step():
    planner = Planner([Kept.fromkeys([b"a0", b"a1"])], SIZE, "f")
    asked = request("a", 15)
    planner.admit(asked, planner.find(asked, 0))
    plan = planner.plan(step({"a": 3}, new=[("a", 8, [5, 2, 7, 1])]))
    assert plan.loads == [Blocks([5, 2], [b"a0", b"a1"])]
    assert plan.saves == []
    plan = planner.plan(step({"a": 4}, cached=[("a", 11, None)]))
    assert (plan.loads, plan.saves) == ([], [Blocks([7], [b"a2"])])
    asked.block_hashes.append(b"a3")
    plan = planner.plan(step({"a": 1}, cached=[("a", 15, None)]))
    assert plan.saves == [Blocks([1], [b"a3"])]
    assert planner.plan(step({}, finished=["a"])).saves == []


def test_drafts_are_not_saved():
    """The step computes 6 tokens, of which vLLM knows one; the block that they would fill has no hash."""
    planner = Planner([Kept()], SIZE, "f")
    asked = request("a", 7)
    planner.admit(asked, planner.find(asked, 0))
    assert planner.plan(step({"a": 7}, new=[("a", 0, [0, 1, 2])])).saves == [Blocks([0], [b"a0"])]
    assert planner.plan(step({"a": 6}, cached=[("a", 7, [3])])).saves == []


def test_blocks_whose_load_failed_are_saved_when_they_are_computed():
    planner = Planner([Kept.fromkeys([b"a0", b"a1", b"a2"])], SIZE, "f")
    asked = request("a", 14)
    planner.admit(asked, planner.find(asked, 0))
    planner.plan(step({"a": 2}, new=[("a", 12, [4, 5, 6, 7])]))
    plan = planner.plan(step({"a": 10}, cached=[("a", 4, None)]))
    assert plan.saves == [Blocks([5, 6], [b"a1", b"a2"])]


def test_a_resumed_request_has_other_blocks():
    tier = Kept()
    planner = Planner([tier], SIZE, "f")
    asked = request("a", 12)
    planner.admit(asked, planner.find(asked, 0))
    planner.plan(step({"a": 8}, new=[("a", 0, [4, 5])]))
    tier.update(dict.fromkeys([b"a0", b"a1"]))
    planner.admit(asked, planner.find(asked, 0))
    plan = planner.plan(step({"a": 4}, cached=[("a", 8, [9, 8, 1])], resumed=["a"]))
    assert plan.loads == [Blocks([9, 8], [b"a0", b"a1"])]
    assert plan.saves == [Blocks([1], [b"a2"])]


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
    store.save(tier, [Blocks([3, 8], [b"k3", b"k8"]), Blocks([1], [b"k1"])])
    other = {name: torch.zeros(5, *shape[1:], dtype=dtype) for name in caches}
    wanted = Blocks([4, 0, 2, 1], [b"k8", b"k1", b"gone", b"k3"])
    assert BlockStore(other, size).load(tier, wanted) == [2, 1]
    for name, cache in other.items():
        assert torch.equal(cache[4], before[name][8])
        assert torch.equal(cache[0], before[name][1])
        assert not cache[1:4].any()
        assert torch.equal(caches[name], before[name])
    with pytest.raises(ValueError, match=f"kv_caches: got {size} bytes a block, needs {size + 1}"):
        BlockStore(caches, size + 1)


def test_all_layouts_of_vllm_are_strides_of_one_shape():
    """What the test above permutes is what vLLM's layouts name."""
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
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        open_tier(options, Layout("m", {"kv": ((4,), torch.uint8)}))


def configuration(**changes):
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    cache = {"prefix_caching_hash_algo": "sha256", "prefix_match_unit": None}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{name: changes.get(name, value) for name, value in parallel.items()}),
        cache_config=SimpleNamespace(**{name: changes.get(name, value) for name, value in cache.items()}),
        lora_config=changes.get("lora_config"),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: got 2, needs 1"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size: got 2, needs 1"),
        ({"lora_config": "some"}, "lora_config: got adapters"),
        ({"prefix_caching_hash_algo": "xxhash"}, "differ from process to process"),
        ({"prefix_match_unit": 8}, "prefix_match_unit: got 8"),
    ],
)
def test_configurations_that_blocks_cannot_stand_for_are_refused(changes, message, monkeypatch):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    one = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    check_connector(configuration(), one)
    with pytest.raises(ValueError, match=message):
        check_connector(configuration(**changes), one)
    state = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))
    for specs in ([spec, spec], [state], []):
        with pytest.raises(ValueError, match="needs one group of attention layers"):
            check_connector(
                configuration(), SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s in specs])
            )


HYBRID = (
    r"kv_transfer_config: got TierConnector for a model with recurrent layers \(Granite.*\), needs .* attention layers "
    r"alone: .* hybrid KV cache manager, .* without --kv-transfer-config"
)


@pytest.mark.parametrize("hybrid", [True, False])
def test_hybrid_models_are_refused_where_vllm_first_asks_a_connector(hybrid):
    """Before it makes groups of layers; it goes the same way with the hybrid cache manager switched on by hand."""
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


def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 500, (n,), generator=generator).tolist() for n in (100, 70, 150)]


def start(path, options, environment=None):
    """An engine in a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests/support/vllm_shared.py"), path, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | (environment or {}),
    )


def result(process):
    """What it answered."""
    out, errors = process.communicate("", timeout=400)
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, errors[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def shared(model_path, tmp_path_factory):
    """A directory that another process has filled, and what it answered."""
    folder = tmp_path_factory.mktemp("tier")
    options = {"tier": {"tier": "disk", "path": str(folder)}, "prompts": prompts()}
    return folder, result(start(model_path("llama"), options))


def entries(folder):
    """The blocks in a directory of a tier, by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*/*.block"))}


def values(data):
    """The numbers at the end of an entry: two layers' keys and values of 32 tokens, 2 heads of 32."""
    return torch.frombuffer(bytearray(data[-4 * 2 * 2 * 32 * 2 * 32 :]), dtype=torch.float32)


def test_a_second_process_answers_without_computing(model_path, shared, tmp_path):
    folder, first = shared
    assert first["cached"] == [0, 0, 0]
    assert first["computed"] == 100 + 70 + 150 + 3 * 11
    path = model_path("llama")
    second = vllm_shared.answer(path, {"tier": {"tier": "disk", "path": str(folder)}, "prompts": prompts()})
    assert second["tokens"] == first["tokens"]
    assert second["cached"] == [96, 64, 128]
    assert second["computed"] == 4 + 6 + 22 + 3 * 11
    # What the first process wrote is what this one computes by itself; steps of other sizes may round differently.
    vllm_shared.answer(path, {"tier": {"tier": "disk", "path": str(tmp_path)}, "prompts": prompts()})
    theirs, own = entries(folder), entries(tmp_path)
    assert theirs.keys() == own.keys()
    assert len(theirs) >= 3 + 2 + 4
    for name, data in theirs.items():
        torch.testing.assert_close(values(data), values(own[name]), rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def longer(model_path, tmp_path_factory):
    """Prompts that go on behind those of `shared`, so that a step completes blocks behind those it loads."""
    folder = tmp_path_factory.mktemp("longer")
    asked = [prompt + prompts()[2][:60] for prompt in prompts()]
    return (
        folder,
        asked,
        vllm_shared.answer(model_path("llama"), {"tier": {"tier": "disk", "path": str(folder)}, "prompts": asked}),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("left", [0, 4])
def test_blocks_that_are_lost_between_two_questions_are_computed(
    model_path, shared, longer, tmp_path, left, asynchronous
):
    """All of them, or from the middle of a prompt on; what is saved behind that is right, too."""
    copy = shutil.copytree(shared[0], tmp_path / "copy")
    folder, asked, expected = longer
    tier = {"tier": "vllm_shared:Lossy", "path": str(copy), "left": left}
    engine = {"async_scheduling": asynchronous}
    found = vllm_shared.answer(model_path("llama"), {"tier": tier, "prompts": asked, "engine": engine})
    assert found["tokens"] == expected["tokens"]
    assert found["computed"] > expected["computed"] - 32 * left
    right, kept = entries(shared[0]) | entries(folder), entries(copy)
    assert len(kept) > left
    for name, data in kept.items():  # other batches round differently
        torch.testing.assert_close(values(data), values(right[name]), rtol=1e-3, atol=1e-3)


def test_tight_blocks_and_preemption(model_path, shared):
    folder, _ = shared
    long = {"prompts": prompts() * 2, "max_tokens": 40, "engine": {"num_gpu_blocks_override": 10}}
    with vllm_engine.engine(model_path("llama"), enable_prefix_caching=False) as (llm, _):
        expected, _ = vllm_engine.generate(llm, long["prompts"], max_tokens=40)
    found = vllm_shared.answer(model_path("llama"), {"tier": {"tier": "disk", "path": str(folder)}, **long})
    assert found["preemptions"] > 0
    assert found["tokens"] == expected


def test_another_model_finds_nothing(model_path, shared):
    folder, _ = shared
    options = {"tier": {"tier": "disk", "path": str(folder)}, "prompts": prompts()[:1]}
    assert vllm_shared.answer(model_path("qwen3"), options)["cached"] == [0]


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_models_with_windows(model_path, tmp_path, name):
    """Windows beside full attention, and alone: all blocks are kept, and shared."""
    options = {"tier": {"tier": "disk", "path": str(tmp_path)}, "prompts": prompts()}
    first, second = (vllm_shared.answer(model_path(name), options) for _ in range(2))
    assert second["tokens"] == first["tokens"]
    assert (first["cached"], second["cached"]) == ([0, 0, 0], [96, 64, 128])
    assert second["computed"] == 4 + 6 + 22 + 3 * 11


def test_a_hybrid_model_is_refused_at_start_up(model_path, tmp_path):
    options = {"tier": {"tier": "disk", "path": str(tmp_path)}, "prompts": prompts()[:1]}
    with pytest.raises(ValueError, match=HYBRID):
        vllm_shared.answer(model_path("granite_hybrid"), options)


@pytest.mark.skipif(not list(entry_points(group="vllm.general_plugins", name="pc")), reason="pc is not installed here")
def test_two_workers_share_blocks(model_path, shared, tmp_path):
    """With tensor_parallel_size=2: each rank has a layout of its own, and the tokens are those of one worker."""
    options = {
        "tier": {"tier": "disk", "path": str(tmp_path)},
        "prompts": prompts(),
        "engine": {"tensor_parallel_size": 2},
    }
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PC_VLLM": "attention"}
    path = model_path("llama")
    first, second = (result(start(path, options, environment)) for _ in range(2))
    assert first["tokens"] == second["tokens"] == shared[1]["tokens"]
    assert (first["cached"], second["cached"]) == ([0, 0, 0], [96, 64, 128])
    ranks = [sorted(path.name for path in folder.glob("*.block")) for folder in tmp_path.glob("*/")]
    assert ranks == [sorted(entries(shared[0]))] * 2


def test_through_a_mooncake_store_that_dies(model_path, tmp_path):
    """One process keeps its blocks in the store, another reads them, and goes on alone when the store is gone."""
    path = model_path("llama")
    with mooncake_servers.running(tmp_path) as (metadata, master, process):
        tier = {"tier": "mooncake", "metadata_server": metadata, "master": master}
        tier |= {"segment_bytes": 64 << 20, "transfer_bytes": 16 << 20, "batch_blocks": 8}
        first = start(path, {"tier": tier, "prompts": prompts(), "stops": True})
        for _ in prompts()[1:]:
            wait_for_stop(first)
            first.stdin.write("\n")
            first.stdin.flush()
        wait_for_stop(first)  # it stays, since the store has its blocks in the memory of who put them there
        second = start(path, {"tier": tier | {"segment_bytes": 0}, "prompts": prompts(), "stops": True})
        wait_for_stop(second)
        mooncake_servers.kill(process)
        found = result(second)
        first.kill()
        first.communicate()
    with vllm_engine.engine(path) as (llm, _):
        expected, _ = vllm_engine.generate(llm, prompts())
    assert found["tokens"] == expected
    assert found["cached"] == [96, 0, 0]
    assert found["computed"] == 4 + 70 + 150 + 3 * 11


def wait_for_stop(process):
    """Reads what a process says until it waits."""
    while not (line := process.stdout.readline()).startswith("STOP"):
        assert line, process.stderr.read()[-3000:]
