"""In bfloat16 and float16, logits after a cached prefix have no larger error than the model's own, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generate_cases import BY_NAME, left_padded, plain, prompt

from pc.integrations.huggingface import enable_prefix_caching


def _logits(result: Any) -> torch.Tensor:
    return torch.stack(result.logits).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral-window"])
def test_logits_stay_within_the_budget(name: str, dtype: torch.dtype) -> None:
    model, exact = BY_NAME[name].build().to(dtype), BY_NAME[name].build().double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 1}
    shared = prompt(64)
    calls = [
        {"input_ids": torch.cat([shared, prompt(9, 1)], 1)},
        left_padded(torch.cat([shared, prompt(21, 2)], 1), shared[:, :40], prompt(30, 3)),
    ]
    with enable_prefix_caching(model) as handle:
        for _ in range(2):
            for call in calls:
                want = _logits(plain(exact, **call, **options))
                own = (_logits(plain(model, **call, **options)) - want).abs().max()
                ours = (_logits(model.generate(**call, **options)) - want).abs().max()
                rounding = torch.finfo(dtype).eps * want.abs().max()
                assert ours <= 2 * own + rounding, (ours, own, rounding)
        assert handle.last_requests[0].cached_tokens >= 64
        assert handle.stats().calls_handed_back == {}
