"""Faults that public bug reports of PyTorch and of attention libraries describe, tried on the operators.

The comment above a case names the kind of report. Cases run on CPU tensors in PyTorch and, with TRITON_INTERPRET=1, in
kernels. `tests/test_reports.py` has the cases of the manager.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import pc
from pc.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

Tensor = torch.Tensor


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


QUERY, CACHE = torch.randn(12, 4, 64), torch.randn(6, 16, 2, 64)
BATCH = (ints(0, 1, 2, 3).view(2, 2), ints(20, 32), ints(0, 1, 12))
NEW = torch.randn(3, 2, 64)
SLOTS = torch.tensor([5, 40, 17])
IDS = torch.tensor([2, 0])


def paged(query: Tensor = QUERY, cache: Tensor = CACHE, scale: Any = 0.125, **options: Any) -> Tensor:
    return pc.paged_attention(query, cache, cache, *BATCH, scale, **options)


def windowed(window: Any, sinks: Any = 0, **options: Any) -> Tensor:
    return pc.sliding_window_attention(QUERY, CACHE, CACHE, *BATCH, 0.125, window, sinks, **options)


# PyTorch: "autocast changes the dtype inside custom operators".
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "call",
    [
        lambda: windowed(7),
        lambda: paged(softcap=5.0),
        lambda: paged(alibi_slopes=torch.linspace(0.1, 1, 4)),
        lambda: pc.sparse_gap_attention(
            QUERY, CACHE, CACHE, *BATCH, ints(19, *range(3, 25, 2)), 0.125, window=9, num_sink_tokens=2
        ),
        lambda: flash_attn_func(QUERY[None], NEW[None], NEW[None], window_size=(1, 0), softcap=3.0),
        lambda: flash_attn_func(QUERY[None], NEW[None], NEW[None], alibi_slopes=torch.linspace(0.1, 1, 4)),
        lambda: flash_attn_func(QUERY[None], NEW[None], NEW[None], q_descale=torch.ones(1, 2)),
        lambda: flash_attn_combine(QUERY.expand(2, 1, 12, 4, 64), torch.randn(2, 1, 12, 4).fill_(3.0))[0],
        lambda: pc.merge_attention(QUERY, torch.ones(12, 4), QUERY * 2, torch.zeros(12, 4))[0],
    ],
)
def test_autocast_does_not_change_precision(call: Callable[[], Tensor], dtype: torch.dtype) -> None:
    wanted = call()
    with torch.autocast("cpu", dtype=dtype):
        found = call()
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


# FlashInfer, vLLM: "attention sinks of -inf give NaN".
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lens", [(20, 0), (0, 0), (20, 32)])
def test_a_sink_of_minus_infinity_is_none(lens: tuple[int, int], dtype: torch.dtype) -> None:
    sinks = torch.tensor([-math.inf, 0.5, -math.inf, -3.0], dtype=dtype)
    call = (QUERY[:2], CACHE, CACHE, BATCH[0], ints(*lens), ints(0, 1, 2), 0.125)
    out, lse = pc.paged_attention_with_lse(*call, sinks=sinks)
    plain, plain_lse = pc.paged_attention_with_lse(*call)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks.float()[None].expand(2, 4)))
    share = torch.exp(plain_lse - lse).nan_to_num_(nan=0.0)[..., None]
    torch.testing.assert_close(out, plain * share)
    blocks = ints(0, 1).view(1, 1, 2).expand(2, 2, 2).contiguous()
    gap = pc.sparse_gap_attention_with_lse(*call[:6], None, 0.125, sinks=sinks, query_blocks=blocks * 0 - 1)
    assert not gap[0].any()
    assert torch.equal(gap[1], sinks.float()[None].expand(2, 4))


def test_flash_attention_with_a_sink_of_minus_infinity() -> None:
    sinks = torch.tensor([-math.inf, 0.5, -math.inf, 0.5])
    out, lse = flash_attn_func(
        torch.randn(1, 5, 4, 64), *torch.randn(2, 1, 3, 2, 64), causal=True, s_aux=sinks, return_softmax_lse=True
    )
    assert not out[:, :2].any()
    assert torch.equal(lse[0, :, :2], sinks[:, None].expand(4, 2))


WRITES: dict[str, Callable[..., Any]] = {
    "reshape_and_cache": lambda x, c: pc.reshape_and_cache(x, x, c, c.clone(), SLOTS),
    "rope_and_cache": lambda x, c: pc.rope_and_cache(x, x, x, ints(0, 1, 2), torch.ones(3, 64), c, c.clone(), SLOTS),
    "scatter_slots": lambda x, c: pc.scatter_slots(x, c, SLOTS),
    "scatter_slots_list": lambda x, c: pc.scatter_slots_list([x], [c], SLOTS),
    "scatter_blocks": lambda x, c: pc.scatter_blocks(x[:2, None].expand(2, 16, 2, 64), c, IDS),
    "copy_blocks": lambda x, c: pc.copy_blocks(c, IDS, IDS + 1),
    "copy_blocks_list": lambda x, c: pc.copy_blocks_list([c], IDS, IDS + 1),
    "move_slots": lambda x, c: pc.move_slots(c, None, SLOTS, SLOTS + 1, SLOTS),
    "rotate_keys": lambda x, c: pc.rotate_keys(c, IDS, IDS + 1, IDS, torch.ones(4)),
}
READS: dict[str, Callable[..., Any]] = {
    "paged_attention": lambda x, c: paged(x.repeat(4, 2, 1), c),
    "latent_attention": lambda x, c: pc.latent_attention(x.repeat(4, 2, 1), c[:, :, :1], *BATCH, 0.1, 32),
    "merge_attention": lambda x, c: pc.merge_attention(x, x[..., 0].contiguous(), x, x[..., 0].contiguous()),
    "gather_slots": lambda x, c: pc.gather_slots(c, SLOTS),
    "gather_blocks_list": lambda x, c: pc.gather_blocks_list([c], IDS)[0],
    "join_prefix": lambda x, c: pc.join_prefix(c, *BATCH[:2], x, ints(0, 1, 3), 52),
    "flash_attn_func": lambda x, c: flash_attn_func(x[None].repeat(1, 1, 2, 1), x[None], x[None]),
    "flash_attn_varlen_func": lambda x, c: flash_attn_varlen_func(
        x.repeat(1, 2, 1), x, x, ints(0, 3), ints(0, 3), 3, 3
    ),
    "flash_attn_with_kvcache": lambda x, c: flash_attn_with_kvcache(
        x[None].repeat(1, 1, 2, 1), c, c.clone(), x[None], x[None], cache_seqlens=ints(5), causal=True
    ),
    "flash_attn_combine": lambda x, c: flash_attn_combine(x[None, None].repeat(2, 1, 1, 1, 1), torch.ones(2, 1, 3, 2)),
}


def _tangent(call: Callable[..., Any], x: Tensor, cache: Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.ones_like(x)), forward_ad.make_dual(cache, torch.ones_like(cache)))


# PyTorch: "custom operator silently returns zero gradients under torch.func".
@pytest.mark.parametrize(
    "transform",
    {
        "backward": lambda call, x, c: call(x.requires_grad_(), c.requires_grad_()),
        "inference of a part": lambda call, x, c: call(x.clone().requires_grad_(), c.requires_grad_()),
        "forward_ad": _tangent,
        "jvp": lambda call, x, c: torch.func.jvp(lambda x, c: call(x, c), (x, c), (x, c)),
        "grad": lambda call, x, c: torch.func.grad(lambda xc: call(*xc) or xc[0].sum())((x, c)),
        "vjp": lambda call, x, c: torch.func.vjp(lambda x, c: call(x, c), x, c),
        "jacfwd": lambda call, x, c: torch.func.jacfwd(lambda x: call(x, c * x[0, 0, 0]))(x),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_gradients_are_refused(name: str, transform: tuple[str, Callable[..., Any]]) -> None:
    """Nothing is written in this case."""
    cache = CACHE.clone()
    before = cache.clone()
    with pytest.raises(RuntimeError, match=rf"^\w+: got a tensor .*\.detach\(\), there is no .*{name}"):
        transform[1]((WRITES | READS)[name], NEW.clone(), cache)
    assert torch.equal(cache.detach(), before)


@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_detached_tensors_are_taken_within_transforms(name: str) -> None:
    call, cache = (WRITES | READS)[name], CACHE.clone()

    def loss(x: Tensor) -> Tensor:
        call(x.detach(), cache.clone())
        with torch.no_grad():
            call(x, cache.clone())
        return (x * x).sum()

    assert torch.equal(torch.func.grad(loss)(NEW), 2 * NEW)
    x = NEW.clone().requires_grad_()
    loss(x).backward()
    assert torch.equal(x.grad, 2 * NEW)


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "k_scale": lambda s: paged(cache=CACHE.to(torch.int8), k_scale=s, v_scale=torch.ones(1)),
        "sinks": lambda s: paged(sinks=s.expand(4).contiguous()),
        "v_scale": lambda s: pc.reshape_and_cache(
            NEW, NEW, CACHE.to(torch.int8), CACHE.to(torch.int8), SLOTS, torch.ones(1), s
        ),
        "cos_sin": lambda s: pc.rope_and_cache(
            NEW, NEW, NEW, ints(0, 1, 2), s.expand(3, 64).contiguous(), CACHE.clone(), CACHE.clone(), SLOTS
        ),
        "lse_b": lambda s: pc.merge_attention(NEW, torch.ones(3, 2), NEW, s.expand(3, 2).contiguous()),
        "inv_freq": lambda s: pc.rotate_keys(CACHE.clone(), IDS, IDS, IDS, s),
        "rotary_cos": lambda s: flash_attn_with_kvcache(
            NEW[None], CACHE.clone(), CACHE.clone(), NEW[None], NEW[None], s.expand(9, 4), torch.ones(9, 4),
            cache_seqlens=ints(1),
        ),
        "k_descale": lambda s: flash_attn_func(NEW[None], NEW[None], NEW[None], k_descale=s.expand(1, 2)),
    }.items(),
)  # fmt: skip
def test_every_tensor_counts(name: str, call: Callable[[Tensor], Any]) -> None:
    """Scales and tables count too; formerly they had neither a gradient nor an error."""
    with pytest.raises(RuntimeError, match=rf"^{name}: got a tensor that requires grad"):
        call(torch.ones(1, requires_grad=True))
    with torch.no_grad():
        call(torch.ones(1, requires_grad=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_maps_reads_and_refuses_writes() -> None:
    queries = torch.randn(3, 12, 4, 64)
    found = torch.vmap(paged)(queries)
    assert torch.equal(found, torch.stack([paged(query) for query in queries]))
    with pytest.raises(RuntimeError, match="pc::scatter_slots"):
        torch.vmap(lambda c: pc.scatter_slots(NEW, c, SLOTS))(CACHE[None].clone())


# PyTorch: "custom operator mutates its input without bumping the version counter".
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_raise_versions(name: str, mode: Callable[[], Any]) -> None:
    cache, weight = CACHE.clone(), torch.ones(64, requires_grad=True)
    product = (cache * weight).sum()
    for _ in range(2):
        before = cache._version
        with mode():
            WRITES[name](NEW, cache)
        assert cache._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# PyTorch: "unsupported operation: more than one element of the written-to tensor refers to a single memory location".
@pytest.mark.parametrize("name", [*WRITES, "flash_attn_with_kvcache"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_write_to_an_expanded_cache_is_refused(name: str, dim: int) -> None:
    memory = CACHE.narrow(dim, 0, 1).clone()
    before = memory.clone()
    with pytest.raises(ValueError, match=r"cache\w*: got strides .* needs memory for each element.* use .clone\(\)"):
        (WRITES | READS)[name](NEW, memory.expand_as(CACHE))
    assert torch.equal(memory, before)


@pytest.mark.parametrize("view", [lambda cache: cache, lambda cache: cache[:]], ids=["same", "view"])
@pytest.mark.parametrize(
    ("name", "write"),
    {
        "value_cache": lambda c, v: pc.reshape_and_cache(NEW, NEW + 1, c, v, SLOTS),
        "value_cache ": lambda c, v: pc.rope_and_cache(NEW, NEW, NEW, ints(0, 1, 2), torch.ones(3, 64), c, v, SLOTS),
        "value_cache  ": lambda c, v: pc.move_slots(c, v, SLOTS, SLOTS + 1, SLOTS),
        "v_cache": lambda c, v: flash_attn_with_kvcache(
            NEW[None], c, v, NEW[None], NEW[None] + 1, cache_seqlens=ints(5)
        ),
    }.items(),
)
def test_a_write_of_keys_and_values_into_one_tensor_is_refused(
    name: str, write: Callable[[Tensor, Tensor], Any], view: Callable[[Tensor], Tensor]
) -> None:
    cache = CACHE[:1].clone() if name == "v_cache" else CACHE.clone()
    before = cache.clone()
    write(cache.clone(), cache.clone())  # now the launch for calls of this kind is known
    with pytest.raises(ValueError, match=rf"^{name.strip()}: got the memory of k\w*_cache, needs its own"):
        write(cache, view(cache))
    assert torch.equal(cache, before)


def test_rows_that_are_key_and_value_fill_one_cache() -> None:
    """Latent rows whose first features are the values, for `paged_attention`."""
    cache, expected = CACHE.clone(), CACHE.clone()
    expected.flatten(0, 1)[SLOTS] = NEW
    pc.reshape_and_cache(NEW, NEW, cache, cache, SLOTS)
    assert torch.equal(cache, expected)
    pc.reshape_and_cache(NEW, NEW[..., :32], cache, cache[..., :32], SLOTS)
    assert torch.equal(cache, expected)


def test_a_plan_that_is_refreshed_raises_its_version() -> None:
    plan = pc.attention_plan(*BATCH, 16)
    before = plan._version
    pc.attention_plan(*BATCH, 16, out=plan)
    assert plan._version > before


# PyTorch 198031: a compiler removes a clone, and an operator gets one tensor as source and target.
@pytest.mark.slow  # compiles C++; the next test finds a source that is not read first
def test_a_compiled_write_whose_clone_was_removed() -> None:
    def permute(cache: Tensor, order: Tensor) -> Tensor:
        pc.scatter_blocks(cache.clone(), cache, order)
        return cache * 2

    cache, order = torch.randn(64, 4, 2, 48), torch.arange(64).roll(-1)
    wanted = permute(cache.clone(), order)
    assert torch.equal(torch.compile(permute, fullgraph=True)(cache, order), wanted)


@pytest.mark.parametrize("name", ["reshape", "rope", "scatter", "list", "blocks", "quantized"])
@pytest.mark.parametrize("shift", [0, 1, 7])
def test_a_source_that_lies_in_the_cache_is_read_first(name: str, shift: int) -> None:
    def call(source: Tensor, cache: Tensor, other: Tensor) -> None:
        slots = torch.arange(len(source)).flip(0)
        if name == "reshape" or name == "quantized":
            pc.reshape_and_cache(source, source, cache, other, slots)
        elif name == "rope":
            pc.rope_and_cache(source, source, source, slots, torch.randn(96, 64).fill_(0.5), cache, other, slots)
        elif name == "scatter":
            pc.scatter_slots(source, cache, slots)
        elif name == "list":
            pc.scatter_slots_list([source, source], [other, cache], slots)
        else:
            pc.scatter_blocks(source[:80].view(5, 16, 2, 64), cache, torch.arange(5).flip(0))

    cache, other = CACHE.clone(), CACHE.clone()
    wanted, wanted_other = CACHE.clone(), CACHE.clone()
    own = wanted.flatten(0, 1)[shift:].clone()
    call(own, wanted, wanted_other)
    call(cache.flatten(0, 1)[shift:], cache, other)
    assert torch.equal(cache, wanted)
    assert torch.equal(other, wanted_other)


def test_parts_of_one_memory_that_do_not_overlap_are_not_copied() -> None:
    memory = torch.randn(2, 6, 16, 2, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pc.scatter_blocks(memory[0, :2], memory[1], IDS)
    assert not [event for event in profile.events() if event.name == "aten::clone"]
    assert torch.equal(memory[1, IDS], memory[0, :2])


# transformers, vLLM: "sliding_window = sys.maxsize", "window_size 2**31 - 1 means none".
HUGE = [2**30 - 1, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**40, sys.maxsize]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("huge", HUGE)
def test_a_huge_window_bounds_nothing(huge: int, causal: bool) -> None:
    wanted = paged(causal=causal)
    positions = torch.cat((ints(19), torch.arange(21, 32, dtype=torch.int32)))
    plan = pc.attention_plan(*BATCH, 16, causal, huge, num_kv_heads=2)
    gap = pc.sparse_gap_attention(QUERY, CACHE, CACHE, *BATCH, positions, 0.125, huge, huge, causal)
    for found in (windowed(huge, causal=causal), windowed(huge, causal=causal, plan=plan), gap):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    sides = flash_attn_func(QUERY[None], CACHE[:1], CACHE[:1], causal=causal, window_size=(huge, huge))
    torch.testing.assert_close(sides, flash_attn_func(QUERY[None], CACHE[:1], CACHE[:1], causal=causal))


@pytest.mark.parametrize("huge", HUGE)
def test_a_huge_number_of_sink_tokens_is_all(huge: int) -> None:
    torch.testing.assert_close(windowed(3, huge), paged(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(windowed(3, huge, causal=False), windowed(3, 32, causal=False))
    pc.attention_plan(*BATCH, 16, True, 3, huge)


@pytest.mark.parametrize("name", ["window", "num_sink_tokens", "max_seq_len"])
@pytest.mark.parametrize("value", [2**63, 2**100, -(2**70)])
def test_a_number_of_more_than_64_bits_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got {value}, needs an int"):
        pc.sliding_window_attention(QUERY, CACHE, CACHE, *BATCH, 0.125, **{"window": 3, name: value})


# PyTorch: "0-d tensor accepted as a float once".
@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"scale": torch.tensor(0.25)}, {"scale": 0.25}),
        ({"softcap": torch.tensor(3.0)}, {"softcap": 3.0}),
        ({"max_query_len": ints(0, 11).max()}, {"max_query_len": 11}),
        ({"max_seq_len": torch.tensor(32)}, {"max_seq_len": 32}),
        ({"causal": torch.tensor(False)}, {"causal": False}),
    ],
)
def test_numbers_as_tensors_are_taken_at_every_call(options: dict[str, Any], same: dict[str, Any]) -> None:
    wanted = paged(**same)
    for _ in range(3):
        assert torch.equal(paged(**options), wanted)


# PyTorch: "negative bit of a view is ignored by custom kernels".
@pytest.mark.parametrize("lazy", [torch._neg_view, lambda x: torch.complex(x, -x).conj().imag], ids=["neg", "imag"])
def test_lazy_bits_are_resolved_at_every_call(lazy: Callable[[Tensor], Tensor]) -> None:
    query, cache, new = lazy(QUERY.contiguous()), lazy(CACHE), lazy(NEW)
    query, cache, new = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, cache, new))
    plain = [x.clone() for x in (query, cache, new)]
    for _ in range(3):
        assert torch.equal(paged(query, cache), paged(*plain[:2]))
        assert torch.equal(pc.gather_slots(cache, SLOTS), plain[1].flatten(0, 1)[SLOTS])
        written, twin = torch._neg_view(CACHE.clone()), torch._neg_view(CACHE.clone())
        pc.reshape_and_cache(new, new, written, twin, SLOTS)
        pc.scatter_slots_list([new], [twin], SLOTS + 1)
        assert torch.equal(written.flatten(0, 1)[SLOTS], plain[2])
        assert torch.equal(twin.flatten(0, 1)[SLOTS + 1], plain[2])
        found = flash_attn_func(query[None], new[None], new[None], causal=False)
        assert torch.equal(found, flash_attn_func(plain[0][None], plain[2][None], plain[2][None]))


def test_conjugated_rows_are_moved() -> None:
    cache = torch.randn(4, 2, 3, dtype=torch.complex64).conj()
    for _ in range(2):
        assert torch.equal(pc.gather_blocks(cache, IDS), cache.resolve_conj()[IDS])
        pc.scatter_blocks(cache[:2].clone(), cache, IDS)


# FlashInfer: "merge_state overflows".
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("a", "b", "lse_a", "wanted"),
    [
        (3e38, -3e38, 0.0, 0.0),
        (-3e38, 3e38, 0.0, 0.0),
        (3e38, 3e38, 0.0, 3e38),
        (math.inf, 1.0, 0.0, math.inf),
        (math.inf, -1e30, 5.0, math.inf),
        (math.inf, 2.0, -300.0, 2.0),
        (math.nan, 2.0, -math.inf, 2.0),
    ],
)
def test_merges_of_huge_values(a: float, b: float, lse_a: float, wanted: float, dtype: torch.dtype) -> None:
    like = torch.empty(5, 2, 8, dtype=dtype)
    for parts in (((a, lse_a), (b, 0.0)), ((b, 0.0), (a, lse_a))):
        given = [x for value, lse in parts for x in (torch.full_like(like, value), torch.full((5, 2), lse))]
        found, _ = pc.merge_attention(*given)
        torch.testing.assert_close(found, torch.full_like(like, wanted), rtol=1e-6, atol=0)


def test_attention_merges_parts_of_huge_values() -> None:
    """Two spans of keys, sink tokens and a window, have results that differ by more than float32's range."""
    values = torch.zeros(6, 16, 2, 64)
    values[0], values[1] = 1.2e37, -1.2e37
    call = (torch.zeros(1, 4, 64), values * 0, values, ints(0, 2, 3, 1)[None], ints(64), ints(0, 1), 0.125)
    assert torch.isfinite(pc.sliding_window_attention(*call, 16, 16)).all()


