"""A reference for compressed prompts: transformers' model, dense attention in float64, a mask for each layer and head.

It shares no code with the package. Each press is implemented again from its definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

FORCED = math.inf


@dataclass
class Kept:
    """The tokens that are kept: each head keeps `count` tokens of the prompt's whole blocks up to `end`."""

    press: str
    end: int
    whole: int
    count: int
    page: int = 0
    """The tokens of a page with Ada-KV, where `count` is the average over heads. 0: no Ada-KV."""


class DenseReference:
    """Greedy answers of a model in transformers, whose attention cannot see the tokens that a press drops.

    Attributes:
        margin: The least relative distance in the last call between the score of a kept and of a dropped token. Below
            about 1e-4, two programs may choose different tokens.
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
        """Return log-probabilities `[answer, vocabulary]` of the given answer.

        If `kept` is None, all tokens are kept.
        """
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
        if kept.page:
            return self._gone_by_head(scores, kept)
        ranked = scores.sort(-1, descending=True).values
        self._compare(ranked[:, kept.count - 1], ranked[:, kept.count])
        gone = torch.ones_like(scores, dtype=torch.bool)
        return gone.scatter(1, scores.topk(kept.count).indices, False)

    def _gone_by_head(self, scores: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Apply Ada-KV: the layer's best tokens decide each head's number of pages, and its best tokens fill them."""
        heads, whole = scores.shape
        total = kept.count * heads
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        for head in range(heads):  # each head has a fifth of an even share at least
            chosen[head, scores[head].topk(max(1, int(kept.count * 0.2))).indices] = True
        ranked = scores.masked_fill(chosen, -torch.inf).flatten().sort(descending=True)
        more = total - int(chosen.sum())
        self._compare(ranked.values[more - 1], ranked.values[more])
        chosen.view(-1)[ranked.indices[:more]] = True
        share = [int(each) / kept.page for each in chosen.sum(1)]
        pages = [min(max(int(each), -(-32 // kept.page)), whole // kept.page) for each in share]
        while sum(pages) < total // kept.page:
            rest = [(share[h] - pages[h], -h) for h in range(heads) if pages[h] < whole // kept.page]
            pages[-max(rest)[1]] += 1
        while sum(pages) > total // kept.page:
            rest = [(pages[h] - share[h], -h) for h in range(heads) if pages[h] > -(-32 // kept.page)]
            pages[-max(rest)[1]] -= 1
        gone = torch.ones_like(chosen)
        for head, count in enumerate(pages):
            order = scores[head].sort(descending=True)
            if count * kept.page < whole:
                self._compare(order.values[count * kept.page - 1], order.values[count * kept.page])
            gone[head, order.indices[: count * kept.page]] = False
        return gone

    def _compare(self, stays: torch.Tensor, goes: torch.Tensor) -> None:
        distance = ((stays - goes) / stays.abs()).nan_to_num(nan=0, posinf=1)
        self.margin = min(self.margin, float(distance.min()))
