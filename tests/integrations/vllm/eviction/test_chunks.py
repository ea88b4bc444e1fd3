"""Prompts in fixed chunks: what a step computes, finds and publishes does not depend on the cached tokens."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
import vllm_engine
from vllm_exact import BLOCK, ExactEngine, following, lose, preempt
from vllm_traffic import make_request

from pc.integrations.vllm.eviction.chunks import why_no_chunks

CHUNK = 64


class Watched(ExactEngine):
    """Records, for each request, which tokens every step computed."""

    def __init__(self, num_blocks: int, chunk: int | str = CHUNK, **options) -> None:
        super().__init__(num_blocks, **{"more": {"pc_chunk": chunk}} | options)
        self.parts: dict[str, list[tuple[int, int]]] = {}

    def prepare(self, output) -> None:
        for name, count in output.num_scheduled_tokens.items():
            self.parts.setdefault(name, []).append((self.begins[name], count))


def whole(begin: int, prompt: int) -> int:
    """Return the tokens of a pass that begins there: a chunk, the rest of a prompt, or one token of an answer."""
    return 1 if begin >= prompt else min(prompt, begin // CHUNK * CHUNK + CHUNK) - begin


def texts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    roots = [rng.choices(range(1000), k=500) for _ in range(2)]
    return [
        rng.choice(roots)[: rng.randrange(0, 400)] + rng.choices(range(1000), k=rng.randrange(1, 40))
        for _ in range(count)
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_pass_has_the_rows_of_a_prompt_that_is_read_alone(asynchronous):
    """Evictions, preemptions and aborts happen, and answers are read again as prompts."""
    rng, engine = random.Random(5), Watched(70, asynchronous=asynchronous)
    waiting, lengths, said = texts(30, 5), {}, 0
    while waiting or engine.scheduler.requests:
        if waiting and len(engine.scheduler.requests) < 5:
            tokens, name = waiting.pop(), str(len(lengths))
            lengths[name] = tokens
            engine.add(name, tokens, generate=rng.choice([1, 4, 30]))
        engine.step()
        lose(engine.scheduler, rng.randrange(2), rng)
        running = [each.request_id for each in engine.scheduler.running]
        if running and rng.random() < 0.1:
            preempt(engine.scheduler, rng.choice(running))
        for name in [name for name, tokens in engine.said.items() if name not in engine.scheduler.requests]:
            tokens, answer = lengths[name], engine.said.pop(name)
            assert answer == following(tokens, len(answer))
            said += 1
            if len(answer) == 30:
                waiting.append(tokens + answer)
    assert said > 30
    begun = 0
    for name, parts in engine.parts.items():
        for begin, count in parts:
            assert count == whole(begin, len(lengths[name])), (name, begin, count)
            begun += begin > 0 and (begin, count) == parts[0]
    assert begun > 3, "hits"


def test_only_whole_chunks_of_prompts_are_found_again():
    """A prompt's last chunk and its answer have other shapes, so an equal prompt computes them as a chunk."""
    engine, (tokens,) = Watched(90), texts(1, 1)
    tokens = (tokens * 9)[: 2 * CHUNK + 40]
    engine.add("first", tokens, generate=2 * CHUNK)
    engine.run()
    for name, more, begin in (
        ("longer", tokens + engine.said["first"] + [1], 2 * CHUNK),
        ("same", tokens, 2 * CHUNK),
        ("chunks", tokens[: 2 * CHUNK], CHUNK),
        ("block", tokens[: CHUNK + BLOCK + 1], CHUNK),
        ("again", tokens + engine.said["first"] + [1], 4 * CHUNK),
    ):
        engine.add(name, more)
        engine.run()
        assert engine.parts[name][0][0] == begin, name
        assert engine.said[name] == following(more, 4)


def test_later_turns_of_a_session_are_not_found_again():
    """Their prompts include answers, whose tokens were computed alone, and do not begin with a chunk."""
    engine, (tokens,) = Watched(90), texts(1, 1)
    tokens, more = (tokens * 9)[: CHUNK + 40], tokens[:CHUNK]
    for part in (tokens, more):
        request = make_request("session", list(part), BLOCK, None, 50, ignore_eos=True)
        request.resumable = True
        engine.said.setdefault("session", [])
        engine.scheduler.add_request(request)
        for _ in range(60):
            engine.step()
    longer = tokens + engine.said["session"][:49] + more + [1]
    engine.add("longer", longer)
    for _ in range(60):
        engine.step()
    assert engine.parts["longer"][0] == (CHUNK, CHUNK)
    assert engine.said["longer"] == following(longer, 4)