# PyTorch: "meta tensor beside CPU tensors silently does nothing".
ON_META = ["reshape_and_cache", "rope_and_cache", "scatter_slots", "scatter_slots_list", "scatter_blocks"]
ON_META += ["paged_attention", "latent_attention", "join_prefix", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


@pytest.mark.parametrize("name", ON_META)
def test_a_tensor_on_meta_beside_real_ones_is_refused(name: str) -> None:
    cache = CACHE.clone()
    with pytest.raises(ValueError, match=r"^\w+: got .*(cpu|meta)"):
        (WRITES | READS)[name](NEW.to("meta"), cache)
    assert torch.equal(cache, CACHE)


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "block_ids": lambda i: pc.gather_blocks(CACHE, i(IDS)),
        "slot_mapping": lambda i: pc.scatter_slots(NEW, CACHE, i(SLOTS)),
        "target_ids": lambda i: pc.copy_blocks(CACHE, IDS, i(IDS)),
        "deltas": lambda i: pc.rotate_keys(CACHE, IDS, IDS, i(IDS), torch.ones(4)),
        "source_slots": lambda i: pc.move_slots(CACHE, None, i(SLOTS), SLOTS, SLOTS),
        "seq_lens": lambda i: pc.attention_plan(BATCH[0], i(BATCH[1]), BATCH[2], 16),
        "out": lambda i: pc.attention_plan(*BATCH, 16, out=i(pc.attention_plan(*BATCH, 16))),
        "block_tables": lambda i: pc.join_prefix(CACHE, i(BATCH[0]), BATCH[1], NEW, ints(0, 1, 3), 52),
        "positions": lambda i: pc.rope_and_cache(
            NEW, NEW, NEW, i(ints(0, 1, 2)), torch.ones(3, 64), CACHE, CACHE.clone(), SLOTS
        ),
    }.items(),
)
def test_an_index_on_meta_is_refused(name: str, call: Callable[[Callable[[Tensor], Tensor]], Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got device meta, needs device cpu"):
        call(lambda index: index.to("meta"))


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, meta: pc.scatter_slots(meta[0], cache, torch.tensor([0, 1])),
        lambda cache, meta: pc.scatter_slots_list([meta[0], cache[0]], [cache, cache.clone()], torch.tensor([0, 1])),
        lambda cache, meta: pc.gather_blocks_list([meta, cache], torch.tensor([0])),
        lambda cache, meta: pc.copy_blocks_list([meta, cache], torch.tensor([0]), torch.tensor([1])),
        lambda cache, meta: pc.join_prefix(meta, ints(0)[None], ints(2), cache[0], ints(0, 2), 2),
    ],
    ids=["source", "sources", "gather", "copy", "new"],
)
def test_rows_of_integers_on_meta_are_no_index(call: Callable[[Tensor, Tensor], Any]) -> None:
    """Formerly an integer cache on the host passed for an index, and nothing was written or read."""
    cache = torch.arange(6).view(3, 2)
    before = cache.clone()
    with pytest.raises(ValueError, match=r"^\w+: got device (cpu|meta), needs"):
        call(cache, cache.to("meta"))
    assert torch.equal(cache, before)


