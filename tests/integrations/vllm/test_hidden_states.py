"""Hidden states of whole prompts: rows as vLLM's scheduler outputs say, without a model, and from its engine."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import vllm_engine
import vllm_exact
from safetensors import safe_open
from vllm_steps import BLOCK, Steps, following, rows_of
from vllm_traffic import make_request

from pc.integrations.vllm import hidden_states
from pc.integrations.vllm.hidden_files import RowsFolder, file_name
from pc.integrations.vllm.hidden_states import (
    ASKED,
    ASKED_LOGPROBS,
    FollowedPrompt,
    PromptHiddenStates,
    check_pooler,
    take_hidden_states,
    take_prompt_logprobs,
)

ROWS, GENERATED = "rows", 14


def answered(prompt):
    """Return a prompt and the model's answer."""
    tokens = list(prompt)
    for _ in range(GENERATED):
        tokens.append(following(tokens[-1], len(tokens) - 1))
    return tokens


def ask(steps, seed, num_requests=40):
    """Ask prompts that begin like others, or like others and their answers.

    Return all tokens and the rows asked for.
    """
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS)
    rng = random.Random(seed)
    roots = [[rng.randrange(1000) for _ in range(60)] for _ in range(3)]
    prompts, found = [], {}
    while len(prompts) < num_requests or steps.scheduler.requests:
        while len(prompts) < num_requests and len(steps.scheduler.requests) < 5:
            root = rng.choice([*roots, *map(answered, prompts[-4:])])[:90]
            prompt = root[: rng.randrange(1, len(root) + 1)] + [rng.randrange(1000) for _ in range(rng.randrange(3))]
            steps.add(str(len(prompts)), prompt, GENERATED, {ROWS: len(prompts) % 5 != 0})
            prompts.append(prompt)
        steps.step()
        taken = kept.take()
        assert not taken.keys() & found.keys(), "the same rows twice"
        found |= taken
    return prompts, found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("windows", [0, 2])
def test_a_row_for_each_token(windows, drafts, seed):
    """Hits, misses, chunks, preemption and rejected drafts; the full group is between groups of windows."""
    steps = Steps(30 + 13 * windows, windows, drafts, seed)
    prompts, found = ask(steps, seed)
    assert sorted(map(int, found)) == [n for n in range(len(prompts)) if n % 5]
    for name, rows in found.items():
        assert torch.equal(rows["hidden_states"], rows_of(prompts[int(name)])), name
    assert steps.counts["hits"] > 100
    assert steps.counts["chunks"] > 5
    assert steps.counts["resumed"] > 0
    assert (steps.counts["rejected"] > 0) == drafts


def test_rows_that_nobody_takes_are_bounded_by_bytes(warnings):
    """Rows that were completed first are dropped, with one warning. A prompt larger than the limit keeps its rows."""
    steps = Steps(64, 0, False, 0)
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS, waiting_bytes=20_000)
    for n in range(30):
        steps.run(str(n), [n, *range(40)], 1, {ROWS: True})
        held = [tensor for each in kept.waiting.values() for tensor in (each.tokens, *each.rows.values())]
        assert sum(tensor.nbytes for tensor in held) <= 20_000
    assert len(warnings) == 1
    assert "pc_hidden_states_waiting_bytes" in warnings[0]
    found = kept.take()
    assert 2 < len(found) < 20
    assert list(found)[-1] == "29", "not those completed last"
    kept.waiting_bytes = 1
    steps.run("large", list(range(50)), 1, {ROWS: True})
    assert list(kept.take()) == ["large"]


