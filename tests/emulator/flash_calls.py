"""FlashAttention's functions on compiled kernels: dense keys where they are, packed ones, caches and new keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import flash_cases
import torch
from row_cases import rotated

from pc.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

FLASH_CASES: dict[str, Callable[[], None]] = {}


def _on_device(run: Callable[[], None]) -> None:
    """Run as on a device, where sequences may have fewer keys than queries, and again from the launch cache."""
    with flash_cases.as_on_a_device():
        for _ in range(2):
            run()


def _case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(run: Callable[[], None]) -> Callable[[], None]:
        FLASH_CASES[name] = lambda: _on_device(run)
        return run

    return add


def _drawn(*lengths: int) -> list[torch.Tensor]:
    return [torch.randn(n, heads, 64).half() for n, heads in zip(lengths, (4, 2, 2), strict=True)]


def _dense(length_q: int, length_k: int, **options: Any) -> None:
    sequences = [_drawn(length_q, length_k, length_k) for _ in range(2)]
    q, k, v = (torch.stack(tensors) for tensors in zip(*sequences, strict=True))
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    out, lse = flash_attn_func(q, k, v, return_softmax_lse=True, **options)
    flash_cases.check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, torch.float16, **options)


@_case("flash dense")
def _dense_blocks() -> None:
    _dense(96, 80, causal=True)
    _dense(33, 96, window_size=(20, 9))


@_case("flash packed")
def _packed() -> None:
    lens_q, lens_k = (17, 1, 70, 40), (33, 5, 31, 0)
    sequences = [_drawn(n, m, m) for n, m in zip(lens_q, lens_k, strict=True)]
    q, k, v = (torch.cat(tensors) for tensors in zip(*sequences, strict=True))
    starts = [torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (lens_q, lens_k)]
    for options in ({"causal": True}, {"window_size": (12, 12)}):
        out, lse = flash_attn_varlen_func(q, k, v, *starts, 70, 33, return_softmax_lse=True, **options)
        flash_cases.check(out, lse, sequences, torch.float16, **options)


@_case("flash bias")
def _biased() -> None:
    """Attend with ALiBi, slopes of each sequence, keys after the query, and some unused queries."""
    _dense(33, 48, alibi_slopes=torch.rand(4) * 0.3, softcap=15.0)
    lens_q, used, lens_k = (17, 4), (15, 4), (33, 5)
    drawn = [_drawn(n, m, m) for n, m in zip(lens_q, lens_k, strict=True)]
    q, k, v = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
    starts = [torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (lens_q, lens_k)]
    slopes, count = torch.rand(2, 4) * 0.3, torch.tensor(used, dtype=torch.int32)
    options: dict[str, Any] = {"window_size": (9, 4), "return_softmax_lse": True}
    out, lse = flash_attn_varlen_func(q, k, v, *starts, 17, 33, alibi_slopes=slopes, seqused_q=count, **options)
    for i, ((own, *cached), n) in enumerate(zip(drawn, used, strict=True)):
        rows = slice(int(starts[0][i]), int(starts[0][i]) + n)
        given = {"window_size": (9, 4), "alibi_slopes": slopes[i]}
        flash_cases.check(out[rows], lse[:, rows], [(own[:n], *cached)], torch.float16, **given)


@_case("flash rotary")
def _rotated() -> None:
    """Append keys of one query and of two, half rotated, in pages, with one KV head, bfloat16 and sinks."""
    for count, interleaved in ((1, True), (2, False)):
        caches, lens = torch.randn(2, 7, 16, 1, 96).bfloat16(), (0, 15, 30)
        q, k, v = torch.randn(3, count, 6, 96).bfloat16(), *torch.randn(2, 3, count, 1, 96).bfloat16()
        tables, before = (
            torch.tensor([[3, 0], [6, 1], [4, 2]], dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int32),
        )
        angle, sinks = torch.rand(32, 24) * 6, torch.randn(6).bfloat16()
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        sequences = []
        for i, n in enumerate(lens):
            old = [cache[tables[i].long()].flatten(0, 1)[:n] for cache in caches]
            own, new = (rotated(x[i], cos[n : n + count], sin[n : n + count], interleaved).bfloat16() for x in (q, k))
            sequences.append((own, torch.cat([old[0], new]), torch.cat([old[1], v[i]])))
        out, lse = flash_attn_with_kvcache(
            q, *caches, k, v, cos, sin, before, block_table=tables, causal=True, rotary_interleaved=interleaved,
            s_aux=sinks, return_softmax_lse=True,
        )  # fmt: skip
        options = {"causal": True, "s_aux": sinks}
        flash_cases.check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, torch.bfloat16, **options)
        for i, n in enumerate(lens):
            stored = caches[0, tables[i].long()].flatten(0, 1)[: n + count]
            torch.testing.assert_close(stored, sequences[i][1], atol=1e-5, rtol=torch.finfo(torch.bfloat16).eps)


@_case("flash kvcache")
def _cached() -> None:
    caches, lens = torch.randn(2, 3, 48, 2, 64).half(), (0, 31, 46)
    q, k, v = torch.randn(3, 2, 4, 64).half(), *torch.randn(2, 3, 2, 2, 64).half()
    before = torch.tensor(lens, dtype=torch.int32)
    sequences = [
        (q[i], torch.cat([caches[0, i, :n], k[i]]), torch.cat([caches[1, i, :n], v[i]])) for i, n in enumerate(lens)
    ]
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=before, causal=True, return_softmax_lse=True
    )  # fmt: skip
    flash_cases.check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, torch.float16, causal=True)
    assert all(torch.equal(caches[0, i, : n + 2], sequences[i][1]) for i, n in enumerate(lens))
