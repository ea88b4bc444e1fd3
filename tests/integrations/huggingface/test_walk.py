"""A short random walk over the options of generate, another each day; `make walk` takes 2,000 steps."""

from __future__ import annotations

import datetime
import os

import pytest

pytest.importorskip("transformers")

from generate_walk import KINDS, OPTIONS, walk


def test_options_of_generate_give_the_same_over_a_cache() -> None:
    seed = int(os.environ.get("SEED") or datetime.date.today().strftime("%Y%m%d"))
    found = walk(60, seed, KINDS["plain"])
    assert found.differing == [], f"seed {seed}"
    assert found.counts["same"] > 30
    assert len(OPTIONS) >= 60