def test_rows_in_a_folder_are_those_of_each_prompt(tmp_path):
    """The rows include hits. A prompt with missing rows says so."""
    steps = Steps(64, 0, False, 0)
    folder = RowsFolder(tmp_path)
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS, folder=folder)
    prompts = {f"cmpl-{n}-0": [n // 2, *range(40)] for n in range(6)}
    for name, prompt in prompts.items():
        steps.run(f"{name}-a1b2c3d4", prompt, 1, {ROWS: True})
    assert steps.counts["hits"] > 0
    kept._take("cmpl-lost-0-a1b2c3d4", [63], FollowedPrompt(torch.tensor([1, 2]), 2, True, False), ["hidden_states"])
    folder.close()
    assert kept.take() == {}
    assert len(list(tmp_path.iterdir())) == 7
    for name, prompt in prompts.items():
        with safe_open(tmp_path / file_name(name), "pt") as file:
            assert file.metadata() == {"complete": "true"}
            assert file.get_tensor("token_ids").tolist() == prompt
            assert torch.equal(file.get_tensor("hidden_states"), rows_of(prompt))
    with safe_open(tmp_path / file_name("cmpl-lost-0"), "pt") as file:
        assert (file.metadata(), list(file.keys())) == ({"complete": "false"}, ["token_ids"])


def test_a_session_has_rows_of_each_turn():
    """A turn's prompt is all text so far: vLLM keeps the computed answer tokens and drops the last sampled one."""
    from vllm_traffic import make_request

    steps = Steps(64)
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS)
    prompt = []
    for turn in (range(30), range(50, 73), range(5)):
        request = make_request("session", list(turn), 4, generate=3, ignore_eos=True, extra_args={ROWS: True})
        request.resumable = True
        steps.scheduler.add_request(request)
        prompt += turn
        for _ in range(8):
            steps.step()
        assert torch.equal(kept.take()["session"]["hidden_states"], rows_of(prompt))
        prompt = answered(prompt)[: len(prompt) + 2]


def test_a_prompt_of_embeddings(tmp_path):
    """It has no tokens and a row for each position, in a file too. It is complete only after its last chunk."""
    steps = Steps(64, 0, False, 0)
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS)
    prompt = list(range(40))
    steps.add("embeds-0", prompt, 1, {ROWS: True})
    execute = steps.runner.execute_model

    def as_embeddings(output):
        for new in output.scheduled_new_reqs:
            new.prompt_token_ids, new.prompt_embeds = None, torch.zeros(len(prompt), 2)
        return execute(output)

    steps.runner.execute_model = as_embeddings
    steps.run()
    assert steps.counts["chunks"] > 0
    kept.folder = folder = RowsFolder(tmp_path)
    kept._take(
        "embeds-0-a",
        [*range(40)],
        FollowedPrompt(torch.tensor([], dtype=torch.int64), 0, True, False),
        ["hidden_states"],
    )
    folder.close()
    assert torch.equal(kept.take()["embeds-0"]["hidden_states"], rows_of(prompt))
    with safe_open(tmp_path / file_name("embeds-0"), "pt") as file:
        assert file.get_tensor("token_ids").dtype == torch.int64


def test_log_probabilities_in_a_folder(tmp_path, monkeypatch, warnings):
    """They are written alone or beside the rows, after hits too, in pieces; not if no rank has all logits.

    Tokens without logits, such as those of images in some models, are infinitely improbable.
    """
    monkeypatch.setattr(hidden_states, "LOGITS", 7 * 50)
    steps = Steps(64, 0, False, 0)
    weights, pieces = torch.randn(50, 1, generator=torch.Generator().manual_seed(0)), []

    def compute_logits(rows):
        pieces.append(len(rows))
        return rows[:, :1].float() / 1000 @ weights.T

    steps.runner.device, steps.runner.model = "cpu", SimpleNamespace(compute_logits=compute_logits)
    steps.runner.model_config = SimpleNamespace(get_vocab_size=lambda: 50)
    folder = RowsFolder(tmp_path)
    PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS, folder=folder)
    alone = {ASKED_LOGPROBS: 1}
    wanted = {"both": {ROWS: True, ASKED_LOGPROBS: 1}, "alone": alone, "short": alone, "images": alone}
    refused = ("split", "adapters")
    prompts = {name: list(range(1 if name == "short" else 40)) for name in (*wanted, *refused)}
    prompts["images"][20:22] = 50, 60
    for name, asked in (wanted | {each: {ASKED_LOGPROBS: 1} for each in refused}).items():
        steps.runner.parallel_config = SimpleNamespace(tensor_parallel_size=1 + (name == "split"))
        steps.runner.lora_config = SimpleNamespace() if name == "adapters" else None
        steps.run(f"{name}-a1b2c3d4", prompts[name], 1, asked)
    folder.close()
    assert steps.counts["hits"] > 0
    assert max(pieces) == 7
    for name in wanted:
        prompt = prompts[name]
        with safe_open(tmp_path / file_name(name), "pt") as file:
            of_all = torch.full((len(prompt) - 1, 61), -torch.inf)
            of_all[:, :50] = compute_logits(rows_of(prompt)[:-1]).log_softmax(-1)
            expected = of_all[range(len(prompt) - 1), prompt[1:]]
            torch.testing.assert_close(file.get_tensor("prompt_logprobs"), expected)
            assert ("hidden_states" in file.keys()) == (name == "both")  # noqa: SIM118  no mapping
    assert not any((tmp_path / file_name(name)).exists() for name in refused)
    assert [line.partition(":")[2].partition(":")[0] for line in warnings] == [
        " not written under tensor parallelism",
        " not written under LoRA",
    ]


