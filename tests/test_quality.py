"""The benchmark of quality: a method that drops no token loses no quality, and one that drops tokens does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")


from benchmarks.harness import tables
from benchmarks.models import quality
from pc.integrations import presses

WHOLE = {m.name: m for m in quality.methods([1.0])}
EXACT = {"Quest-like pages", "best blocks", *presses.SCORES}


@pytest.fixture(scope="module")
def reading() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, initializer_range=0.15, **sizes)  # scores far apart
    model = LlamaForCausalLM(config).eval()
    llama = quality.Llama(model, num_blocks=48)
    ids = torch.randint(97, (322,)).tolist()
    with torch.inference_mode():
        reading = quality.Reading(llama, ids[:256], [(ids[256:289], 1), (ids[289:], 1)])
    quality.measure(reading, None)
    return reading


def test_full_attention_is_that_of_the_model(reading: Any) -> None:
    tokens = torch.tensor([*reading.prompt.tolist(), *reading.parts[1][0]])
    expected = reading.llama.body(tokens[None]).last_hidden_state[0, -33:-1]
    torch.testing.assert_close(reading.expected[1], reading.llama.head(expected).log_softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize("name", WHOLE)
def test_what_leaves_nothing_out_loses_nothing(name: str, reading: Any) -> None:
    found = quality.measure(reading, WHOLE[name])
    assert found["tokens"] == "64"
    divergence = float(found["kl"])
    if name in EXACT:
        assert divergence < 1e-6
        assert found["same_top1"] == "1.0000"
    else:
        assert 1e-6 < divergence < 3


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(EXACT))
def test_what_leaves_out_most_loses_something(name: str, reading: Any) -> None:
    (method,) = (m for m in quality.methods([0.15]) if m.name == name)
    assert float(quality.measure(reading, method)["kl"]) > 1e-4


@pytest.mark.quick
def test_rows_of_a_text_are_of_the_same_tokens() -> None:
    counts = {
        (row["text"], row["prompt_tokens"], row["tokens"])
        for row in tables.read_rows(tables.RESULTS / "cpu" / "quality.csv")
    }
    assert len(counts) == len({text for text, *_ in counts}), counts
