"""Each option of generate alone, and a short random walk over them; `make walk` takes 2,000 steps."""

from __future__ import annotations

import datetime
import os
import re
import warnings

import pytest
import torch
from generate_cases import CACHE, prompt
from generate_walk import DOCUMENT, KINDS, OPTIONS, Walk, walk
from packaging.version import Version

from pc.integrations.huggingface import api

NOT_SERVED = {
    *("use_cache", "cache_implementation", "cache_of_own", "filled_cache", "own_loop", "embeddings"),
    *("positions_elsewhere", "contrastive", "assistant_early_exit"),  # the last one's drafts are calls within a call
}
"""Options whose calls fall back to the model's own generate."""
REFUSED = {
    **{name: name for name in ("use_cache", "cache_implementation", "assistant_early_exit", "assistant_model")},
    **dict.fromkeys(("padded_left", "padded_alone", "padded_right", "mask_with_holes"), "attention_mask"),
    **{"cache_of_own": CACHE, "filled_cache": CACHE, "own_loop": "custom_generate", "embeddings": "inputs_embeds"},
    "positions_elsewhere": "position_ids",
}
"""Options that are refused over a document, and the argument that the error names first."""
TOGETHER = ["streamer + use_cache", "padded_left + prefill_chunk_size", "prompt_lookup_num_tokens + prefill_chunk_size"]


@pytest.mark.quick
@pytest.mark.parametrize("document", [False, True])
def test_each_option_of_generate_gives_the_same_cold_and_warm(document: bool) -> None:
    found = Walk(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.enable("Llama", {}, {}, document)
        for number, name in enumerate([*OPTIONS, *TOGETHER]):
            ids = torch.cat([found.text[:, :DOCUMENT], prompt(9, number)], 1) if document else prompt(40, number)
            found.compare(ids, name.split(" + "), 7, times=2)
    alone = {name for name in found.not_served if " + " not in name}
    assert found.differing == []
    if Version(api.look().version) >= Version("5.23"):  # older ones refuse other options
        assert {re.split(r"\W", reason)[0] for reason in found.refused} == ({*REFUSED.values()} if document else set())
        assert alone == ({*REFUSED} if document else NOT_SERVED)
    assert document or found.handle.stats().hit_tokens > 25 * len(OPTIONS)


@pytest.mark.parametrize("calls", [30, pytest.param(60, marks=pytest.mark.slow)])
def test_options_of_generate_give_the_same_over_a_cache(calls: int) -> None:
    seed = int(os.environ.get("SEED") or datetime.date.today().strftime("%Y%m%d"))
    found = walk(calls, seed, KINDS["plain"])
    assert found.differing == [], f"seed {seed}"
    assert found.counts["same"] > calls // 2
    assert len(OPTIONS) >= 60
