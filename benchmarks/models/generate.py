"""Generation on a GPU with a random Llama of a billion parameters: without and with the cache, and in CUDA graphs."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..harness.conditions import device_folder
from ..harness.experiment import Experiment, option
from ..harness.timing import TokenClock, by_turns
from .load import random_llama

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "heads": (32, 8)},
    "cpu": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "heads": (4, 2)},
}
"""Of the Llama for each kind of device; that for a GPU has the shape of Llama 3.2 1B."""
PROMPTS = {"cuda": (8192, 64, 128, 6), "cpu": (64, 16, 4, 2)}
"""Tokens that all prompts begin with, tokens that only one has, tokens to generate, and the number of prompts."""
STATIC = "transformers, static cache and CUDA graphs"
"""A way that may fail; a row says why."""


class Answer(NamedTuple):
    """The outcome of one call; `rate` is the number of tokens a second after the first one."""

    tokens: list[int]
    first: float
    rate: float
    reused: str = ""


def _ask(generate: Any, prompt: torch.Tensor, new_tokens: int) -> Answer:
    clock = TokenClock(time.perf_counter)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    options = {"do_sample": False, "max_new_tokens": new_tokens, "streamer": clock}
    out = generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)
    arrived = clock.times[1:]
    rate = (len(arrived) - 1) / (arrived[-1] - arrived[0])
    return Answer(out[0, prompt.shape[1] :].tolist(), arrived[0] - start, rate)


def rows(given: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield a row for each request about one shared prompt and each way, which take turns; and rows with notes."""
    from pc.integrations.huggingface import enable_prefix_caching

    is_gpu, (shared, own, new_tokens, requests) = given.device == "cuda", PROMPTS[given.device]
    size, dtype = ("1B", torch.bfloat16) if is_gpu else ("tiny", torch.float32)
    options = {"vocab_size": 128256 if is_gpu else 512, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    model = random_llama(**SIZES[given.device], **options, device=given.device, dtype=dtype)
    generator, notes = torch.Generator().manual_seed(0), dict[str, str]()
    prefix = torch.randint(1, 512, (1, shared), generator=generator)
    # The first request warms up, on tokens that no other begins with.
    heads = itertools.chain([torch.randint(1, 512, (1, shared), generator=generator)], itertools.repeat(prefix))
    ways = {"transformers": functools.partial(type(model).generate, model)}
    cached = {"pc": model}
    if is_gpu:
        ways[STATIC] = functools.partial(ways["transformers"], cache_implementation="static")
        cached["pc, eager"] = copy.deepcopy(model)
    blocks, handles = -(-(shared + (own + new_tokens) * (requests + 1)) // 16) + 64, {}

    def draw() -> torch.Tensor:
        prompt = torch.cat([next(heads), torch.randint(1, 512, (1, own), generator=generator)], dim=1)
        return prompt.to(given.device)

    def ask(name: str, prompt: torch.Tensor) -> Answer | None:
        try:
            answer = _ask(ways[name], prompt, new_tokens)
        except Exception as error:
            if name != STATIC:
                raise
            notes[name] = f"fails: {str(error).splitlines()[0][:120]}"
            return None
        reports = handles[name].last_requests if name in handles else None
        return answer if reports is None else answer._replace(reused=str(sum(each.cached_tokens for each in reports)))

    with contextlib.ExitStack() as stack:
        for name, its in cached.items():
            graphs = None if name == "pc" else False
            handles[name] = stack.enter_context(enable_prefix_caching(its, num_blocks=blocks, cuda_graphs=graphs))
            if handles[name].unsupported:
                raise RuntimeError(f"pc does not serve this model: {handles[name].unsupported}")
            ways[name] = its.generate
        found = by_turns(ask, sorted(ways), requests + 1, draw)
        if is_gpu and (why := handles["pc"].graphs.reason):
            notes["pc"] = f"without CUDA graphs: {why}"
    common = {"model": f"Llama {size}, random weights", "dtype": str(dtype).removeprefix("torch.")}
    common |= {"prompt_tokens": str(shared + own), "new_tokens": str(new_tokens)}
    for number, name in itertools.product(range(1, requests + 1), found):
        answer, plain = found[name][number], found["transformers"][number]
        if answer and plain:
            row = {"way": name, "request": str(number), "first_token_s": f"{answer.first:.6f}"}
            row |= {"tokens_per_s": f"{answer.rate:.2f}", "reused_tokens": answer.reused}
            yield row | {"same_as_transformers": str(answer.tokens == plain.tokens)} | common
    yield from ({"way": name, "note": text} | common for name, text in notes.items())


main = Experiment(
    lambda given: f"../{device_folder(given.device)}/generate.csv",
    rows,
    {"--device": option("cuda", choices=["cuda", "cpu"])},
    packages=("transformers",),
).main
