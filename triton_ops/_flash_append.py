"""New keys and values of FlashAttention's functions: where they go in the cache, how they are rotated, and the write.

Slots, lengths and angles are by PyTorch a dozen operators, each of which costs the host and a device as much as one
kernel for all. A compiler that looks on sees PyTorch, and makes a kernel of it itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ._attention.constants import next_power_of_2
from ._attention.dense import counted
from ._checks import bad_argument, describe, reads_values
from ._dispatch import aligned, is_launched, is_watched
from ._flash import FlashOptions, Given, Keys, check_numbers, contiguous
from ._flash_attention import Launched, scale_of_heads
from ._kernel import Grid, KernelLaunch
from ._quantize import CODES
from ._triton import require_triton, tl, triton
from .reshape_and_cache import reshape_and_cache
from .rope_and_cache import rope_and_cache, rotate

_TOKENS_A_PROGRAM = 32
Appended = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Slots of new keys, lengths with them, and their angles."""


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "count", "max_blocks", "block_size", "max_positions"),
        *("stride_bt", "stride_c", "stride_s"),
    ]
)
def _append_kernel(
    slots,  # [num_tokens] int64, written
    new_lens,  # [num_tokens / count], written
    angles,  # [num_tokens, 2 * HALF], written
    lens,  # [num_tokens / count]
    first,  # [num_tokens / count], positions of the first new tokens
    tables,  # [num_tokens / count, max_blocks]
    cos, sin,  # [max_positions, HALF]
    num_tokens, count, max_blocks, block_size, max_positions,
    stride_bt, stride_c, stride_s,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens,)."""
    token = tl.cast(tl.program_id(0), tl.int64) * TILE + tl.arange(0, TILE)
    mask = token < num_tokens
    seq = token // count
    nth = token % count
    length = tl.load(lens + seq, mask=mask, other=0)
    position = length + nth
    block = position // block_size
    is_inside = mask & (position >= 0) & (block < max_blocks)
    number = tl.cast(tl.load(tables + seq * stride_bt + block, mask=is_inside, other=-1), tl.int64)
    slot = tl.where(number >= 0, number * block_size + position % block_size, -1)
    tl.store(slots + token, slot, mask=mask)
    tl.store(new_lens + seq, length + count, mask=mask & (nth == 0))
    if HALF > 0:
        offs_h = tl.arange(0, BLOCK_H)
        row = tl.maximum(tl.load(first + seq, mask=mask, other=0) + nth, 0)
        known = (mask & (row < max_positions))[:, None] & (offs_h[None, :] < HALF)
        c = tl.load(cos + row[:, None] * stride_c + offs_h[None, :], mask=known, other=0.0)
        s = tl.load(sin + row[:, None] * stride_s + offs_h[None, :], mask=known, other=0.0)
        out = angles + token[:, None] * (2 * HALF) + offs_h[None, :]
        written = mask[:, None] & (offs_h[None, :] < HALF)
        tl.store(out, c, mask=written)
        tl.store(out + HALF, s, mask=written)


class Rotary(NamedTuple):
    """The rotation of new keys, and of the queries beside them."""

    cos: torch.Tensor
    sin: torch.Tensor
    first: torch.Tensor  # [batch], positions of the first
    interleaved: bool

    def angles(self, index: torch.Tensor) -> torch.Tensor:
        """Cosines, then sines, of tokens that stand so far behind the first: `[batch * tokens, rotary_dim]`."""
        positions = (self.first.unsqueeze(1) + index).clamp_(min=0).flatten()
        return torch.cat((self.cos.index_select(0, positions), self.sin.index_select(0, positions)), 1)


def _append_places(
    count: int, block_size: int, lens: torch.Tensor, tables: torch.Tensor, rotary: Rotary | None
) -> Appended:
    index = counted(lens.device, count, 1)
    positions = lens.long().unsqueeze(1) + index
    columns = positions.div(block_size, rounding_mode="floor").clamp_(0, max(0, tables.shape[1] - 1))
    # Of block -1 they are below 0, all of them.
    slots = torch.add(positions % block_size, tables.gather(1, columns), alpha=block_size)
    slots = slots.masked_fill_(positions < 0, -1).clamp_(min=-1).flatten()
    return slots, lens + count, None if rotary is None else rotary.angles(index)


def choose_append_places(
    count: int, block_size: int, lens: torch.Tensor, tables: torch.Tensor, rotary: Rotary | None
) -> Callable[[torch.Tensor, torch.Tensor, Rotary | None], Appended]:
    """What finds slots `[batch * count]` of new keys, lengths with them, and angles `[batch * count, rotary_dim]`.

    It takes lens `[batch]`, tables `[batch, max_blocks]` and the rotation like those given.
    """
    in_pytorch = functools.partial(_append_places, count, block_size)
    given = [lens, tables, *(rotary or ())[:3]]
    half, num_tokens = 0 if rotary is None else rotary.cos.shape[1], lens.shape[0] * count
    if is_watched() or not num_tokens or not is_launched(given) or any(x.stride(-1) != 1 for x in given):
        return in_pytorch
    if any(x.dtype != torch.int32 for x in (lens, tables)) or (rotary and rotary.sin.shape != rotary.cos.shape):
        return in_pytorch
    require_triton("flash_attn_with_kvcache")
    constants = {"HALF": half, "BLOCK_H": next_power_of_2(max(1, half)), "TILE": _TOKENS_A_PROGRAM}
    rows, steps = (0, (0, 0)) if rotary is None else (len(rotary.cos), (rotary.cos.stride(0), rotary.sin.stride(0)))
    numbers = (num_tokens, count, tables.shape[1], block_size, rows, tables.stride(0), *steps)
    grid = Grid(KernelLaunch(constants, 4, None, aligned(*given)), (-(-num_tokens // _TOKENS_A_PROGRAM), 1, 1), numbers)
    # `empty_like` of these, which take no memory, costs the host half of `new_empty`.
    slots_like = torch.empty(1, dtype=torch.int64, device=lens.device).expand(num_tokens)
    angles_like = None if rotary is None else rotary.cos.new_empty(1).expand(num_tokens, 2 * half)

    def run(lens: torch.Tensor, tables: torch.Tensor, rotary: Rotary | None) -> Appended:
        slots, new_lens = torch.empty_like(slots_like), torch.empty_like(lens)
        if rotary is None or angles_like is None:
            grid.run(_append_kernel, (slots, new_lens, slots, lens, lens, tables, slots, slots))
            return slots, new_lens, None
        angles = torch.empty_like(angles_like)
        cos, sin, first, _ = rotary
        grid.run(_append_kernel, (slots, new_lens, angles, lens, first, tables, cos, sin))
        return slots, new_lens, angles

    return run


class Append:
    """What writes new keys and values behind those in the cache, for calls of a kind, with the first one's arguments.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        k: `[batch, count, num_kv_heads, head_dim]`, new keys.
        v: Like k.
        keys: The cache before.
        options: Of the call.
        given: Its tensors.
        rotary: None: no rotation.
    """

    def __init__(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: Keys,
        options: FlashOptions,
        given: Given,
        rotary: Rotary | None,
    ) -> None:
        (batch, count), size, device = k.shape[:2], keys.key_cache.shape[1], query.device
        if batch != keys.lens.shape[0] or v.shape[:2] != k.shape[:2]:
            name, got = ("v", v) if batch == keys.lens.shape[0] else ("k", k)
            raise bad_argument(name, describe(got), f"[{keys.lens.shape[0]}, {count}, num_kv_heads, head_dim]")
        if rotary is not None:
            rows = rotary.cos
            if rows.dim() != 2 or not 0 < 2 * rows.shape[1] <= k.shape[3] or rows.device != device:
                needs = f"[max_positions, rotary_dim / 2] of at most {k.shape[3] // 2} on {device}"
                raise bad_argument("rotary_cos", describe(rows), needs)
            if rotary.sin.shape != rows.shape or rotary.sin.device != device:
                raise bad_argument("rotary_sin", describe(rotary.sin), f"{list(rows.shape)} as rotary_cos on {device}")
            check_numbers("rotary_seqlens", rotary.first, batch, device)
        self._batch, self._count, self._most = batch, count, keys.tables.shape[1] * size - count
        self._checks_values = reads_values(query) and not is_watched() and batch > 0
        self._quantized, self._fewer_keys = keys.key_cache.dtype in CODES, count < keys.max_queries
        self._sees_ahead = sees_ahead = options.causal or max(options.window) >= 0
        self._together = count == keys.max_queries and (sees_ahead or count == 1)
        self._is_fused = rotary is not None and self._together and v.shape == k.shape
        self._is_packed = k.is_contiguous() and v.is_contiguous()
        self._rows = counted(device, batch * count, 1)
        self._of_queries = counted(device, keys.max_queries, 1 if sees_ahead else 0)
        self._places = choose_append_places(count, size, keys.lens, keys.tables, rotary)
        self._write = Launched(rope_and_cache if self._is_fused else reshape_and_cache)
        self._takes_shapes = self._quantized or (rotary is not None and not self._is_fused)

    def takes_addresses(self) -> bool:
        """Whether queries and caches may come in their callers' shapes, see `Launched.takes_addresses`."""
        return not self._takes_shapes and self._write.takes_addresses()

    def __call__(
        self, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: Keys, given: Given, rotary: Rotary | None
    ) -> tuple[torch.Tensor, Keys]:
        """The queries, rotated, and what the cache holds then."""
        if self._checks_values and (longest := int(keys.lens.max())) > self._most:
            raise bad_argument("cache_seqlens", longest, f"at most {self._most}, with {self._count} new")
        if self._checks_values and rotary is not None:
            most = int(rotary.first.max()) + max(self._count, len(self._of_queries) if self._sees_ahead else 1)
            if most > len(rotary.cos):
                raise bad_argument("rotary_cos", f"{len(rotary.cos)} positions", f"at least {most}")
        scales = _scales(given, self._batch) if self._quantized else (None, None)
        slots, lens, angles = self._places(keys.lens, keys.tables, rotary)
        if not (self._is_packed and self.takes_addresses()):
            k, v = (contiguous(x).reshape(-1, *x.shape[2:]) for x in (k, v))
        caches = (keys.key_cache, keys.value_cache, slots)
        if rotary is None or angles is None:
            self._write(k, v, *caches, *scales)
        elif self._is_fused:
            query = self._write(query, k, v, self._rows, angles, *caches, rotary.interleaved, *scales)
        else:
            self._write(_turned(k, angles, rotary), v, *caches, *scales)
            query = _turned(query, angles if self._together else rotary.angles(self._of_queries), rotary)
        return query, Keys(*keys[:3], lens, *keys[4:7], self._fewer_keys)


def _turned(x: torch.Tensor, angles: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos, sin = angles.chunk(2, 1)
    return rotate(x, cos, sin, rotary.interleaved)


def _scales(given: Given, batch: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a quantized cache's new keys and values are divided by."""
    scales: list[torch.Tensor | None] = []
    for name, descale in (("k_descale", given.k_descale), ("v_descale", given.v_descale)):
        scale = None if descale is None else scale_of_heads(name, descale, batch)
        if scale is None and descale is not None:
            needs = "the same for every sequence, since new keys are stored divided by it"
            raise bad_argument(name, describe(descale), needs)
        scales.append(scale)
    return scales[0], scales[1]
