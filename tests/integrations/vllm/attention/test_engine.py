"""The attention backend in vLLM's engine gives the tokens of vLLM's own compiled CPU backend."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import vllm_engine
from vllm_models import WINDOW

import pc
from pc.integrations.vllm import features
from pc.triton_ops._core.runtime import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels in the interpreter: test_interpreter.py")

LENGTHS = (57, 33, 100, 200)


def prompts():
    """Return prompts longer than a step's tokens, and one that shares another's first blocks."""
    made = vllm_engine.random_prompts(1, *LENGTHS)
    return [*made, made[0][:48] + made[1]]


def altered(prompt):
    """Return the prompt with one token changed: the first, and tokens on both sides of block boundaries."""
    return [[*prompt[:i], 3 + (prompt[i] - 2) % 490, *prompt[i + 1 :]] for i in (0, 15, 31, 32, 56)]


def run(path, ours, **options):
    """Return an engine's answers: the same prompts twice, samples, prompts with one changed token, a full cache."""
    with vllm_engine.engine(path, ["attention"] if ours else [], **options) as (llm, seen):
        cold, missed = vllm_engine.generate(llm, prompts())
        warm, hits = vllm_engine.generate(llm, prompts())
        torch.manual_seed(7)  # vLLM on a CPU supports no seed of a request with chunked prompts
        samples, _ = vllm_engine.generate(llm, prompts()[:2], n=3, temperature=0.8)
        changed, _ = vllm_engine.generate(llm, altered(prompts()[0]))
        long, _ = vllm_engine.generate(llm, [prompt[:60] for prompt in prompts()], max_tokens=60)
    assert cold == warm
    assert len({str(tokens) for tokens in [cold[0], *changed]}) == 6, "the tokens do not depend on the prompt"
    return {"cold": cold, "samples": samples, "changed": changed, "long": long, "cached": [missed, hits]}, seen


