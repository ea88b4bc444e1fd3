"""Continuous batching: transformers' own generate_batch beside the same call over our blocks.

Calls on random models alternate in one process, and their tokens are compared in every round. Times are medians of CPU
time. `shared`: prompts about one new document. `again`: the same prompts once more. `own`: prompts that share nothing.
Transformers gets pages of its default size and of 16 tokens, and for `again` a manager that it keeps between calls.
OMP_NUM_THREADS threads (1).

Examples:
    python -m benchmarks batching
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..harness.conditions import version
from ..harness.experiment import Experiment
from ..harness.timing import by_turns

ROUNDS = 3
REQUESTS, DOCUMENT, OWN, NEW = 8, 512, 24, 24
TOKENS = 8192
"""Tokens that each cache holds."""
SIZES = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
PC, LARGE, SMALL = "pc", "transformers, pages of 256", "transformers, pages of 16"
PAGES = {LARGE: 256, SMALL: 16}


def build_models() -> dict[str, Any]:
    """Return small models with random weights: full attention alone, and windows beside it."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 4096}
    given = SIZES | heads | {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    torch.manual_seed(0)
    return {
        "Llama, full attention": LlamaForCausalLM(LlamaConfig(**given)).eval(),
        "Gemma 3, windows of 128": Gemma3ForCausalLM(
            Gemma3TextConfig(**given, sliding_window=128, layer_types=kinds, query_pre_attn_scalar=32)
        ).eval(),
    }


def draw(length: int) -> list[int]:
    """Return random tokens."""
    drawn: list[int] = torch.randint(1, SIZES["vocab_size"], (length,)).tolist()
    return drawn


def ask(model: Any, way: str, prompts: list[list[int]], keep: bool) -> tuple[float, list[list[int]]]:
    """Return the CPU seconds of one call and its answers."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = ContinuousBatchingConfig(max_batch_tokens=1024)
    if way != PC:
        settings.page_size, settings.num_blocks = PAGES[way], TOKENS // PAGES[way]
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    begin = time.process_time()
    outputs = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=settings, persistent_manager=keep
    )
    took = time.process_time() - begin
    return took, [output.generated_tokens for output in outputs.values()]


def draw_prompts() -> dict[str, list[list[int]]]:
    """Return the prompts of a round, by workload."""
    document = draw(DOCUMENT)
    shared = [document + draw(OWN) for _ in range(REQUESTS)]
    return {"shared": shared, "again": shared, "own": [draw(DOCUMENT // 4) for _ in range(REQUESTS)]}


class Asked(NamedTuple):
    """The outcome of one call."""

    seconds: float
    answers: list[list[int]]
    hit_tokens: int


def measure(model: Any) -> list[dict[str, Any]]:
    """Return the rows of one model, one for each workload and way."""
    from pc.integrations.huggingface import enable_continuous_batching

    with enable_continuous_batching(model, num_blocks=TOKENS // 16) as batching:
        replacement = vars(model)["init_continuous_batching"]

        def ask_all(way: str, prompts: dict[str, list[list[int]]]) -> dict[str, Asked]:
            if way == PC:
                vars(model)["init_continuous_batching"] = replacement
            else:
                vars(model).pop("init_continuous_batching", None)
            found = {}
            for work, asked in prompts.items():
                before = batching.stats().hit_tokens
                took, answers = ask(model, way, asked, way != PC and work != "own")
                found[work] = Asked(took, answers, batching.stats().hit_tokens - before)
                if work == "again":
                    model.destroy_cached_continuous_batching_manager()
            return found

        found = by_turns(ask_all, (PC, LARGE, SMALL), ROUNDS + 1, draw_prompts)
        vars(model)["init_continuous_batching"] = replacement
    rows = []
    for work, way in itertools.product(("shared", "again", "own"), found):
        calls, expected = ([asked[work] for asked in found[name]] for name in (way, SMALL))
        took = [call.seconds for call in calls[1:]]  # the first warms up
        row = {"workload": work, "way": way, "cpu_s": f"{statistics.median(took):.4f}", "calls": len(took)}
        row["hit_tokens"] = calls[-1].hit_tokens if way == PC else ""
        row["same_tokens"] = all(a.answers == b.answers for a, b in zip(calls, expected, strict=True))
        rows.append(row)
    return rows


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, workload and way."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    sizes = {"requests": REQUESTS, "document": DOCUMENT, "own": OWN, "new_tokens": NEW}
    for name, model in build_models().items():
        common = {"model": name, **sizes, "transformers": version("transformers")}
        yield from (common | row for row in measure(model))


main = Experiment("batching.csv", rows).main
