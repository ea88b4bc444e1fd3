"""What FlashAttention's functions compute, from the formula in its documentation: dense, sequence by sequence."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from attention_cases import check_error, formula
from row_cases import rotated

from pc.triton_ops import _flash, flash_attn
from pc.triton_ops._core import cache as launch_cache
from pc.triton_ops._core import operator as launch_operator
from pc.triton_ops._core.runtime import INTERPRET

EMPTY = -math.inf


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Within it no value of a tensor is read, and what was chosen for a call is found again, where kernels run."""
    with contextlib.ExitStack() as stack:
        for module in (_flash.attend, launch_cache, launch_operator, flash_attn):
            stack.enter_context(mock.patch.object(module, "reads_values", return_value=False))
        stack.enter_context(mock.patch.object(_flash.paged_kv, "lowest_entry"))
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
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    bias = None if alibi_slopes is None else -alibi_slopes.to(dtype)[:, None, None] * (i - j).abs()
    return formula(q, k, v, seen, scale, softcap, bias, s_aux)


def check(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """Check packed results against those of each sequence's q, k and v, as `check_error` does.

    Args:
        out: `[tokens, heads, d]`.
        lse: `[heads, tokens]`.
        sequences: q, k and v of each.
        dtype: That the library computed in.
        options: As for `attention`; alibi_slopes may be `[sequences, heads]`.
    """
    slopes = options.pop("alibi_slopes", None)
    own = [slopes] * len(sequences) if slopes is None or slopes.dim() == 1 else [*slopes]
    exact, eager = (
        [
            attention(*sequence, **options, alibi_slopes=each, dtype=kind)
            for sequence, each in zip(sequences, own, strict=True)
        ]
        for kind in (torch.float64, dtype)
    )
    expected, low = (torch.cat([result[0].double() for result in results]) for results in (exact, eager))
    assert out.shape == expected.shape
    if not out.numel():
        return
    check_error(out, expected, low, dtype)
    if lse is not None:
        expected_lse = torch.cat([result[1] for result in exact], 1)
        assert lse.shape == expected_lse.shape
        assert torch.equal(lse == EMPTY, expected_lse == EMPTY)
        some = expected_lse != EMPTY
        assert not some.any() or (lse.double() - expected_lse)[some].abs().max().item() < 1e-3


HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}
E4M3 = torch.float8_e4m3fn


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def in_pages(
    keys: list[torch.Tensor], values: list[torch.Tensor], generator: torch.Generator, size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a paged cache that holds these, with NaN elsewhere, and its block table."""
    width = max(1, *(-(-len(key) // size) for key in keys))
    order = torch.randperm(len(keys) * width + 2, generator=generator)[: len(keys) * width].to(torch.int32)
    tables = order.view(len(keys), width)
    caches = []
    for own in (keys, values):
        cache = own[0].new_full((len(keys) * width + 2, size, *own[0].shape[1:]), float("nan"))
        for table, rows in zip(tables.tolist(), own, strict=True):
            for begin in range(0, len(rows), size):
                cache[table[begin // size], : len(rows[begin : begin + size])] = rows[begin : begin + size]
        caches.append(cache)
    return caches[0], caches[1], tables


@dataclasses.dataclass(frozen=True)
class Case:
    """A call over keys without a cache: numbers of queries and keys, options, and the shapes of heads.

    In `term`, the values of tensors only name them: alibi_slopes may be "each", for slopes of each sequence.
    """

    lengths: tuple[int, int]
    mask: dict[str, Any]
    term: dict[str, Any]
    heads: str = "gqa"
    head_dim: int = 64
    dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        options = {**self.mask, **self.term}
        return f"{self.lengths} {options} {self.heads} {self.head_dim} {self.dtype}".replace("torch.", "")

    def options(self, generator: torch.Generator, count: int) -> dict[str, Any]:
        """Return the options of a call for `count` sequences."""
        heads, given = HEADS[self.heads][0], {**self.mask, **self.term}
        if "alibi_slopes" in given:
            shape = (count, heads) if given["alibi_slopes"] == "each" else (heads,)
            given["alibi_slopes"] = torch.rand(shape, generator=generator) * 0.3
        if "s_aux" in given:
            given["s_aux"] = torch.randn(heads, generator=generator).to(self.dtype)
        return given

    def drawn(self, generator: torch.Generator, queries: int, keys: int) -> list[torch.Tensor]:
        """Return q, k and v of a sequence."""
        num_heads, kv_heads = HEADS[self.heads]
        shapes = ((queries, num_heads), (keys, kv_heads), (keys, kv_heads))
        return [torch.randn(*shape, self.head_dim, generator=generator).to(self.dtype) for shape in shapes]


def check_dense(case: Case, layout: str) -> None:
    """Call flash_attn_func with tensors in one of the layouts "tokens first", "heads first", "mixed" and "sliced"."""
    generator = torch.Generator().manual_seed(0)
    options, (seqlen_q, seqlen_k) = case.options(generator, 3), case.lengths
    sequences = [case.drawn(generator, seqlen_q, seqlen_k) for _ in range(3)]
    q, k, v = (torch.stack(tensors) for tensors in zip(*sequences, strict=True))
    if layout != "tokens first":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    if layout in ("heads first", "sliced"):
        q, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, v))
    if layout == "sliced":
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 13), value=float("nan"))[:, :seqlen_k] for x in (k, v))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    shapes = ((*q.shape[:3], v.shape[3]), (3, q.shape[2], seqlen_q))
    assert (out.dtype, out.shape, lse.shape) == (case.dtype, *shapes)
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, case.dtype, **options)
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, **options))


LENS_Q, LENS_K = (0.0, 1.0, 0.7, 0.02, 0.4), (0.6, 1.0, 0.0, 0.5, 0.9)


def check_varlen(case: Case, paged: bool) -> None:
    """Call flash_attn_varlen_func with sequences of parts of the case's lengths, and with rows of padding."""
    generator = torch.Generator().manual_seed(0)
    options = case.options(generator, len(LENS_Q))
    lens_q, lens_k = (
        [round(part * length) for part in parts] for parts, length in zip((LENS_Q, LENS_K), case.lengths, strict=True)
    )
    sequences = [case.drawn(generator, n, m) for n, m in zip(lens_q, lens_k, strict=True)]
    q, k, v = (torch.cat(tensors) for tensors in zip(*sequences, strict=True))
    tables = None
    if paged:
        k, v, tables = in_pages([s[1] for s in sequences], [s[2] for s in sequences], generator)
    out, lse = flash_attn.flash_attn_varlen_func(
        torch.cat([q, torch.full_like(q[:2], float("nan"))]), k, v, starts(*lens_q), starts(*lens_k), max(lens_q),
        max(lens_k), block_table=tables, return_softmax_lse=True, **options,
    )  # fmt: skip
    assert not out[len(q) :].any()
    check(out[: len(q)], lse[:, : len(q)], sequences, case.dtype, **options)


@dataclasses.dataclass(frozen=True)
class Cached:
    """A call with a cache: queries and new keys of each sequence, and the kind of cache.

    Attributes:
        before: Keys in the cache; None: random numbers.
        rotary: The share of head_dim that is rotated.
        packed: Whether queries are packed, as in FlashAttention 3; `packed_new`: whether new keys are.
        code: Whether all is float8.
    """

    queries: tuple[int, ...]
    new: tuple[int, ...]
    length: int
    before: tuple[int, ...] | None = None
    rotary: float = 0.0
    interleaved: bool = False
    paged: int = 0
    batch_idx: bool = False
    leftpad: bool = False
    mask: tuple[tuple[str, Any], ...] = ()
    term: str = ""
    heads: str = "gqa"
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    packed: bool = False
    packed_new: bool = False
    code: bool = False

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in changed if value)