def test_rows_that_no_worker_keeps_or_writes_are_reported(warnings):
    """The scheduler warns if no worker keeps rows, and the worker if it has no folder for log-probabilities."""
    for keeps in (True, False):
        scheduler = vllm_exact.make_scheduler(8)
        scheduler.vllm_config.parallel_config.worker_cls = "HiddenStatesWorker" if keeps else "auto"
        for asked in ({ASKED: False}, {ASKED: True}, {ASKED_LOGPROBS: 1}):
            scheduler.add_request(make_request(f"{asked}", [*range(40)], 16, extra_args=asked))
        assert len(warnings) == (not keeps)
    steps = Steps(64)
    PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS)
    steps.run("a", [*range(40)], 1, {ASKED_LOGPROBS: 1})
    assert [line.partition("without")[2] for line in warnings] == [
        " PC_VLLM=hidden_states",
        " pc_hidden_states_dir",
    ]


def test_values_that_are_neither_true_nor_false_are_reported_and_ask_for_nothing(warnings):
    """The truth of an array is an error, which ended the engine."""
    steps, array = Steps(64, 0, False, 0), torch.ones(2)
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS)
    for name in (ROWS, ASKED_LOGPROBS):
        steps.run(f"array-{name}", list(range(40)), 1, {name: array})
    steps.run("asks", list(range(40)), 1, {ROWS: True})
    assert torch.equal(kept.take()["asks"]["hidden_states"], rows_of(range(40)))
    assert [line.partition(":")[0] for line in warnings] == [f"{name} is ignored" for name in (ROWS, ASKED_LOGPROBS)]
    scheduler = vllm_exact.make_scheduler(8)
    for name in (ASKED, ASKED_LOGPROBS, "pc_explain", "pc_reuse"):
        scheduler.add_request(make_request(name, [*range(40)], 16, extra_args={name: array}))
    assert len(scheduler.requests) == 4
    assert len(warnings) == 6


@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed"])
def test_embeddings_have_no_log_probabilities(tmp_path, warnings, mixed):
    """Not even where vLLM has made-up tokens in their places. A file has its other contents, and the log says why."""
    steps, prompt = Steps(64, 0, False, 0), list(range(40))
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS)
    execute = steps.runner.execute_model

    def as_embeddings(output):
        for new in output.scheduled_new_reqs:
            new.prompt_token_ids, new.prompt_embeds = prompt if mixed else None, torch.zeros(len(prompt), 2)
        return execute(output)

    steps.runner.execute_model = as_embeddings
    steps.run("waits-a", prompt, 1, {ROWS: True})
    assert kept.prompt_logprobs() == {"waits-a": None}
    assert torch.equal(kept.take()["waits-a"]["hidden_states"], rows_of(prompt))
    kept.folder = RowsFolder(tmp_path)
    steps.run("both-a", prompt, 1, {ROWS: True, ASKED_LOGPROBS: 1})
    steps.run("alone-a", prompt, 1, {ASKED_LOGPROBS: 1})
    kept.folder.close()
    assert [path.name for path in tmp_path.iterdir()] == [file_name("both")]
    with safe_open(tmp_path / file_name("both"), "pt") as file:
        assert sorted(file.keys()) == ["hidden_states", "token_ids"]
        assert len(file.get_tensor("token_ids")) == 0
    assert [line.partition(":")[2] for line in warnings] == [" not written under prompts of embeddings"]


def test_prompts_without_rows_are_bounded_too():
    steps = Steps(64, 0, False, 0)
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ROWS, waiting_bytes=50_000)
    kept.rows.register("hidden_states", (2,), torch.float32)
    for n in range(300):
        kept._take(str(n), [1], FollowedPrompt(torch.tensor([1, 2]), 2, True, False), ["hidden_states"])
    assert {each.rows for each in kept.waiting.values()} == {None}
    assert 10 < len(kept.waiting) <= 50


ROOM, TIGHT = 64, 14


FEATURES = ["attention", "hidden_states"]


