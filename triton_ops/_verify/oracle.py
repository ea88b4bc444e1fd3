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


def attended(call: Mapping[str, Any], index: int) -> torch.Tensor:
    """Return which keys the queries of a sequence attend to: `[kv_heads, queries, seq_len]`."""
    length = int(call["seq_lens"][index])
    begin, end = call["query_start_loc"][index : index + 2].tolist()
    t, p = torch.arange(length), positions(call, index)[:, None]
    causal, window = call.get("causal", True), call.get("window", 0)
    live = torch.ones(end - begin, length, dtype=torch.bool)
    if causal:
        live &= t <= p
    if window:
        live &= (t > p - window) | (t < call.get("num_sink_tokens", 0))
        if not causal:
            live &= t < p + window
    if call.get("tree_mask") is not None:
        own = length - (end - begin)
        words = call["tree_mask"][begin:end].long()
        bits = torch.arange(end - begin)
        live[:, own:] = (words[:, bits // 32] >> (bits % 32)) & 1 != 0
    tables, kv_heads, size = _tables(call, index)
    live = live & (tables[:, t // size] >= 0)[:, None]
    if call.get("query_blocks") is not None:
        lists = call["query_blocks"][begin:end].transpose(0, 1)
        live = live & (lists[..., None] == t // size).any(2)
    return live.expand(kv_heads, -1, -1)


def positions(call: Mapping[str, Any], index: int) -> torch.Tensor:
    """Return the absolute positions of a sequence's queries, `[queries]` int64."""
    begin, end = call["query_start_loc"][index : index + 2].tolist()
    given = call.get("query_positions")
    length = int(call["seq_lens"][index])
    return torch.arange(length - (end - begin), length) if given is None else given[begin:end].long()


def caches(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values `[num_blocks, block_size, kv_heads, width]`. Latent rows are both."""
    if "cache" not in call:
        return call["key_cache"], call["value_cache"]
    rows = call["cache"].unsqueeze(2)
    return rows, rows[..., : call["value_dim"]]


def attention(call: Mapping[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what an attention operator gives for these arguments, `out` and `lse`, computed in `dtype`."""
    query, scales = call["query"].to(dtype), (call.get("k_scale"), call.get("v_scale"))
    keys, values = caches(call)
    scales = (scales[0], scales[0]) if "cache" in call else scales
    sides = [
        cache.to(dtype) if scale is None else cache.to(dtype) * scale.to(dtype).view(-1, 1)
        for cache, scale in zip((keys, values), scales, strict=True)
    ]
    kv_heads, size = keys.shape[2], keys.shape[1]
    out = torch.zeros((*query.shape[:2], values.shape[3]), dtype=dtype)
    lse = torch.full(query.shape[:2], -math.inf, dtype=dtype)
    for index, length in enumerate(call["seq_lens"].tolist()):
        begin, end = call["query_start_loc"][index : index + 2].tolist()
        live, t, p = attended(call, index), torch.arange(length), positions(call, index)
        tables, _, _ = _tables(call, index)
        slots = (tables[:, t // size].clamp(min=0).long() * size + t % size).expand(kv_heads, -1)
        read = live.any(1)[..., None]
        key, value = (
            torch.where(read, side.flatten(0, 1)[slots, torch.arange(kv_heads)[:, None]], 0) for side in sides
        )
        own = query[begin:end].unflatten(1, (kv_heads, -1))
        score = torch.einsum("qkgd,ktd->kgqt", own, key) * call["scale"]
        if call.get("softcap"):
            score = call["softcap"] * torch.tanh(score / call["softcap"])
        if call.get("alibi_slopes") is not None:
            at = t.clone()
            if call.get("tree_mask") is not None:
                at[length - len(p) :] = p
            slopes = call["alibi_slopes"].to(dtype).view(kv_heads, -1, 1, 1)
            score = score + slopes * (at - p[:, None]).to(dtype)
        score = score.masked_fill(~live[:, None], -math.inf)
        if call.get("sinks") is not None:
            column = call["sinks"].to(dtype).view(kv_heads, -1, 1, 1).expand(-1, -1, end - begin, 1)
            score = torch.cat((score, column), -1)
        row_lse = torch.logsumexp(score, -1)
        weights = torch.exp(score - row_lse.masked_fill(row_lse == -math.inf, 0.0)[..., None])[..., :length]
        out[begin:end] = torch.einsum("kgqt,ktd->qkgd", weights, value).flatten(1, 2)
        lse[begin:end] = row_lse.permute(2, 0, 1).flatten(1)
    return out, lse


def _tables(call: Mapping[str, Any], index: int) -> tuple[torch.Tensor, int, int]:
    """Return the block tables of a sequence, `[1 or kv_heads, max_blocks]`, its KV heads and the block size."""
    keys = caches(call)[0]
    tables = call["block_tables"][index]
    return tables.view(-1, tables.shape[-1]), keys.shape[2], keys.shape[1]


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


def plan_facts(planned: Mapping[str, Any]) -> torch.Tensor:
    """Return what a plan says of each block table, `[num_tables, 6]` int32, for arguments of `attention_plan`.

    The columns are flags, live tiles that a decode attends to, a checksum of positions, queries, tokens and live tiles.
    """
    tables, size, window = planned["block_tables"], planned["block_size"], planned.get("window", 0)
    positions, starts = planned.get("query_positions"), planned["query_start_loc"].tolist()
    decoded = 0 if positions is not None and window else DECODE_QUERIES
    facts = []
    for i, length in enumerate(planned["seq_lens"].tolist()):
        count, tiles = starts[i + 1] - starts[i], -(-length // TILE_KEYS)
        own = torch.arange(length - count, length) if positions is None else positions[starts[i] : starts[i + 1]].long()
        checksum = 0 if positions is None else int((own * (2 * torch.arange(count) + 1)).sum())
        t = torch.arange(tiles * TILE_KEYS)
        inside = t < (own.max() + 1 if planned.get("causal", True) else own.max() + window if window else length)
        if window:
            inside &= (t > own.min() - window) | (t < planned.get("num_sink_tokens", 0))
        for table in tables[i].reshape(-1, tables.shape[-1]):
            present = (table[: -(-length // size)] >= 0).repeat_interleave(size)[:length]
            there, absent = (
                torch.nn.functional.pad(x, (0, len(t) - length)).view(tiles, TILE_KEYS).any(1)
                for x in (present, ~present)
            )
            flags = DEAD_TILES * (not there.all()) + PARTIAL_TILES * bool((there & absent).any())
            attended = (there & inside.view(tiles, TILE_KEYS).any(1)).sum() if count <= decoded else 0
            facts.append([flags, int(attended), checksum, count, length, int(there.sum())])
    return torch.tensor(facts, dtype=torch.int32)
