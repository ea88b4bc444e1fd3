"""Presses, which choose the tokens that each KV head of a layer keeps when a text is compressed.

Each press here scores a layer's queries and keys after rotary embeddings and needs no module of the model. The
HuggingFace adapter and the vLLM adapter share this file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import avg_pool1d

WINDOW = 32  # last tokens: their queries score all tokens, and they are kept (SnapKV, arXiv:2404.14469, section 4)
POOLED = 5  # neighbouring tokens whose votes are averaged, so that words are kept whole (the same section)
EXPECTED = 512  # last tokens whose queries are the sample that predicts later ones
FIRST = 4  # first tokens, which receive surplus attention (attention sinks, arXiv:2309.17453)
SAFEGUARD = 0.2  # share of the budget that every head has at least (Ada-KV, arXiv:2407.11550, section 4.2)


def snapkv(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, share: int | None = None
) -> torch.Tensor:
    """Score tokens by the attention of the last queries, averaged over a KV head's queries and neighbouring tokens.

    The last tokens themselves are kept, but fill at most half of a head's `share`. Scores choose the other half.
    """
    heads, total, _ = keys.shape
    window = min(WINDOW, total)
    last = query[:, -window:].unflatten(0, (heads, -1)).float()
    scores = torch.einsum("hgqd,htd->hgqt", last, keys.float()) * scale
    places = torch.arange(total, device=keys.device)
    scores.masked_fill_(places > places[-window:, None], -torch.inf)
    votes = avg_pool1d(scores.softmax(-1).mean((1, 2)), POOLED, 1, POOLED // 2)
    votes[:, total - _kept_unasked(window, share) :] = torch.inf
    return votes


def _kept_unasked(most: int, share: int | None) -> int:
    """Return how many of `most` tokens a head keeps regardless of their scores."""
    return most if share is None else min(most, share // 2)


def expected_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, share: int | None = None
) -> torch.Tensor:
    """Score tokens by the expected attention of later queries times the norm of the values.

    See Devoto et al., arXiv:2510.00636. Later queries are modelled as a normal distribution. The mean of exp(scale *
    q.k) is then exp(scale * mean.k + scale^2 / 2 * k.covariance.k). Mean and covariance are those of the last
    `EXPECTED` queries at their own positions; the paper rotates all queries to later positions.
    """
    drawn = query[:, -EXPECTED:].unflatten(0, (len(keys), -1)).float()
    mean = drawn.mean(2, keepdim=True)
    covariance = (drawn - mean).mT @ (drawn - mean) / drawn.shape[2]
    of_keys = keys.float()[:, None]
    exponent = (of_keys * (mean * scale + of_keys @ covariance * (scale**2 / 2))).sum(-1)
    sizes = torch.linalg.vector_norm(values.float(), dim=-1)
    scores: torch.Tensor = exponent.softmax(-1).mean(1) * sizes
    scores[:, : _kept_unasked(FIRST, share)] = torch.inf
    return scores


def knorm(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, share: int | None = None
) -> torch.Tensor:
    """Score tokens by the negated norm of their keys (Devoto et al., arXiv:2406.11430)."""
    norms: torch.Tensor = torch.linalg.vector_norm(keys.float(), dim=-1)
    return -norms


def streaming(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, share: int | None = None
) -> torch.Tensor:
    """Score the first four tokens and the last tokens highest (StreamingLLM, arXiv:2309.17453), as a baseline."""
    places = torch.arange(keys.shape[1], device=keys.device, dtype=torch.float32)
    places[:FIRST] = torch.inf
    return places.expand(keys.shape[:2])


Score = Callable[..., torch.Tensor]
SCORES: dict[str, Score] = {
    "snapkv": snapkv,
    "expected_attention": expected_attention,
    "knorm": knorm,
    "streaming": streaming,
}
"""The presses by name. Each is a function of `query [num_heads, tokens, head_dim]`, keys and values `[num_kv_heads,
tokens, head_dim]`, the scale of attention, and the `share` of tokens that a head keeps on average. It returns scores
`[num_kv_heads, tokens]`. Tokens with higher scores are kept.
"""

QUERIES = {"snapkv": WINDOW, "expected_attention": EXPECTED, "knorm": 0, "streaming": 0}
"""Number of last queries that each press reads, by name."""


def kept_tokens(
    name: str, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, budget: float
) -> torch.Tensor:
    """Return which tokens heads keep with the press of this name, `[num_kv_heads, tokens]` bool; see `choose`."""
    return choose(SCORES[name](query, keys, values, scale, share_of(keys.shape[1], budget)), budget)


def share_of(total: int, budget: float) -> int:
    """Return the average number of tokens that a head keeps of `total`. `budget` is a fraction, 0 to 1."""
    return max(1, round(total * budget))


def choose(scores: torch.Tensor, budget: float) -> torch.Tensor:
    """Return which tokens heads keep, `[num_kv_heads, tokens]` bool, for scores of this shape.

    `budget` is the fraction of all tokens to keep. The tokens with the highest scores of the layer are kept, as in
    Ada-KV. Each head keeps at least `SAFEGUARD` of an even share, and at least one token.
    """
    heads, total = scores.shape
    share = share_of(total, budget)
    own = scores.topk(max(1, int(share * SAFEGUARD)), dim=-1).indices
    # Heads compete by score. If a softmax normalizes each head's scores, those of one layer are comparable.
    lifted = scores.nan_to_num(posinf=torch.finfo(scores.dtype).max / 2)
    lifted = lifted.scatter(1, own, torch.inf)
    kept = torch.zeros(heads * total, dtype=torch.bool, device=scores.device)
    kept[lifted.flatten().topk(min(share * heads, heads * total)).indices] = True
    return kept.view(heads, total)