def test_a_chunk_waits_for_a_step_with_room():
    """With 130 tokens in a step, two chunks fit, or the answers of two others."""
    engine = Watched(200, budget=2 * CHUNK + 2)
    for name in "abcd":
        engine.add(name, texts(1, ord(name))[0] + [1] * 300, generate=40)
    engine.run()
    assert all(len(answer) == 40 for answer in engine.said.values())


@pytest.mark.parametrize(
    ("asked", "invariant", "chunk"),
    [("", "0", None), ("", "1", 128), ("0", "1", None), (0, "1", None), (192, "0", 192)],
)
def test_who_gets_chunks(monkeypatch, asked, invariant, chunk):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    scheduler = Watched(40, asked, budget=256).scheduler
    assert getattr(scheduler.chunks, "chunk", None) == chunk
    assert (scheduler.jumps is None) == (chunk is not None)
    find = scheduler.kv_cache_manager.coordinator.find_longest_cache_hit
    assert (type(find.__self__).__name__ == "FixedChunks") == (chunk is not None)


def test_the_environment_asks_too(monkeypatch):
    monkeypatch.setenv("PC_VLLM_CHUNK", "96")
    assert Watched(40, "").scheduler.chunks.chunk == 96


@pytest.mark.parametrize("asked", [100, -64, "many"])
def test_chunks_of_no_whole_blocks_are_refused(asked):
    with pytest.raises(ValueError, match=f"pc_chunk: got '{asked}', needs a multiple of block_size=16"):
        Watched(40, asked)


def test_engines_without_chunks_say_why(warnings):
    assert Watched(40, 192, budget=160).scheduler.chunks is None
    assert any("under steps of 160 tokens, fewer than a chunk's 192" in line for line in warnings)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"num_lookahead_tokens": 2}, "speculative decoding"),
        ({"vllm_config.speculative_config": "ngram"}, "speculative decoding"),
        ({"connector": "tier"}, "a KV connector"),
        ({"has_mamba_layers": True}, "layers with states"),
        ({"prefix_replay_tokens": 128}, "windows that hits compute again"),
        ({"vllm_config.model_config": SimpleNamespace(is_multimodal_model=True)}, "images, sound or an encoder"),
        ({"is_encoder_decoder": True}, "images, sound or an encoder"),
        (  # as vLLM sets it for these models
            {"is_encoder_decoder": True, "scheduler_config.enable_chunked_prefill": False},
            "images, sound or an encoder",
        ),
        ({"use_pp": True}, "pipeline parallelism"),
        ({"dcp_world_size": 2}, "context parallelism"),
        ({"scheduler_config.enable_chunked_prefill": False}, "prefill in one piece"),
        ({"scheduler_config.long_prefill_token_threshold": 32}, "steps of 32 tokens, fewer than a chunk's 64"),
    ],
    ids=str,
)
def test_what_is_not_served_by_name(monkeypatch, change, reason):
    scheduler = Watched(40, 0).scheduler
    for path, value in change.items():
        *owners, name = path.split(".")
        monkeypatch.setattr(functools.reduce(getattr, owners, scheduler), name, value, raising=False)
    assert why_no_chunks(scheduler, CHUNK) == reason


PROMPTS, STEPS = 16, 6


def answers(llm, prompts):
    """Return tokens, the log-probabilities of the five likeliest, and cached tokens; requests run one by one."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=5)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    steps = [[{token: p.logprob for token, p in step.items()} for step in f.outputs[0].logprobs] for f in found]
    return steps, sum(f.num_cached_tokens for f in found)


def check_bits(path, dtype, vocabulary, seed=1):
    """Compare bit by bit with an engine without a cache that uses the same chunks."""
    rng = random.Random(seed)
    prompts = [[3 + token * 7 % (vocabulary - 3) for token in text[:440]] for text in texts(PROMPTS, seed)]
    options = {
        "max_model_len": 512, "max_num_seqs": 1, "max_num_batched_tokens": 192, "num_gpu_blocks_override": 40,
        "dtype": dtype, "additional_config": {"pc_chunk": 128}, "features": ["attention", "eviction"],
    }  # fmt: skip
    with vllm_engine.engine(path, **options, enable_prefix_caching=False) as (llm, _):
        cold, cached = answers(llm, prompts)
        assert cached == 0
    with vllm_engine.engine(path, **options) as (llm, _):
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        for _ in range(2):
            order = rng.sample(range(PROMPTS), PROMPTS)
            found, cached = answers(llm, [prompts[at] for at in order])
            assert found == [cold[at] for at in order]
            assert cached >= 3 * 128
            lose(scheduler, 5, rng)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_bits_in_the_engine(model_path, name, dtype):
    check_bits(model_path(name), dtype, 500)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_trained_model(model_path, trained_model, dtype):
    """SmolLM2, in both types."""
    check_bits(str(trained_model), dtype, 40_000)