def rounds():
    """Return prompts cut anywhere from four roots, so that blocks are hit, evicted and filled; the first ones twice."""
    generator = torch.Generator().manual_seed(1)

    def ints(low, high, count):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    roots = [ints(3, 500, 160) for _ in range(4)]
    first = [
        roots[0][:157],
        roots[1][:133],
        roots[2][:100],
        roots[0][:128] + roots[1][:40],
        roots[3][:32],
        roots[3][:33],
    ]
    made = [first, first]
    for _ in range(3):
        shapes = zip(ints(0, 4, 4), ints(1, 150, 4), ints(1, 60, 4), strict=True)
        made += [[roots[root][:cut] + ints(3, 500, tail) for root, cut, tail in shapes]]
    return made


def run(path, prompts, **options):
    """Return each prompt's rows, log-probabilities and tokens, the cached tokens, and the counts."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False, extra_args={ASKED: True})
    found, cached = [], []
    with vllm_engine.engine(path, FEATURES, **options) as (llm, seen):
        for batch in prompts:
            outputs = llm.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False)
            logprobs, rows = take_prompt_logprobs(llm), take_hidden_states(llm)
            assert set(rows) == set(logprobs) == {output.request_id for output in outputs}
            for output in outputs:
                name = output.request_id
                tensors = rows[name]
                own = None if tensors is None else tensors["hidden_states"].clone()
                found.append((own, logprobs[name], list(output.outputs[0].token_ids)))
            cached.append([output.num_cached_tokens for output in outputs])
        assert take_hidden_states(llm) == {}
    return found, cached, seen


@pytest.fixture(scope="module")
def computed(model_path):
    """By model, the results if nothing is cached."""
    kept = {}

    def compute(name):
        if name not in kept:
            kept[name] = run(model_path(name), rounds(), enable_prefix_caching=False, num_gpu_blocks_override=160)
        return kept[name][0]

    return compute


def check(found, expected):
    for prompt, (rows, logprobs, tokens), (wanted, wanted_logprobs, wanted_tokens) in zip(
        itertools.chain(*rounds()), found, expected, strict=True
    ):
        assert rows.shape == wanted.shape == (len(prompt), 128)
        assert logprobs.shape == (len(prompt) - 1,)
        torch.testing.assert_close(rows, wanted, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(logprobs, wanted_logprobs, rtol=1e-3, atol=1e-3)
        assert tokens == wanted_tokens


@pytest.mark.parametrize(("name", "blocks"), [("llama", ROOM), ("llama", TIGHT), ("gpt_oss", 2 * ROOM)])
def test_rows_are_those_of_a_computed_prompt(model_path, computed, name, blocks):
    """Hits, chunks, evictions, preemptions; gpt_oss also has a group of windows."""
    expected = computed(name)
    found, cached, seen = run(model_path(name), rounds(), num_gpu_blocks_override=blocks)
    check(found, expected)
    assert sum(map(sum, cached)) > 200
    if blocks == TIGHT:
        assert seen["preemptions"] > 0


def test_rows_through_speculation(model_path, computed):
    """Rejected drafts leave rows, which those of the accepted tokens replace."""
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    expected = computed("llama")
    found, _, seen = run(model_path("llama"), rounds(), speculative_config=draft, num_gpu_blocks_override=ROOM)
    check(found, expected)
    assert seen["drafts"] > 0
    # A prompt that continues with the answer hits blocks whose rows were written during verification of drafts.
    prompt, answer = rounds()[0][0], expected[0][2]
    longer = [[*prompt, *answer, 5, 6, 7]]
    plain, _, _ = run(model_path("llama"), [longer], enable_prefix_caching=False)
    with_drafts, hits, _ = run(model_path("llama"), [[prompt], longer], speculative_config=draft)
    assert hits[1][0] > len(prompt)
    torch.testing.assert_close(with_drafts[1][0], plain[0][0], rtol=1e-3, atol=1e-3)


def test_only_who_asks_gets_rows(model_path):
    with vllm_engine.engine(model_path("llama"), FEATURES) as (llm, _):
        vllm_engine.generate(llm, rounds()[0][:2])
        assert take_hidden_states(llm) == {}


def test_blocks_that_a_connector_fills_hold_no_rows(model_path):
    """The rows there belong to earlier prompts. None of them is returned, and later prompts have all rows."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False, extra_args={ASKED: True})
    transfer = {"kv_connector": "Claims", "kv_connector_module_path": "vllm_connector", "kv_role": "kv_both"}
    generator = torch.Generator().manual_seed(1)
    fresh = [torch.randint(3, 490, (150,), generator=generator).tolist() for _ in range(5)]
    options = {"num_gpu_blocks_override": 17, "kv_transfer_config": transfer}
    with vllm_engine.engine(model_path("llama"), [*FEATURES, "eviction"], **options) as (llm, _):

        def rows_of(prompt):
            llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            (rows,) = take_hidden_states(llm).values()
            return rows

        for prompt in fresh:
            assert len(rows_of(prompt)["hidden_states"]) == 150
        assert rows_of([499, *fresh[0][:99]]) is None
        assert len(rows_of(fresh[1])["hidden_states"]) == 150


