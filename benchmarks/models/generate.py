"""End to end: transformers' generate on a random Llama, without and with the cache, as both are and in CUDA graphs."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ..harness.conditions import conditions
from ..harness.tables import write_rows
from ..harness.timing import TokenClock
from .load import random_llama

SIZES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "heads": (32, 8)},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "heads": (4, 2)},
}
"""Of Llamas; "1B" has the shape of Llama 3.2 1B."""


def _ask(generate: Any, prompt: torch.Tensor, new_tokens: int) -> tuple[list[int], float, float]:
    """Tokens, seconds to the first of them, and tokens a second after it."""
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
    """Asks `requests` times about one shared prompt, in turns without and with the cache.

    Args:
        size: "1B" or "tiny".
        device: Where the model runs, in bfloat16 on a GPU and float32 on a CPU.
        shared: Tokens that all prompts begin with.
        own: Tokens of each prompt's own.
        new_tokens: To generate.
        requests: How many prompts.

    Returns:
        A row per way and request.
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
    told: dict[str, str] = {}
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
                    told[name] = f"fails: {str(error).splitlines()[0][:120]}"
                if name in handles:
                    reused[name] = str(sum(request.cached_tokens for request in handles[name].last_requests))
            for name, (tokens, first, rate) in answers.items() if number else ():
                row = {
                    "way": name,
                    "request": str(number),
                    "first_token_s": f"{first:.6f}",
                    "tokens_per_s": f"{rate:.2f}",
                }
                row["same_as_transformers"] = str(tokens == answers["transformers"][0])
                rows.append(row | ({"reused_tokens": reused[name]} if name in reused else {}))
        if device.type == "cuda" and (why := handles["pc"].graphs.reason):
            told["pc"] = f"without CUDA graphs: {why}"
    rows += [{"way": name, "note": text} for name, text in told.items()]
    common = {
        "model": f"Llama {size}, random weights",
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": str(shared + own),
        "new_tokens": str(new_tokens),
    }
    return [row | common | conditions(device.type, "transformers") for row in rows]


def save_generate(path: Path, rows: list[dict[str, str]]) -> None:
    """Writes the rows, with medians of later requests last in the console."""
    columns = ["way", "request", "first_token_s", "tokens_per_s", "reused_tokens", "same_as_transformers", "note"]
    write_rows(path, rows, columns)
    for way in dict.fromkeys(row["way"] for row in rows):
        timed = [row for row in rows if row["way"] == way and row.get("request", "1") != "1"]
        if timed:
            first, rate = (statistics.median(float(row[c]) for row in timed) for c in ("first_token_s", "tokens_per_s"))
            print(f"{way}: first token {first:.3f} s, then {rate:.1f} tokens a second (medians)")


def main(path: Path, dry: bool) -> int:
    """Measure on a GPU, or small on the CPU, and write the rows."""
    kind = torch.device("cpu" if dry else "cuda")
    save_generate(path, run_generate("tiny", kind, 64, 16, 4, 2) if dry else run_generate("1B", kind, 8192, 64, 128, 6))
    return 0
