"""torch.compile makes one graph of a decode loop, whatever its lengths and batch sizes are, or two at most.

Public reports of vLLM and transformers are of graphs that compile again for every sequence length. Every operator and
every function of `pc.flash_attn` is compiled with `fullgraph=True, dynamic=True`; a break in a graph is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pc
from pc.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

LENGTHS = (17, 18, 40, 66)
# A batch as large as another dimension would be compiled as one size with it.
BATCHES = (6, 9, 14)
HEADS, KV_HEADS, HEAD_DIM, BLOCK, COLUMNS = 4, 2, 64, 16, 5

Make = Callable[[int, int], tuple[Any, ...]]
Tensor = torch.Tensor


def _ints(count: int, step: int = 1) -> Tensor:
    return torch.arange(count, dtype=torch.int32) * step


def _full(batch: int, value: int) -> Tensor:
    return torch.full((batch,), value, dtype=torch.int32)


def _query(tokens: int) -> Tensor:
    return torch.zeros(tokens, HEADS, HEAD_DIM)


def _rows(tokens: int) -> Tensor:
    return torch.zeros(tokens, KV_HEADS, HEAD_DIM)


def _cache() -> Tensor:
    return torch.zeros(200, BLOCK, KV_HEADS, HEAD_DIM)


def _table(batch: int) -> Tensor:
    return _ints(batch * COLUMNS).view(batch, COLUMNS)


def _paged(batch: int, length: int) -> tuple[Any, ...]:
    return _query(batch), _cache(), _cache(), _table(batch), _full(batch, length), _ints(batch + 1)


def _latent(batch: int, length: int) -> tuple[Any, ...]:
    return _query(batch), _cache()[:, :, 0].contiguous(), *_paged(batch, length)[3:]


def _dense(queries: int, batch: int, length: int) -> tuple[Any, ...]:
    heads = torch.zeros(batch, queries, HEADS, HEAD_DIM), torch.zeros(batch, length, KV_HEADS, HEAD_DIM)
    return *heads, heads[1].clone()


def _packed(batch: int, length: int) -> tuple[Any, ...]:
    return _query(batch * length), _rows(batch * length), _ints(batch + 1, length), length


def _decode(batch: int, length: int) -> tuple[Any, ...]:
    """Return a query, a dense cache, a new key and the lengths."""
    cache = torch.zeros(batch, BLOCK * COLUMNS, KV_HEADS, HEAD_DIM)
    new = torch.zeros(batch, 1, KV_HEADS, HEAD_DIM)
    return _query(batch)[:, None], cache, cache.clone(), new, _full(batch, length)


def _rotated(batch: int, length: int) -> tuple[Any, ...]:
    """Return the same with a number of new tokens that changes with the length."""
    q, k, v, new, lens = _decode(batch, length)
    count = 20 + length % 7
    return q.repeat(1, count, 1, 1), k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), new.repeat(1, count, 1, 1), lens


def _moved(batch: int, length: int) -> tuple[Any, ...]:
    return _cache(), torch.arange(batch + length), _rows(batch + length)


ANGLES, FREQUENCIES, SLOPES = torch.zeros(200, 16), torch.zeros(32), torch.zeros(HEADS)

CASES: dict[str, tuple[Callable[..., Any], Make]] = {
    "paged_attention": (lambda *a: pc.paged_attention(*a, 0.1), _paged),
    "paged_attention, max_seq_len": (
        lambda *a: pc.paged_attention(*a[:6], 0.1, max_seq_len=a[6]), lambda b, n: (*_paged(b, n), n)
    ),
    "paged_attention, max_seq_len read from lengths": (
        lambda *a: pc.paged_attention(*a, 0.1, max_seq_len=a[4].max().item()), _paged
    ),
    "paged_attention_with_lse": (lambda *a: pc.paged_attention_with_lse(*a, 0.1), _paged),
    "sliding_window_attention": (lambda *a: pc.sliding_window_attention(*a, 0.1, 7), _paged),
    "sliding_window_attention, window of each call": (
        lambda *a: pc.sliding_window_attention(*a[:6], 0.1, a[6]), lambda b, n: (*_paged(b, n), n)
    ),
    "sparse_gap_attention": (lambda *a: pc.sparse_gap_attention(*a, a[4] - 1, 0.1), _paged),
    "shared_prefix_attention": (lambda *a: pc.shared_prefix_attention(*a, 1, 0.1), _paged),
    "latent_attention": (lambda *a: pc.latent_attention(*a, 0.1, 32), _latent),
    "sparse_latent_attention": (lambda *a: pc.sparse_latent_attention(*a, a[3] - 1, 0.1, 32), _latent),
    "attention_plan": (lambda *a: pc.attention_plan(*a, BLOCK), lambda b, n: _paged(b, n)[3:]),
    "merge_attention": (
        lambda a, b: pc.merge_attention(a, b, a, b), lambda b, n: (_query(b + n), torch.zeros(b + n, HEADS))
    ),
    "reshape_and_cache": (lambda c, s, x: pc.reshape_and_cache(x, x, c, c.clone(), s), _moved),
    "rope_and_cache": (
        lambda c, s, x: pc.rope_and_cache(x, x, x, s, ANGLES, c, c.clone(), s), _moved
    ),
    "gather_slots": (lambda c, s, x: pc.gather_slots(c, s), _moved),
    "gather_blocks_list": (lambda c, s, x: pc.gather_blocks_list([c, c], s), _moved),
    "scatter_slots": (lambda c, s, x: pc.scatter_slots(x, c, s), _moved),
    "copy_blocks": (lambda c, s, x: pc.copy_blocks(c, s, s + 100), _moved),
    "move_slots": (lambda c, s, x: pc.move_slots(c, None, s, s + 100, s, FREQUENCIES), _moved),
    "rotate_keys": (lambda c, s, x: pc.rotate_keys(c, s, s + 100, s, FREQUENCIES), _moved),
    "join_prefix": (
        lambda c, t, n, x, s, rows: pc.join_prefix(c, t, n, x, s, rows),
        lambda b, n: (_cache(), _table(b), _full(b, n), _rows(b), _ints(b + 1), b * n),
    ),
    "flash_attn_func": (
        lambda q, k, v: flash_attn_func(q, k, v, causal=True), lambda b, n: _dense(1, b, n)
    ),
    "flash_attn_func, window": (
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(30, 0)), lambda b, n: _dense(1, b, n)
    ),
    "flash_attn_func, prefill with slopes": (
        lambda q, k, v: flash_attn_func(q, k, v, alibi_slopes=SLOPES), lambda b, n: _dense(n, b, n)
    ),
    "flash_attn_varlen_func": (
        lambda q, k, s, most: flash_attn_varlen_func(q, k, k, s, s, most, most, causal=True), _packed
    ),
    "flash_attn_varlen_func, max_seqlen read from lengths": (
        lambda q, k, s, _: flash_attn_varlen_func(
            q, k, k, s, s, s.diff().max().item(), s.diff().max().item(), window_size=(30, 2)
        ),
        _packed,
    ),
    "flash_attn_varlen_func, seqused_q": (
        lambda q, k, s, most: flash_attn_varlen_func(q, k, k, s, s, most, most, seqused_q=s.diff() - 1), _packed
    ),
    "flash_attn_varlen_func, block table": (
        lambda q, k, v, t, n, s, most: flash_attn_varlen_func(
            q, k, v, s, None, 1, most, causal=True, block_table=t, seqused_k=n
        ),
        lambda b, n: (*_paged(b, n), n),
    ),
    "flash_attn_with_kvcache": (
        lambda q, k, v, x, n: flash_attn_with_kvcache(q, k, v, cache_seqlens=n, causal=True), _decode
    ),
    "flash_attn_with_kvcache, new keys": (
        lambda q, k, v, x, n: flash_attn_with_kvcache(q, k, v, x, x, cache_seqlens=n, causal=True), _decode
    ),
    "flash_attn_with_kvcache, an int as cache_seqlens": (
        lambda q, k, v, x, n: flash_attn_with_kvcache(q, k, v, x, x, cache_seqlens=n, causal=True),
        lambda b, n: (*_decode(b, n)[:4], n),
    ),
    "flash_attn_with_kvcache, new keys and rotary": (
        lambda q, k, v, x, n: flash_attn_with_kvcache(q, k, v, x, x, ANGLES, ANGLES, n, causal=True), _rotated
    ),
    "flash_attn_with_kvcache, block table, chunks": (
        lambda q, k, v, t, n, s: flash_attn_with_kvcache(
            q[:, None], k, v, cache_seqlens=n, block_table=t, causal=True, attention_chunk=32
        ),
        _paged,
    ),
    "flash_attn_with_kvcache, cache_leftpad": (
        lambda q, k, v, x, n: flash_attn_with_kvcache(q, k, v, cache_seqlens=n, cache_leftpad=n - 9, causal=True),
        _decode,
    ),
    "flash_attn_combine": (
        flash_attn_combine, lambda b, n: (torch.zeros(3, b, n, HEADS, HEAD_DIM), torch.zeros(3, b, n, HEADS))
    ),
    "get_scheduler_metadata": (
        lambda n, most: get_scheduler_metadata(n.shape[0], 1, most, 4, 2, 64, n, page_size=16, causal=True),
        lambda b, n: (_full(b, n), n + 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_compiles_a_decode_loop_twice_at_most(name: str) -> None:
    function, make = CASES[name]
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        outputs = len(next(node for node in graph.graph.nodes if node.op == "output").args[0])
        return lambda *given: [torch.zeros(0)] * outputs  # what is computed is tested elsewhere

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        step = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
        for batch in BATCHES:
            for length in LENGTHS:
                step(*make(batch, length))
    assert len(graphs) <= 2


@pytest.mark.parametrize("length", [3, 17, 31])
def test_compiled_loops_give_what_the_functions_give(length: int) -> None:
    names = "flash_attn_varlen_func, max_seqlen read from lengths", "flash_attn_with_kvcache, new keys and rotary"
    for name in names:
        function, make = CASES[name]
        with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
            step = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
            for batch in (2, 5):
                given = [torch.randn_like(x) if _is_float(x) else x for x in make(batch, length)]
                copies = [x.clone() if isinstance(x, Tensor) else x for x in given]
                torch.testing.assert_close(step(*given), function(*copies))


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