def _stored(x: torch.Tensor, dtype: torch.dtype, by_kernel: bool, code: bool) -> torch.Tensor:
    """Round a rotated query or key. In Triton's interpreter, a kernel truncates to bfloat16 where a device rounds."""
    if INTERPRET and by_kernel and dtype == torch.bfloat16:
        x = x.float().view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)
    return x.to(dtype).to(E4M3).to(dtype) if code else x.to(dtype)


def check_cached(case: Cached) -> None:
    """Call flash_attn_with_kvcache, and check the result and what the call wrote to the cache."""
    generator, mask, count = torch.Generator().manual_seed(1), dict(case.mask), len(case.queries)
    (num_heads, kv_heads), dim, is_local = HEADS[case.heads], case.head_dim, bool(case.mask)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator).to(case.dtype)
        return x.to(E4M3).to(case.dtype) if case.code else x

    queries = [normal(n, num_heads, dim) for n in case.queries]
    keys, values = ([normal(n, kv_heads, dim) for n in case.new] for _ in range(2))
    num_rows = count + 2 if case.batch_idx else count
    caches = [normal(num_rows, case.length, kv_heads, dim) for _ in range(2)]
    chosen = torch.randperm(num_rows, generator=generator)[:count].to(torch.int32)
    chosen = chosen if case.batch_idx else torch.arange(count, dtype=torch.int32)
    room = case.length - max(case.new)
    before = torch.randint(0 if any(case.new) else 1, room + 1, (count,), generator=generator, dtype=torch.int32)
    before = before if case.before is None else torch.tensor(case.before, dtype=torch.int32)
    leftpad = (before * torch.rand(count, generator=generator)).int() * case.leftpad
    options: dict[str, Any] = {
        "softcap": {"softcap": 15.0}, "s_aux": {"s_aux": normal(num_heads)},
        "alibi": {"alibi_slopes": torch.rand(num_heads, generator=generator) * 0.3},
        "each": {"alibi_slopes": torch.rand(count, num_heads, generator=generator) * 0.3}, "": {},
    }[case.term]  # fmt: skip
    angle = torch.rand(case.length + max(case.queries), int(case.rotary * dim) // 2, generator=generator) * 6
    cos, sin = angle.cos().to(case.dtype), angle.sin().to(case.dtype)

    wanted, sequences = [cache.clone() for cache in caches], []
    for i, (q, k, v, length) in enumerate(zip(queries, keys, values, before.tolist(), strict=True)):
        row, at = int(chosen[i]), torch.arange(length, length + len(k))
        if case.rotary:
            by_kernel = len(k) == len(q) and (is_local or len(k) == 1)
            places = length + torch.arange(len(q)) * is_local
            q = _stored(rotated(q, cos[places], sin[places], case.interleaved), case.dtype, by_kernel, False)
            k = _stored(rotated(k, cos[at], sin[at], case.interleaved), case.dtype, by_kernel, case.code)
        wanted[0][row, at], wanted[1][row, at] = k, v
        span = slice(int(leftpad[i]), length + len(k))
        sequences.append((q, wanted[0][row, span], wanted[1][row, span]))

    given: dict[str, Any] = {**mask, **options, "cache_seqlens": before, "return_softmax_lse": True}
    if any(case.new):
        given |= {name: (torch.cat if case.packed_new else torch.stack)(x) for name, x in (("k", keys), ("v", values))}
    given |= {"cu_seqlens_q": starts(*case.queries), "max_seqlen_q": max(case.queries)} if case.packed else {}
    given |= {"cu_seqlens_k_new": starts(*case.new)} if case.packed_new else {}
    given |= {"cache_batch_idx": chosen} if case.batch_idx else {}
    given |= {"cache_leftpad": leftpad} if case.leftpad else {}
    given |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": case.interleaved} if case.rotary else {}
    q = (torch.cat if case.packed else torch.stack)(queries)
    if case.paged:
        *caches, given["block_table"] = in_pages([*caches[0]], [*caches[1]], generator, case.paged)
    if case.code:
        given |= {name: given[name].to(E4M3) for name in ("k", "v")}
        q, *caches = (x.nan_to_num().to(E4M3) for x in (q, *caches))
    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, **given)
    if not case.packed:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    check(out, lse, sequences, case.dtype, **mask, **options)
    for cache, expected in zip(caches, wanted, strict=True):
        found = cache.to(case.dtype)
        if case.paged:
            found = torch.stack([found[t.long()].flatten(0, 1)[: case.length] for t in given["block_table"]])
        if case.rotary:  # keys are rotated in float32 and rounded once
            eps, atol = (0.13, 0.013) if case.code else (torch.finfo(case.dtype).eps, 1e-5)
            torch.testing.assert_close(found, expected, atol=atol, rtol=eps)
        else:
            assert torch.equal(found, expected)
