"""Generation on a GPU with a random Llama of a billion parameters: without and with the cache, and in CUDA graphs."""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from typing import Any

import torch

from ..harness.conditions import device_folder
from ..harness.experiment import Experiment, option
from ..harness.timing import TokenClock
from .load import random_llama

SIZES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "heads": (32, 8)},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "heads": (4, 2)},
}
"""Of Llamas; "1B" has the shape of Llama 3.2 1B."""


def _ask(generate: Any, prompt: torch.Tensor, new_tokens: int) -> tuple[list[int], float, float]:
    """Return the tokens, the seconds to the first token, and tokens a second after it."""
    clock = TokenClock(time.perf_counter)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=new_tokens,
        streamer=clock,
    )
    arrived = clock.times[1:]
    rate = (len(arrived) - 1) / (arrived[-1] - arrived[0]) if len(arrived) > 1 else float("nan")
    return out[0, prompt.shape[1] :].tolist(), arrived[0] - start, rate


def run_generate(
    size: str, device: torch.device, shared: int, own: int, new_tokens: int, requests: int
) -> list[dict[str, str]]:
    """Ask `requests` times about one shared prompt, in turns without and with the cache.

    Args:
        size: "1B" or "tiny".
        device: Device of the model, which has bfloat16 on a GPU and float32 on a CPU.
        shared: Tokens that all prompts begin with.
        own: Tokens that only one prompt has.
        new_tokens: Tokens to generate.
        requests: Number of prompts.

    Returns:
        A row for each way and request, and rows with notes.
    """
    from pc.integrations.huggingface import enable_prefix_caching

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    options = {"vocab_size": 128256 if size == "1B" else 512, "max_position_embeddings": 32768}
    model = random_llama(**SIZES[size], **options, tie_word_embeddings=True, device=device, dtype=dtype)
    plain = type(model).generate
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(1, 512, (1, shared), generator=generator)
    ways: dict[str, Any] = {"transformers": lambda **given: plain(model, **given)}
    if device.type == "cuda":
        ways["transformers, static cache and CUDA graphs"] = lambda **given: plain(
            model, cache_implementation="static", **given
        )
    rows: list[dict[str, str]] = []
    notes: dict[str, str] = {}
    blocks = -(-(shared + (own + new_tokens) * (requests + 1)) // 16) + 64
    cached = {"pc": model}
    if device.type == "cuda":
        cached["pc, eager"] = copy.deepcopy(model)
    with contextlib.ExitStack() as stack:
        handles = {}
        for name, own_model in cached.items():
            graphs = None if name == "pc" else False
            handles[name] = stack.enter_context(enable_prefix_caching(own_model, num_blocks=blocks, cuda_graphs=graphs))
            if handles[name].unsupported:
                raise RuntimeError(f"pc does not serve this model: {handles[name].unsupported}")
            ways[name] = own_model.generate
        for number in range(requests + 1):  # the first warms up, on tokens that no other begins with
            head = torch.randint(1, 512, (1, shared), generator=generator) if number == 0 else prefix
            prompt = torch.cat([head, torch.randint(1, 512, (1, own), generator=generator)], dim=1).to(device)
            answers, reused = {}, {}
            for name in sorted(ways, reverse=bool(number % 2)):
                try:
                    answers[name] = _ask(ways[name], prompt, new_tokens)
                except Exception as error:
                    if name in handles or name == "transformers":
                        raise
                    notes[name] = f"fails: {str(error).splitlines()[0][:120]}"
                if name in handles:
                    reused[name] = str(sum(request.cached_tokens for request in handles[name].last_requests))
            for name, (tokens, first, rate) in answers.items() if number else ():
                row = {"way": name, "request": str(number), "first_token_s": f"{first:.6f}"}
                row |= {"tokens_per_s": f"{rate:.2f}", "reused_tokens": reused.get(name, "")}
                rows.append(row | {"same_as_transformers": str(tokens == answers["transformers"][0])})
        if device.type == "cuda" and (why := handles["pc"].graphs.reason):
            notes["pc"] = f"without CUDA graphs: {why}"
    rows += [{"way": name, "note": text} for name, text in notes.items()]
    common = {"model": f"Llama {size}, random weights", "dtype": str(dtype).removeprefix("torch.")}
    common |= {"prompt_tokens": str(shared + own), "new_tokens": str(new_tokens)}
    return [row | common for row in rows]


def rows(given: argparse.Namespace) -> list[dict[str, str]]:
    """Return the rows of a GPU, or of a small model on the CPU."""
    device = torch.device(given.device)
    if given.device == "cpu":
        return run_generate("tiny", device, 64, 16, 4, 2)
    return run_generate("1B", device, 8192, 64, 128, 6)


main = Experiment(
    lambda given: f"../{device_folder(given.device)}/generate.csv",
    rows,
    {"--device": option("cuda", choices=["cuda", "cpu"])},
    packages=("transformers",),
).main
