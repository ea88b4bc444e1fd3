"""Questions about compressed documents, the tokens that heads keep, and logits of dense attention over those tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from generate_cases import prompt
from transformers import AttentionInterface, AttentionMaskInterface

from pc.integrations.huggingface import CompressedDocument
from pc.integrations.huggingface.compression import reading

CONTEXT = prompt(200)
QUESTION = torch.cat([CONTEXT, prompt(9, 1)], 1)
ASKED = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def ask(model: Any, document: CompressedDocument, ids: torch.Tensor = QUESTION, **options: Any) -> Any:
    with document:
        return model.generate(ids, **ASKED | options)


@contextmanager
def chosen_tokens() -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the tokens each layer's heads keep, `[num_kv_heads, tokens]` bool, in layer order."""
    found: list[torch.Tensor] = []
    keep = reading.keep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reading, "keep", lambda keys, values, chosen: (found.append(chosen), keep(keys, values, chosen))[1]
        )
        yield found


def dense_logits(
    model: Any, sequence: torch.Tensor, kept: list[torch.Tensor], new: int, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return logits of a plain pass over all tokens, where tokens after the document see what each head keeps of it."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        chosen = kept[module.layer_idx]
        heads, total, length = query.shape[1], key.shape[2], chosen.shape[1]
        rows = torch.arange(total)
        seen = (rows <= rows[:, None]).repeat(heads, 1, 1)
        seen[:, length:, :length] &= chosen.repeat_interleave(heads // len(chosen), 0)[:, None]
        key, value = (t.repeat_interleave(heads // len(chosen), 1) for t in (key, value))
        scores = (query @ key.mT * scaling).masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(dtype, torch.float32))  # as transformers' eager does
        return (weights.to(dtype) @ value).transpose(1, 2), None

    AttentionInterface.register("pc_dense_masked", attention)
    AttentionMaskInterface.register("pc_dense_masked", lambda *_, **__: None)
    other = copy.deepcopy(model).to(dtype)
    other.config._attn_implementation = "pc_dense_masked"
    with torch.no_grad():
        return other(sequence[:, :-1], use_cache=False).logits[:, -new:]


def assert_dense_logits(model: Any, result: Any, kept: list[torch.Tensor], most: float | None = None) -> None:
    """Check that a call's logits differ from those in float64 by at most `most`.

    If it is None, the bound is twice the error of dense attention in the model's type, plus one rounding of that type.
    """
    logits = torch.stack(result.logits, 1).double().cpu()
    model, sequence, new = copy.deepcopy(model).cpu(), result.sequences.cpu(), logits.shape[1]
    kept = [chosen.cpu() for chosen in kept]
    exact = dense_logits(model, sequence, kept, new)
    if most is None:
        dense = dense_logits(model, sequence, kept, new, model.dtype).double()
        most = float(2 * (dense - exact).abs().max() + torch.finfo(model.dtype).eps / 2 * exact.abs().max())
        assert most < 1e-4 or model.dtype != torch.float32
    torch.testing.assert_close(logits, exact, rtol=0, atol=most)
    others = [*kept[:-1], kept[-1].clone()]
    others[-1][:, : others[-1].shape[1] // 2] ^= True  # a control: with other tokens the logits differ
    assert (dense_logits(model, sequence, others, new) - exact).abs().max() > most
