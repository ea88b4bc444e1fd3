"""FlashAttention's functions on compiled kernels: dense keys where they are, packed ones, caches and new keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flash_cases
import torch
from flash_cases import HEADS, Cached, Case, check_cached, check_dense, check_varlen, starts

from pc.flash_attn import flash_attn_varlen_func

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


@_case("flash dense")
def _dense_blocks() -> None:
    check_dense(Case((96, 80), {"causal": True}, {}), "mixed")
    check_dense(Case((33, 96), {"window_size": (20, 9)}, {}), "heads first")


@_case("flash packed")
def _packed() -> None:
    for mask in ({"causal": True}, {"window_size": (12, 12)}):
        check_varlen(Case((70, 33), mask, {}), False)


@_case("flash bias")
def _biased() -> None:
    """Attend with ALiBi, slopes of each sequence, keys after the query, and some unused queries."""
    check_dense(Case((33, 48), {}, {"alibi_slopes": True, "softcap": 15.0}), "heads first")
    lens_q, used, lens_k = (17, 4), (15, 4), (33, 5)
    generator, case = torch.Generator().manual_seed(0), Case((17, 33), {}, {})
    drawn = [case.drawn(generator, *lengths) for lengths in zip(lens_q, lens_k, strict=True)]
    q, k, v = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
    count, begins = torch.tensor(used, dtype=torch.int32), starts(*lens_q)
    slopes = torch.rand(2, HEADS[case.heads][0], generator=generator) * 0.3
    options: dict[str, Any] = {"window_size": (9, 4), "return_softmax_lse": True}
    out, lse = flash_attn_varlen_func(
        q, k, v, begins, starts(*lens_k), 17, 33, alibi_slopes=slopes, seqused_q=count, **options
    )  # fmt: skip
    for i, ((own, *cached), n) in enumerate(zip(drawn, used, strict=True)):
        rows = slice(int(begins[i]), int(begins[i]) + n)
        given = {"window_size": (9, 4), "alibi_slopes": slopes[i]}
        flash_cases.check(out[rows], lse[:, rows], [(own[:n], *cached)], torch.float16, **given)


@_case("flash rotary")
def _rotated() -> None:
    """Append keys of one query and of two, half rotated, in pages, with one KV head, bfloat16 and sinks."""
    options: dict[str, Any] = {"rotary": 0.5, "paged": 16, "heads": "mqa", "head_dim": 96, "dtype": torch.bfloat16}
    options |= {"before": (0, 15, 30), "length": 32, "term": "s_aux", "mask": (("causal", True),)}
    for count, interleaved in ((1, True), (2, False)):
        check_cached(Cached((count,) * 3, (count,) * 3, interleaved=interleaved, **options))


@_case("flash kvcache")
def _cached() -> None:
    mask = (("causal", True),)
    check_cached(Cached((2, 2, 2), (2, 2, 2), 48, before=(0, 31, 46), mask=mask, dtype=torch.float16))
