"""Formulas of the operators in PyTorch, written from their contracts, and the comparison of a result with them.

Nothing here shares code with kernels, or with the PyTorch that serves CPU tensors. Formulas of arithmetic take the
dtype of the computation: float64 gives the exact result, the tensors' own dtype shows the effect of rounding alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .._attention.arguments import AttentionArgs
from .._attention.layout import DEAD_TILES, DECODE_QUERIES, PARTIAL_TILES, TILE_KEYS


class Near(NamedTuple):
    """An expected result of arithmetic: in float64, and of the same formula in the dtype of the result.

    `allowed` is how far each element may be from the exact one; None: as far as rounding explains.
    """

    exact: torch.Tensor
    rounded: torch.Tensor
    allowed: float | None = None


Expected = torch.Tensor | Near
"""An expected result. If it is a tensor, results must be equal to it bit for bit."""


def difference(found: torch.Tensor, expected: Expected) -> tuple[float, float]:
    """Return the difference between a result and its expectation, and the largest allowed difference.

    The error of a kernel may be at most twice the error of the formula in the result's dtype, plus one rounding. In
    float32 both errors come from the order of a sum, so a single element may be off by eight roundings. If results must
    be equal, the second number is 0.
    """
    found = found.detach().cpu()
    if isinstance(expected, torch.Tensor):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return math.inf, 0.0
        if torch.equal(_bytes(found), _bytes(expected)):
            return 0.0, 0.0
        return max(_worst(found.double() - expected.double()), sys.float_info.min), 0.0
    exact, dtype = expected.exact, expected.rounded.dtype
    infinite = exact.isinf()
    if found.shape != exact.shape or found.dtype != dtype or not torch.equal(found.isinf(), infinite):
        return math.inf, 0.0
    error = (found.double() - exact).masked_fill(infinite, 0)
    if expected.allowed is not None:
        return _worst(error), expected.allowed
    rounding = (expected.rounded.double() - exact).masked_fill(infinite, 0)
    one = torch.finfo(dtype).eps * max(1.0, _worst(exact.masked_fill(infinite, 0)))
    allowed = 2 * _worst(rounding) + (8 if dtype == torch.float32 else 1) * one
    # The root mean square finds small errors everywhere. Its excess is scaled so that `allowed` bounds it too.
    excess = _rms(error) / (2 * _rms(rounding) + one)
    return (max(_worst(error), excess * allowed) if not excess <= 1 else _worst(error)), allowed


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _worst(errors: torch.Tensor) -> float:
    """Return the largest absolute value; infinite if a value is NaN."""
    worst = errors.abs().max().item() if errors.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


def _rms(errors: torch.Tensor) -> float:
    return errors.square().mean().sqrt().item() if errors.numel() else 0.0


def arguments_of(call: Mapping[str, Any]) -> AttentionArgs:
    """Return a call's arguments with defaults. Latent rows are keys of one head, and their first columns its values."""
    given = dict(call)
    if "cache" in given:
        rows = given.pop("cache").unsqueeze(2)
        given |= {"key_cache": rows, "value_cache": rows[..., : given["value_dim"]], "v_scale": given.get("k_scale")}
    return AttentionArgs(**given)


