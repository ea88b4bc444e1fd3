"""Each option of generate alone, and a short random walk over them; `make walk` takes 2,000 steps."""

from __future__ import annotations

import datetime
import os
import warnings

import pytest

pytest.importorskip("transformers")

from generate_cases import prompt
from generate_walk import KINDS, OPTIONS, Walk, walk

from pc.integrations.huggingface import api

NOT_SERVED = {
    *("use_cache", "cache_implementation", "cache_of_own", "filled_cache", "own_loop", "embeddings"),
    *("positions_elsewhere", "contrastive", "assistant_early_exit"),  # the last one's drafts are calls within a call
}
"""Options whose calls fall back to the model's own generate."""
TOGETHER = ["streamer + use_cache", "padded_left + prefill_chunk_size", "prompt_lookup_num_tokens + prefill_chunk_size"]


def test_each_option_of_generate_gives_the_same_cold_and_warm() -> None:
    found = Walk(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.enable("Llama", {}, {}, documents=False)
        for number, name in enumerate([*OPTIONS, *TOGETHER]):
            for seed in range(2):
                found.compare(prompt(40, number), name.split(" + "), seed)
    assert found.differing == []
    alone = {name for name in found.fell_back if " + " not in name}
    assert alone == NOT_SERVED or (api.look().disabled and alone > NOT_SERVED)  # of an older transformers
    assert found.handle.stats().hit_tokens > 25 * len(OPTIONS)


def test_options_of_generate_give_the_same_over_a_cache() -> None:
    seed = int(os.environ.get("SEED") or datetime.date.today().strftime("%Y%m%d"))
    found = walk(60, seed, KINDS["plain"])
    assert found.differing == [], f"seed {seed}"
    assert found.counts["same"] > 30
    assert len(OPTIONS) >= 60
