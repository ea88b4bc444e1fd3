"""The benchmark of compressed documents: the bytes and times that it reports."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from compression_cases import CONTEXT
from generate_cases import LLAMA

from benchmarks.harness import tables
from benchmarks.models import compressed
from pc.integrations.huggingface import enable_prefix_caching


@pytest.mark.quick
@pytest.mark.parametrize("steps", [0, 2])
def test_a_row(steps: int) -> None:
    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=16) as handle:
        row = compressed.measure(handle, model, CONTEXT, 0.5, steps)
    assert row["tokens"] == str(200 - compressed.QUESTION)
    assert int(row["dense_bytes"]) == 2 * 2 * 2 * 16 * 4 * 184  # sides, layers, heads, head_dim, bytes, tokens
    assert 0.5 * int(row["dense_bytes"]) < int(row["held_bytes"]) < int(row["peak_bytes"])
    assert ("pc_ms" in row) == bool(steps)
    assert all(float(row[f"{way}_ms"]) > 0 for way in ("plain", "pc") if steps)


@pytest.mark.quick
def test_rows_hold_half() -> None:
    rows = tables.read_rows(tables.RESULTS / "cpu" / "compressed.csv")
    assert {row["budget"] for row in rows} == {"0.5"}
    for row in rows:
        assert int(row["held_bytes"]) <= 0.55 * int(row["dense_bytes"])
        assert int(row["peak_bytes"]) <= 0.6 * int(row["dense_bytes"])


@pytest.mark.quick
@pytest.mark.parametrize("how", ["half of a document kept", "packed into half of its blocks"])
def test_half_of_a_text_is_little_more_than_half_of_the_work(how: str) -> None:
    rows = [row for row in tables.read_rows(tables.RESULTS / "work.csv") if row["provider"] == "pc"]
    whole, half = (
        {(row["architecture"], row["triton"]): row for row in rows if row["case"] == f"decode 1 x 4k{kept}"}
        for kept in ("", f", {how}")
    )
    assert whole.keys() == half.keys()
    assert len(half) == 8
    for place, row in half.items():
        assert int(row["instructions"]) <= 0.6 * int(whole[place]["instructions"])
        assert int(row["loaded_bytes"]) <= 0.55 * int(whole[place]["loaded_bytes"])
