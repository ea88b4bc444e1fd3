"""What FlashAttention's functions compute, from the formula in its documentation: dense, sequence by sequence."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from pc.triton_ops import _flash, flash_attn
from pc.triton_ops._core import cache

EMPTY = -math.inf


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Within it no value of a tensor is read, and what was chosen for a call is found again, where kernels run."""
    with contextlib.ExitStack() as stack:
        for module in (_flash.arguments, _flash.append, _flash.attend, cache, flash_attn):
            stack.enter_context(mock.patch.object(module, "reads_values", return_value=False))
        yield


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    attention_chunk: int = 0,
    seen: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out `[seqlen_q, heads, d]` and lse `[heads, seqlen_q]` of one sequence.

    Args:
        q: `[seqlen_q, heads, d]`.
        k: `[seqlen_k, kv_heads, d]`.
        v: `[seqlen_k, kv_heads, d]`.
        causal: As in FlashAttention, like all options below that are not described.
        window_size: The keys before and after a query's own.
        softcap: 0: none.
        alibi_slopes: `[heads]`.
        s_aux: `[heads]`, sinks.
        softmax_scale: None: by `d`.
        attention_chunk: 0: none.
        seen: `[seqlen_q, seqlen_k]`, which keys a query attends to, in place of the masks above.
        dtype: The dtype of all computation.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    left, right = window_size[0], 0 if causal else window_size[1]
    if seen is None:
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        seen &= (j >= i - left) | (left < 0)
        seen &= (j <= i + right) | (right < 0)
        if attention_chunk:
            seen &= i // attention_chunk == j // attention_chunk
    score = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if alibi_slopes is not None:
        score = score - alibi_slopes.to(dtype)[:, None, None] * (i - j).abs()
    score = score.masked_fill(~seen, EMPTY)
    if s_aux is not None:
        score = torch.cat([score, s_aux.to(dtype)[:, None, None].expand(-1, len(q), 1)], -1)
    lse = torch.logsumexp(score, -1) if score.shape[-1] else torch.full(score.shape[:2], EMPTY, dtype=dtype)
    weight = torch.exp(score - lse.masked_fill(lse == EMPTY, 0.0)[..., None])[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weight, v), lse


def check(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """Packed results against each sequence's q, k and v: within twice what the formula errs in `dtype`, and a rounding.

    Args:
        out: `[tokens, heads, d]`.
        lse: `[heads, tokens]`.
        sequences: q, k and v of each.
        dtype: That the library computed in.
        options: As for `attention`; alibi_slopes and s_aux are each sequence's.
    """
    exact = [attention(*sequence, **options) for sequence in sequences]
    eager = [attention(*sequence, **options, dtype=dtype) for sequence in sequences]
    expected, low = (torch.cat([result[0].double() for result in results]) for results in (exact, eager))
    assert out.shape == expected.shape
    if not out.numel():
        return
    error, allowed = (out.double() - expected).abs().max().item(), (low - expected).abs().max().item()
    rounding = torch.finfo(dtype).eps * max(1.0, expected.abs().max().item()) * (8 if dtype == torch.float32 else 1)
    assert error <= 2 * allowed + rounding, f"off by {error:.3g}, {2 * allowed + rounding:.3g} at most"
    if lse is not None:
        expected_lse = torch.cat([result[1] for result in exact], 1)
        assert lse.shape == expected_lse.shape
        assert torch.equal(lse == EMPTY, expected_lse == EMPTY)
        some = expected_lse != EMPTY
        assert not some.any() or (lse.double() - expected_lse)[some].abs().max().item() < 1e-3