@pytest.mark.parametrize("blocks", [ROOM, TIGHT])
def test_token_wise_pooling_with_prefix_hits(model_path, blocks):
    """There is a row for each token, equal to those without hits, which are read unless a request says otherwise."""
    from vllm import PoolingParams

    asked = PoolingParams(task="token_embed", use_activation=False)

    def pool(**options):
        found, cached = [], []
        # Models that score pairs of texts need a tokenizer when the engine is made.
        with (
            mock.patch("vllm.renderers.base.BaseRenderer.get_tokenizer", return_value=mock.MagicMock(pad_token_id=0)),
            vllm_engine.engine(model_path("llama"), FEATURES, runner="pooling", convert="embed", **options) as (llm, _),
        ):
            for batch in rounds():
                outputs = []
                for number, prompt in enumerate(batch):  # `encode` needs a tokenizer
                    llm.llm_engine.add_request(f"{len(found) + number:05}", {"prompt_token_ids": prompt}, asked)
                while llm.llm_engine.has_unfinished_requests():
                    outputs += llm.llm_engine.step()
                outputs.sort(key=lambda output: output.request_id)
                found += [output.outputs.data for output in outputs]
                cached.append(sum(output.num_cached_tokens for output in outputs))
        return found, cached

    expected, cached = pool(enable_prefix_caching=False, num_gpu_blocks_override=160)
    assert not any(cached)
    found, cached = pool(num_gpu_blocks_override=blocks)
    assert sum(cached) > 200
    for prompt, rows, wanted in zip(itertools.chain(*rounds()), found, expected, strict=True):
        assert rows.shape == wanted.shape == (len(prompt), 128)
        torch.testing.assert_close(rows, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("pools", "keeping"), [(True, [0, 1, 2, 3]), (False, [0, 2])])
def test_every_rank_that_pools_keeps_rows(monkeypatch, pools, keeping):
    """All tensor-parallel ranks run the pooler. One without the rows of hits fails, as vLLM's STEP pooling does."""
    for name in ("PromptHiddenStates", "announce"):
        monkeypatch.setattr(hidden_states, name, mock.MagicMock())
    monkeypatch.setattr(hidden_states.Base, "compile_or_warm_up_model", lambda self: None)
    found = []
    for rank in range(4):
        worker = object.__new__(hidden_states.HiddenStatesWorker)
        worker.rank, worker._pc_config = rank, None
        worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
        worker.model_runner = SimpleNamespace(is_pooling_model=pools)
        worker.compile_or_warm_up_model()
        found += [rank] * (worker.pc_hidden_states is not None)
    assert found == keeping


def test_models_with_windows_alone_are_refused(model_path):
    engine = vllm_engine.engine(model_path("mistral"), FEATURES)
    with pytest.raises(ValueError, match="no layers with full attention"), engine:
        pass


