"""A reference for compressed prompts: transformers' model, dense attention in float64, a mask for each layer and head.

It shares no code with the package. Each press is written down again from its definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

FORCED = math.inf


@dataclass
class Kept:
    """What stays of a prompt: of its whole blocks up to `end` each head keeps `count` tokens."""

    press: str
    end: int
    whole: int
    count: int


class DenseReference:
    """Greedy answers of a model in transformers, whose attention cannot see what a press left out.

    Attributes:
        margin: The least relative distance, in the last call, between a score that stays and one that goes: below some
            1e-4 two programs may choose differently.
    """

    def __init__(self, path: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("dense_reference", self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="dense_reference", dtype=torch.float32
        ).eval()
        self._kept: Kept | None = None
        self.margin = math.inf

    @torch.no_grad()
    def logprobs(self, prompt: list[int], answer: list[int], kept: Kept | None) -> torch.Tensor:
        """Log-probabilities `[answer, vocabulary]` when the answer is given; `kept` None: everything stays."""
        self._kept, self.margin = kept, math.inf
        ids = torch.tensor([prompt + answer[:-1]])
        return self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double().log_softmax(-1)

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        q, k, v = query[0].double(), key[0].double(), value[0].double()
        group, total = len(q) // len(k), q.shape[1]
        logits = q @ k.repeat_interleave(group, 0).mT * scaling
        logits = logits.masked_fill(torch.ones(total, total).triu(1).bool(), -torch.inf)
        if self._kept is not None:
            gone = self._gone(q, k, v, logits, scaling).repeat_interleave(group, 0)
            logits[:, self._kept.end :, : self._kept.whole].masked_fill_(gone[:, None], -torch.inf)
        out = logits.softmax(-1) @ v.repeat_interleave(group, 0)
        return out.transpose(0, 1)[None].to(query.dtype), None

    def _gone(self, q: Any, k: Any, v: Any, logits: Any, scaling: float) -> torch.Tensor:
        kept, heads = self._kept, len(k)
        assert kept is not None
        end = kept.end
        if kept.press == "knorm":
            scores = -k[:, :end].pow(2).sum(-1).sqrt()
        elif kept.press == "snapkv":
            votes = logits[:, end - 32 : end, :end].softmax(-1).unflatten(0, (heads, -1)).mean((1, 2))
            padded = torch.nn.functional.pad(votes, (2, 2))
            scores = sum(padded[:, shift : shift + end] for shift in range(5)) / 5
            scores[:, end - 32 :] = FORCED
        else:
            assert kept.press == "expected_attention"
            last = q[:, max(0, end - 512) : end].unflatten(0, (heads, -1))
            mean = last.mean(2)
            centred = last - mean[:, :, None]
            covariance = torch.einsum("hgnd,hgne->hgde", centred, centred) / last.shape[2]
            exponent = torch.einsum("htd,hgd->hgt", k[:, :end], mean) * scaling
            exponent += torch.einsum("htd,hgde,hte->hgt", k[:, :end], covariance, k[:, :end]) * scaling**2 / 2
            scores = exponent.softmax(-1).mean(1) * v[:, :end].norm(dim=-1)
            scores[:, :4] = FORCED
        scores = scores[:, : kept.whole]
        ranked = scores.sort(-1, descending=True).values
        stays, goes = ranked[:, kept.count - 1], ranked[:, kept.count]
        self.margin = min(self.margin, float(((stays - goes) / stays.abs()).nan_to_num(nan=0, posinf=1).min()))
        gone = torch.ones_like(scores, dtype=torch.bool)
        return gone.scatter(1, scores.topk(kept.count).indices, False)