# These are attention layers, with so few blocks that requests are preempted.
CASES = {
    "llama": (2, 10),
    "qwen3": (2, 10),
    "mistral": (2, 10),
    "gemma2": (4, 18),
    "gemma3": (6, 54),
    "gpt_oss": (4, 18),
    "granite_hybrid": (1, 13),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_compiled_backend(model_path, name):
    path = model_path(name)
    layers, blocks = CASES[name]
    theirs, seen = run(path, False, num_gpu_blocks_override=blocks)
    assert not seen["attention"]
    ours, seen = run(path, True, num_gpu_blocks_override=blocks)
    assert ours == theirs
    assert seen["attention"] == layers * seen["steps"]
    assert sum(ours["cached"][1]) > 0
    assert seen["preemptions"] > 0


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention(model_path, name):
    """The tokens are those of vLLM's kernel, whose platform has neither chunks nor prefix caching for these models."""

    def ask(llm):
        answers = [vllm_engine.generate(llm, asked)[0] for asked in (prompts(), altered(prompts()[0]))]
        return answers, features.describe(llm.llm_engine.vllm_config)

    # If a processor has AMX, vLLM's kernel for it takes only bfloat16.
    options = {"max_num_batched_tokens": 512, "block_size": 16, "attention_backend": "CPU_MLA"}
    ((theirs, plain), unseen), ((ours, described), seen) = vllm_engine.both(model_path(name), ask, **options)
    assert ours == theirs
    assert len({str(tokens) for tokens in [ours[0][0], *ours[1]]}) == 6, "the tokens do not depend on the prompt"
    assert ("LatentAttentionBackend as CPU_MLA" in plain, bool(unseen["latent"])) == (False, False)
    assert ("LatentAttentionBackend as CPU_MLA" in described, bool(seen["latent"])) == (True, True)
    assert not seen["attention"]


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def repeated():
    """Return prompts from which drafts are taken, so that some are accepted and some are rolled back."""
    piece = prompts()[0][:20]
    return [piece * 4 + piece[:7], piece * 2, prompts()[2]]


# Models, and options of our engine alone. Drafts of a model with state-space layers crash vLLM's CPU build, with its
# own attention too. The compiled backend does not prefer these block sizes.
SCENARIOS = [
    ("bloom", {}, prompts),
    *((name, {"speculative_config": DRAFTS}, repeated) for name in CASES if name != "granite_hybrid"),
    *(("llama", {"block_size": size}, prompts) for size in (16, 48)),
]


@pytest.mark.parametrize(
    ("name", "options", "asked"), SCENARIOS, ids=lambda each: getattr(each, "__name__", str(each)[:40])
)
def test_tokens_with_an_option(model_path, name, options, asked):
    """The tokens are those of vLLM's own attention without the option, also from the cache."""

    def ask(llm):
        return [vllm_engine.generate(llm, asked(), max_tokens=40) for _ in range(2)]

    (theirs, unseen), (ours, seen) = vllm_engine.both(model_path(name), ask, options)
    assert [answers for answers, _ in ours] == [theirs[0][0]] * 2
    assert not unseen["attention"]
    assert seen["attention"] > 0
    assert (seen["drafts"] > 0) == ("speculative_config" in options)
    if "block_size" in options:
        assert ours[1][1][3] == 199 // options["block_size"] * options["block_size"]


@pytest.mark.slow
def test_a_trained_model_says_the_same(model_path, trained_model):
    from transformers import AutoTokenizer

    from pc.demo import _models, _workloads

    tokenizer = AutoTokenizer.from_pretrained(trained_model)
    text = _workloads.between(_models.read_document(), "Article V\n", "Article VI\n")
    asked = [tokenizer.encode(f"{text}\n\nQ: {question}\nA:") for question in _workloads.QUESTIONS[3:5]]

    def ask(llm):
        return [vllm_engine.generate(llm, asked) for turn in range(2)]

    options = {"max_model_len": 512, "max_num_batched_tokens": 128}
    (theirs, _), (ours, seen) = vllm_engine.both(str(trained_model), ask, **options)
    assert ours == theirs
    assert seen["attention"] > 0
    assert sum(ours[1][1]) > 0, "the second time from the cache"


def test_float8_caches(model_path):
    """The tokens are those of a float32 cache whose entries were rounded to float8.

    VLLM's CPU kernel rounds differently.
    """
    path = model_path("llama")

    def write_rounded(key, value, *args):
        pc.reshape_and_cache(*(x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value)), *args)

    found = []
    for dtype in ("fp8", "auto"):
        spy = write_rounded if dtype == "auto" else pc.reshape_and_cache
        with (
            mock.patch("pc.integrations.vllm.attention.backend.reshape_and_cache", spy),
            vllm_engine.engine(path, ["attention"], kv_cache_dtype=dtype) as (llm, seen),
        ):
            found.append(vllm_engine.generate(llm, prompts())[0])
            assert seen["attention"] > 0
    with vllm_engine.engine(path, ["attention"]) as (llm, _):
        found.append(vllm_engine.generate(llm, prompts())[0])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 with a model in torch.float32 not supported"),
    ],
)
def test_what_is_not_served_is_refused_by_name(model_path, options, message):
    engine = vllm_engine.engine(model_path("llama"), ["attention"], **options)
    with pytest.raises(ValueError, match=message), engine:
        pass


def test_a_window_is_seen(model_path):
    """If a model has only windows, a token far behind the window does not matter, so the window is not ignored."""
    path = model_path("mistral")
    prompt = prompts()[3]
    other = [5 if prompt[0] != 5 else 6, *prompt[1:]]
    assert len(prompt) > 2 * WINDOW
    with vllm_engine.engine(path, ["attention"], enable_prefix_caching=False) as (llm, _):
        found, _ = vllm_engine.generate(llm, [prompt, other])
    assert found[0] == found[1]