def attended(args: AttentionArgs, index: int) -> torch.Tensor:
    """Return which keys the queries of a sequence attend to: `[kv_heads, queries, seq_len]`."""
    length, window = int(args.seq_lens[index]), args.window
    begin, end = args.query_start_loc[index : index + 2].tolist()
    t, p = torch.arange(length), positions(args, index)[:, None]
    live = torch.ones(end - begin, length, dtype=torch.bool)
    if args.causal:
        live &= t <= p
    if window:
        live &= (t > p - window) | (t < args.num_sink_tokens)
        if not args.causal:
            live &= t < p + window
    if args.tree_mask is not None:
        words, bits = args.tree_mask[begin:end].long(), torch.arange(end - begin)
        live[:, length - len(bits) :] = (words[:, bits // 32] >> (bits % 32)) & 1 != 0
    _, size, kv_heads, _ = args.key_cache.shape
    live = live & (tables_of(args, index)[:, t // size] >= 0)[:, None]
    if args.query_blocks is not None:
        lists = args.query_blocks[begin:end].transpose(0, 1)
        live = live & (lists[..., None] == t // size).any(2)
    return live.expand(kv_heads, -1, -1)


def positions(args: AttentionArgs, index: int) -> torch.Tensor:
    """Return the absolute positions of a sequence's queries, `[queries]` int64."""
    begin, end = args.query_start_loc[index : index + 2].tolist()
    given, length = args.query_positions, int(args.seq_lens[index])
    return torch.arange(length - (end - begin), length) if given is None else given[begin:end].long()


def tables_of(args: AttentionArgs, index: int) -> torch.Tensor:
    """Return the block tables of a sequence, `[1 or kv_heads, max_blocks]`."""
    return args.block_tables[index].view(-1, args.block_tables.shape[-1])


def attention(call: Mapping[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what an attention operator gives for these arguments, `out` and `lse`, computed in `dtype`."""
    args = arguments_of(call)
    query, (_, size, kv_heads, _) = args.query.to(dtype), args.key_cache.shape
    sides = [
        cache.to(dtype) if scale is None else cache.to(dtype) * scale.to(dtype).view(-1, 1)
        for cache, scale in ((args.key_cache, args.k_scale), (args.value_cache, args.v_scale))
    ]
    out = torch.zeros((*query.shape[:2], args.value_cache.shape[3]), dtype=dtype)
    lse = torch.full(query.shape[:2], -math.inf, dtype=dtype)
    for index, length in enumerate(args.seq_lens.tolist()):
        begin, end = args.query_start_loc[index : index + 2].tolist()
        live, t, p = attended(args, index), torch.arange(length), positions(args, index)
        blocks = tables_of(args, index)[:, t // size].clamp(min=0).long()
        slots = (blocks * size + t % size).expand(kv_heads, -1)
        read = live.any(1)[..., None]
        key, value = (
            torch.where(read, side.flatten(0, 1)[slots, torch.arange(kv_heads)[:, None]], 0) for side in sides
        )
        own = query[begin:end].unflatten(1, (kv_heads, -1))
        score = torch.einsum("qkgd,ktd->kgqt", own, key) * args.scale
        if args.softcap:
            score = args.softcap * torch.tanh(score / args.softcap)
        if args.alibi_slopes is not None:
            at = t.clone()
            if args.tree_mask is not None:
                at[length - len(p) :] = p
            slopes = args.alibi_slopes.to(dtype).view(kv_heads, -1, 1, 1)
            score = score + slopes * (at - p[:, None]).to(dtype)
        score = score.masked_fill(~live[:, None], -math.inf)
        if args.sinks is not None:
            column = args.sinks.to(dtype).view(kv_heads, -1, 1, 1).expand(-1, -1, end - begin, 1)
            score = torch.cat((score, column), -1)
        row_lse = torch.logsumexp(score, -1)
        weights = torch.exp(score - row_lse.masked_fill(row_lse == -math.inf, 0.0)[..., None])[..., :length]
        out[begin:end] = torch.einsum("kgqt,ktd->qkgd", weights, value).flatten(1, 2)
        lse[begin:end] = row_lse.permute(2, 0, 1).flatten(1)
    return out, lse


def merged(call: Mapping[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `merge_attention` gives. The outputs are merged in `dtype`, the log-sum-exps in float64."""
    both = torch.stack((call["lse_a"], call["lse_b"])).double()
    lse = torch.logsumexp(both, 0)
    weights = torch.exp(both - lse.masked_fill(lse == -math.inf, 0.0)).to(dtype)[..., None]
    return weights[0] * call["out_a"].to(dtype) + weights[1] * call["out_b"].to(dtype), lse.to(dtype)


def rotated(
    x: torch.Tensor, angles: torch.Tensor, dtype: torch.dtype, interleaved: bool, first: int = 0
) -> torch.Tensor:
    """Return `x` `[tokens, heads, width]` with its pairs from column `first` on rotated, computed in `dtype`.

    Args:
        x: Queries or keys.
        angles: `[tokens, pairs]`, complex128: cosine and sine of each pair.
        dtype: The dtype of the arithmetic.
        interleaved: Whether pairs are (2i, 2i + 1); otherwise (i, i + pairs).
        first: The column that pairs begin at; others are copied.
    """
    pairs, out = angles.shape[1], x.to(dtype).clone()
    place = torch.arange(pairs)
    left, right = (2 * place, 2 * place + 1) if interleaved else (place, place + pairs)
    a, b = (x[..., first + columns].to(dtype) for columns in (left, right))
    cos, sin = angles.real.to(dtype)[:, None], angles.imag.to(dtype)[:, None]
    out[..., first + left], out[..., first + right] = a * cos - b * sin, b * cos + a * sin
    return out


def codes(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x `[tokens, heads, width]` / scale in the nearest code of a quantized dtype, saturated."""
    scaled = x.float() / scale.float().view(-1, 1)
    return scaled.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else scaled.clamp(-448, 448).to(dtype)


def plan_facts(args: AttentionArgs) -> torch.Tensor:
    """Return what the plan of a call says of each block table, `[num_tables, 6]` int32.

    The columns are flags, live tiles that a decode attends to, a checksum of positions, queries, tokens and live tiles.
    """
    size, window, is_scattered = args.key_cache.shape[1], args.window, args.query_positions is not None
    decoded = 0 if is_scattered and window else DECODE_QUERIES
    facts = []
    for i, length in enumerate(args.seq_lens.tolist()):
        own, tiles = positions(args, i), -(-length // TILE_KEYS)
        count, t = len(own), torch.arange(tiles * TILE_KEYS)
        checksum = int((own * (2 * torch.arange(count) + 1)).sum()) if is_scattered else 0
        inside = t < (own.max() + 1 if args.causal else own.max() + window if window else length)
        if window:
            inside &= (t > own.min() - window) | (t < args.num_sink_tokens)
        for table in tables_of(args, i):
            present = (table[: -(-length // size)] >= 0).repeat_interleave(size)[:length]
            there, absent = (
                torch.nn.functional.pad(x, (0, len(t) - length)).view(tiles, TILE_KEYS).any(1)
                for x in (present, ~present)
            )
            flags = DEAD_TILES * (not there.all()) + PARTIAL_TILES * bool((there & absent).any())
            attended = (there & inside.view(tiles, TILE_KEYS).any(1)).sum() if count <= decoded else 0
            facts.append([flags, int(attended), checksum, count, length, int(there.sum())])
    return torch.tensor(facts, dtype=torch.int32)
