"""Which tokens each KV head of a layer keeps: scores by name, and budgets over heads.

A press that goes by a name sees a layer's queries and keys where attention is computed, with rotary embeddings applied,
and so knows nothing of a model's modules. Objects of kvpress hook modules instead: see `reading`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import avg_pool1d

WINDOW = 32  # last tokens whose queries vote, and which every head keeps (SnapKV, arXiv:2404.14469, section 4)
POOLED = 5  # neighbouring tokens whose votes are averaged, so that words are kept whole (the same section)
EXPECTED = 512  # last tokens whose queries stand for those to come
FIRST = 4  # first tokens, which take the attention that goes nowhere (arXiv:2309.17453)
SAFEGUARD = 0.2  # share of the budget that every head has at least (Ada-KV, arXiv:2407.11550, section 4.2)


def snapkv(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """What the last queries attend to, averaged over the queries of a KV head and over neighbouring tokens."""
    heads, total, _ = keys.shape
    window = min(WINDOW, total)
    last = query[:, -window:].unflatten(0, (heads, -1)).float()
    scores = torch.einsum("hgqd,htd->hgqt", last, keys.float()) * scale
    places = torch.arange(total, device=keys.device)
    scores.masked_fill_(places > places[-window:, None], -torch.inf)
    votes = avg_pool1d(scores.softmax(-1).mean((1, 2)), POOLED, 1, POOLED // 2)
    votes[:, -window:] = torch.inf
    return votes


def expected_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """What queries drawn as the last ones are attend to, by the size of its values (Devoto et al., arXiv:2510.00636).

    Of a normal distribution the mean of exp(scale * q.k) is exp(scale * mean.k + scale^2 / 2 * k.covariance.k). It is
    that of the last queries at their own places, where the paper turns all of them to places to come.
    """
    drawn = query[:, -EXPECTED:].unflatten(0, (len(keys), -1)).float()
    mean = drawn.mean(2, keepdim=True)
    covariance = (drawn - mean).mT @ (drawn - mean) / drawn.shape[2]
    of_keys = keys.float()[:, None]
    exponent = (of_keys * (mean * scale + of_keys @ covariance * (scale**2 / 2))).sum(-1)
    sizes = torch.linalg.vector_norm(values.float(), dim=-1)
    scores: torch.Tensor = exponent.softmax(-1).mean(1) * sizes
    scores[:, :FIRST] = torch.inf
    return scores


def knorm(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Keys of small norm are attended to most (Devoto et al., arXiv:2406.11430)."""
    norms: torch.Tensor = torch.linalg.vector_norm(keys.float(), dim=-1)
    return -norms


def streaming(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """The first four tokens and the last ones (StreamingLLM, arXiv:2309.17453): what the others must be better than."""
    places = torch.arange(keys.shape[1], device=keys.device, dtype=torch.float32)
    places[:FIRST] = torch.inf
    return places.expand(keys.shape[:2])


Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
SCORES: dict[str, Score] = {
    "snapkv": snapkv,
    "expected_attention": expected_attention,
    "knorm": knorm,
    "streaming": streaming,
}
"""Of `query [num_heads, tokens, head_dim]`, keys and values `[num_kv_heads, tokens, head_dim]` and attention's scale a
score `[num_kv_heads, tokens]`, higher ones kept."""


def choose(scores: torch.Tensor, budget: float) -> torch.Tensor:
    """Which tokens heads keep, `[num_kv_heads, tokens]` bool: `budget` of all, the best of the layer, as Ada-KV does.

    A head keeps at least `SAFEGUARD` of what an even share would be, and one token.
    """
    heads, total = scores.shape
    share = max(1, round(total * budget))
    own = scores.topk(max(1, int(share * SAFEGUARD)), dim=-1).indices
    # Ranks, not scores, decide between heads only where scores are comparable; those of one layer's softmax are.
    lifted = scores.nan_to_num(posinf=torch.finfo(scores.dtype).max / 2)
    lifted = lifted.scatter(1, own, torch.inf)
    kept = torch.zeros(heads * total, dtype=torch.bool, device=scores.device)
    kept[lifted.flatten().topk(min(share * heads, heads * total)).indices] = True
    return kept.view(heads, total)


def press_key(press: Any, budget: float) -> str | None:
    """What a press is, for the identity of what it left; None where its fields cannot be told by their text."""
    if isinstance(press, str):
        return f"{press} {budget!r}"
    return _told(press)


def _told(value: Any) -> str | None:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = [_told(v) for v in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if not hasattr(type(value), "__dataclass_fields__"):
        return None
    told = {name: _told(field) for name, field in sorted(vars(value).items())}
    return None if None in told.values() else f"{type(value).__module__}.{type(value).__qualname__} {told}"
