"""Both runners share one store. Packed passes use tiers, files and windows, and copies read their blocks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import FAMILIES, LLAMA, assert_same, enabled, prompt
from graph_double import TapeCapturer

from pc.integrations.huggingface import PrefixCaching, enable_prefix_caching
from pc.integrations.huggingface.runners import graphs

BY_NAME = {family.name: family for family in FAMILIES}
NAMES = ["llama", "gemma2", "gpt2"]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(graphs.CAPTURERS, "cpu", TapeCapturer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def cached(model: Any, handle: PrefixCaching, ids: torch.Tensor, **options: Any) -> int:
    """Check a call against plain generate, and return how many tokens it read from the cache."""
    before = handle.graphs.eager_steps + handle.graphs.replays
    assert_same(model, input_ids=ids, **{"max_new_tokens": 4, "eos_token_id": None} | options)
    ran = handle.graphs.eager_steps + handle.graphs.replays > before
    assert ran == (model.device.type in graphs.CAPTURERS and not options)
    return int(handle.last_requests[0].cached_tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", [("packed", "copies"), ("copies", "packed"), ("packed", "packed")])
def test_a_file_serves_either_runner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, order: tuple[str, str]
) -> None:
    for number, runner in enumerate(order):
        with monkeypatch.context() as patch:
            if runner == "packed":
                patch.setitem(graphs.CAPTURERS, "cpu", TapeCapturer)
            model = BY_NAME[name].build()
            with enable_prefix_caching(model, num_blocks=64) as handle:
                if number:
                    assert handle.load(tmp_path / "blocks") > 0
                    assert cached(model, handle, torch.cat([prompt(64), prompt(9, 1)], 1)) == 64
                    assert cached(model, handle, prompt(64)) == 63
                else:
                    cached(model, handle, prompt(64))
                    assert handle.save(tmp_path / "blocks") > 0


OVER_COPIES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("options", OVER_COPIES.values(), ids=OVER_COPIES.keys())
@pytest.mark.usefixtures("packed")
def test_calls_that_packed_passes_cannot_follow_read_the_same_blocks(options: dict[str, Any]) -> None:
    model = LLAMA.build()
    with enabled(model, cuda_graphs=False) as handle:
        assert cached(model, handle, prompt(70)) == 0
        other = torch.cat([prompt(70), prompt(30, 1)], 1)
        if "output_hidden_states" in options:
            with pytest.warns(UserWarning, match="64 cached tokens are computed again"):
                model.generate(other, max_new_tokens=2, **options)
        else:
            assert cached(model, handle, other, **options) == 64
        assert cached(model, handle, torch.cat([other, prompt(5, 2)], 1)) >= 96
        assert handle.stats().calls_handed_back == {}