def test_models_that_compute_the_window_of_a_hit_again_are_refused():
    """Such tokens see less than before, and layers after the first leave out the rest of a prompt."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowMLASpec

    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    kinds = [MLAAttentionSpec(**shape), SlidingWindowMLASpec(sliding_window=8, bounded_replay=True, **shape)]
    config = KVCacheConfig(8, [], [KVCacheGroupSpec([str(kind)], kind) for kind in kinds])
    with pytest.raises(ValueError, match="swa_bounded_replay: got a model"):
        PromptHiddenStates(SimpleNamespace(), config, ROWS)


def configuration(
    speculation=None,
    asynchronous=False,
    connector=None,
    scheduler=None,
    runner="generate",
    chunks=True,
    parallel=(),
    fast_prefill=False,
    diffusion=None,
    **more,
):
    """Return a configuration of vLLM; `more` are our options."""
    return SimpleNamespace(
        speculative_config=speculation,
        diffusion_config=diffusion,
        scheduler_config=SimpleNamespace(
            async_scheduling=asynchronous, scheduler_cls=scheduler, enable_chunked_prefill=chunks
        ),
        kv_transfer_config=connector,
        model_config=SimpleNamespace(runner_type=runner),
        parallel_config=SimpleNamespace(
            **{"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **dict(parallel)}
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
        additional_config={f"pc_hidden_states_{name}": value for name, value in more.items()},
    )


OURS = "pc.integrations.vllm.eviction.AsyncPolicyScheduler"
SERVED = [
    {},
    {"asynchronous": True},
    {"speculation": "ngram"},
    {"connector": "any", "scheduler": OURS},
    {"runner": "pooling"},
]
REFUSED = [
    ({"speculation": "ngram", "asynchronous": True}, "async_scheduling: got True with speculation"),
    ({"connector": "any"}, "needs PC_VLLM=eviction,hidden_states"),
    ({"dir": 5}, "pc_hidden_states_dir: got 5, needs the path"),
    ({"dir_bytes": 5}, "pc_hidden_states_dir_bytes: got 5 without pc_hidden_states_dir"),
    ({"dir": "/tmp", "dir_seconds": 0}, "pc_hidden_states_dir_seconds: got 0, needs a number above 0"),
    ({"dir": "/tmp", "dir_bytes": 1.5}, "pc_hidden_states_dir_bytes: got 1.5, needs an integer"),
    (
        {"runner": "pooling", "connector": "any", "scheduler": OURS},
        "got a connector, whose blocks have no rows to pool",
    ),
    ({"runner": "pooling", "chunks": False}, "enable_chunked_prefill: got False"),
    # A rank has a part of the tokens. Fast prefill leaves out layers of a prompt's tokens.
    ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size: got 2, needs 1"),
    ({"parallel": {"prefill_context_parallel_size": 4}}, "prefill_context_parallel_size: got 4, needs 1"),
    ({"fast_prefill": True}, "kv_sharing_fast_prefill: got True, needs False"),
    ({"diffusion": "some"}, "got a diffusion model"),
]


def test_configurations_that_would_store_in_wrong_slots_are_refused():
    for options in SERVED:
        hidden_states.check_hidden_states(configuration(**options))
    for options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            hidden_states.check_hidden_states(configuration(**options))
    second = configuration(runner="pooling")
    second.use_v2_model_runner = True
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER: got runner V2 with a pooling model"):
        hidden_states.check_hidden_states(second)


def test_poolers_that_join_chunks_their_own_way_are_refused():
    """A hit would leave such poolers without its rows."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.pooler.special import DispatchPooler
    from vllm.model_executor.layers.pooler.tokwise.methods import AllPool

    class OwnPooler(torch.nn.Module):
        def __init__(self, *tasks):
            super().__init__()
            self.tasks = tasks

        def get_supported_tasks(self):
            return set(self.tasks)

    check_pooler(OwnPooler("embed", "classify"))
    with set_current_vllm_config(VllmConfig()):
        joins = OwnPooler("token_classify")
        joins.method = AllPool()
        joins_other = DispatchPooler({"token_classify": joins, "token_embed": OwnPooler("token_embed")})
    check_pooler(joins)
    check_pooler(DispatchPooler({"token_classify": joins, "embed": OwnPooler("embed")}))
    for pooler in (OwnPooler("token_embed"), joins_other):
        with pytest.raises(
            ValueError, match="model: got the pooler OwnPooler, needs one on vLLM's AllPool for token_e"
        ):
            check_pooler(pooler)


def test_who_reads_hits_for_a_row_of_each_token():
    """Requests that do not decide read hits with our worker.

    A request's own choice, and other engines, stay as in vLLM.
    """
    from vllm import PoolingParams

    from pc.integrations.vllm import enable

    for _ in range(2):
        enable("hidden_states")

    def skips(task="token_embed", skip=None, ours=True):
        asked = PoolingParams(task=task, skip_reading_prefix_cache=skip)
        pooler = SimpleNamespace(task=task, use_activation=True, dimensions=None, tok_pooling_type="ALL")
        model = SimpleNamespace(pooler_config=pooler, is_matryoshka=False, hf_config=None)
        if ours:
            model.pc_pools_hits = True
        asked.verify(model)
        return asked.skip_reading_prefix_cache

    assert not skips()
    assert not skips("token_classify")
    assert skips(ours=False)
    assert skips(skip=True)
    assert not skips("embed")
    assert not skips("embed", ours=False)
    assert skips("plugin")