def test_shapes_of_tensors_on_meta() -> None:
    found = pc.gather_blocks(CACHE.to("meta"), IDS)
    assert (found.device.type, found.shape) == ("meta", (2, 16, 2, 64))


# PyTorch: "is_contiguous() of a tensor with a dimension of one, whose stride is any".
@pytest.mark.parametrize("step", [1, 2, 3])
def test_heads_of_one_feature(step: int) -> None:
    cache, query = torch.randn(6, 16, 2, step)[..., :1], torch.randn(12, 4, 1)
    for keys in (cache, cache.transpose(2, 3).contiguous().transpose(2, 3)):
        assert keys.shape[-1] == 1
        wanted = paged(query, keys.contiguous().as_strided(keys.shape, (32, 2, 1, 1)))
        torch.testing.assert_close(paged(query, keys), wanted)
        written = keys.clone(memory_format=torch.preserve_format)
        pc.reshape_and_cache(NEW[..., :1], NEW[..., :1], written, keys.clone(), SLOTS)
        assert torch.equal(written[SLOTS // 16, SLOTS % 16], NEW[..., :1])


# Errors that name nothing or contradict themselves.
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paged(torch.randn(12, 0, 64)), r"query: got shape \[12, 0, 64\], needs at least one head"),
        (
            lambda: paged(plan=torch.stack([pc.attention_plan(*BATCH, 16)] * 2, 1)[:, 0]),
            r"plan: got \d+ elements with strides \(2,\), needs \d+ contiguous ones",
        ),
        (lambda: flash_attn_func(*[_jagged()] * 3), r"q: got a nested tensor, needs a tensor \[batch"),
        (lambda: flash_attn_varlen_func(NEW, _jagged(), NEW, ints(0, 3), ints(0, 3)), "k: got a nested tensor"),
        (lambda: pc.gather_blocks(CACHE.to_sparse(), IDS), r"cache: got layout torch.sparse_coo, needs torch.strided"),
        (lambda: pc.gather_blocks_list([CACHE.to_sparse()], IDS), "caches: got layout torch.sparse_coo"),
        (
            lambda: flash_attn_func(NEW[None].to_sparse(), NEW[None], NEW[None]),
            "q: got torch.sparse_coo, needs a tensor",
        ),
        (lambda: pc.attention_plan(BATCH[0] * 0 - 3, *BATCH[1:], 16), "block_tables: got -3 in row 0, column 0"),
        (lambda: dense(dropout_p=torch.zeros(2)), r"dropout_p: got tensor\(\[0., 0.\]\), needs a number"),
        (lambda: dense(return_softmax_lse=[1]), r"return_softmax_lse: got \[1\], needs a bool"),
        (lambda: dense(attention_chunk=np.ones(2)), r"attention_chunk: got array\(\[1., 1.\]\), needs an int"),
        (lambda: in_blocks(ints(0)), r"block_table: got shape \[1\], needs \[batch, max_blocks\]"),
        (lambda: in_blocks(ints(1, 9)[None]), "block_table: got 9 in row 0, column 1, needs -1 to 5"),
        (
            lambda: in_blocks(ints(1, -3)[None], causal=True, attention_chunk=3),
            "block_table: got -3 in row 0, column 1",
        ),
        (
            lambda: cached(block_table=ints(1, -3)[None], cache_leftpad=ints(1)),
            "block_table: got -3 in row 0, column 1",
        ),
        (lambda: cached(rotary_cos=torch.ones(32, 8).int()), r"rotary_cos: got int32 \[32, 8\] on cpu, needs floats"),
        (lambda: cached(rotary_sin=torch.ones(32, 8).bool()), r"rotary_sin: got bool \[32, 8\] on cpu, needs floats"),
        (lambda: cached(v_cache=CACHE.to("meta")), "v_cache: got device meta, needs device cpu of q"),
        (
            lambda: flash_attn_combine(CACHE[:, :2], CACHE[:, :2, :, 0], out_dtype=torch.int32),
            "out_dtype: got torch.int32",
        ),
        (lambda: metadata(batch_size="x"), "batch_size: got 'x', needs an int"),
        (lambda: metadata(page_size=2**40), "page_size: got 1099511627776, needs at least 1 and below"),
        (lambda: metadata(causal=[1]), r"causal: got \[1\], needs a bool"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{message}"):
        call()


def dense(**options: Any) -> Any:
    return flash_attn_func(NEW[None], NEW[None], NEW[None], **options)


def in_blocks(table: Tensor, **options: Any) -> Any:
    """Attend to 20 keys over a block table, which is padded because there might be more queries than keys."""
    return flash_attn_varlen_func(
        QUERY, CACHE, CACHE, ints(0, 12), None, 12, 32, seqused_k=ints(20), block_table=table, **options
    )


def cached(**changes: Any) -> Any:
    given = {"q": NEW[None], "k_cache": CACHE, "v_cache": CACHE, "k": NEW[None], "v": NEW[None]}
    given |= {"rotary_cos": torch.ones(32, 8), "rotary_sin": torch.ones(32, 8), "block_table": ints(1, 2)[None]}
    return flash_attn_with_kvcache(**(given | {"cache_seqlens": ints(20)} | changes))


def metadata(**changes: Any) -> Tensor:
    given = {"batch_size": 1, "max_seqlen_q": 1, "max_seqlen_k": 64, "num_heads_q": 8, "num_heads_kv": 2}
    return get_scheduler_metadata(**(given | {"headdim": 64, "cache_seqlens": ints(20)} | changes))


def _jagged() -> Tensor:
    parts = [torch.randn(3, 4, 64), torch.randn(5, 4, 64)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


class _Step(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, new: Tensor, lens: Tensor, cos: Tensor | None = None) -> Tensor:
        window = (4, 0) if cos is None else (-1, -1)
        return flash_attn_with_kvcache(q, k, v, new, new, cos, cos, lens, causal=True, window_size=window)


# PyTorch: "export bakes a dynamic size into the program".
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_exports_take_any_batch_and_number_of_new_tokens(strict: bool, rotates: bool) -> None:
    def inputs(batch: int, count: int) -> tuple[Tensor, ...]:
        cache, new = torch.randn(2, batch, 32, 2, 64), torch.randn(batch, count, 2, 64)
        return torch.randn(batch, count, 4, 64), *cache, new, torch.full((batch,), 9, dtype=torch.int32)

    batch, count = torch.export.Dim("batch", min=2, max=16), torch.export.Dim("count", min=2, max=8)
    step, more = _Step(), (torch.rand(64, 16),) if rotates else ()
    shapes = ({0: batch, 1: count}, {0: batch}, {0: batch}, {0: batch, 1: count}, {0: batch}, *[None] * len(more))
    with torch.no_grad():
        program = torch.export.export(step, (*inputs(3, 5), *more), dynamic_shapes=shapes, strict=strict).module()
        for sizes in ((3, 5), (7, 2), (2, 8)):
            given = inputs(*sizes)
            copies = [x.clone() for x in given]
            torch.testing.assert_close(program(*given, *more), step(*copies, *more))
            for found, wanted in zip(given, copies, strict=True):
                torch.testing.assert_close(found, wanted)
