"""New keys and values of FlashAttention's functions: where they go in the cache, how they are rotated, and the write.

One kernel finds slots, lengths and angles. In PyTorch they take a dozen operators, each of which costs the host and a
device as much as the kernel. Under a compiler, PyTorch computes them, and the compiler fuses them into one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .._attention.constants import next_power_of_2
from .._attention.dense import arange_i32
from .._core.cache import aligned, checks_values, needs_dispatcher, runs_kernels
from .._core.checks import INT32, bad_argument, check_tensor, describe
from .._core.launch import Launch
from .._core.quantize import QUANTIZED_DTYPES
from .._core.runtime import require_triton
from ..reshape_and_cache import reshape_and_cache
from ..rope_and_cache import rope_and_cache, rotate
from ..scatter_slots import scatter_slots_list
from .arguments import FlashArgs, known, packed
from .attend import scale_of_heads
from .paged_kv import PagedKV, sequence_of_token

_TOKENS_A_PROGRAM = 32
Appended = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Slots of new keys, lengths that include them, and their angles."""


Rotary = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, and the position of each sequence's first new token, `[batch]`."""


def _rotary(args: FlashArgs, lens: torch.Tensor) -> Rotary | None:
    """Return the rotation of new keys, which begin at `lens` or rotary_seqlens; None if the call rotates nothing."""
    cos, sin, first = args.rotary_cos, args.rotary_sin, args.rotary_seqlens
    if cos is None:
        return None
    if cos.dtype.itemsize == 1 and cos.dtype.is_floating_point:  # PyTorch cannot select rows of float8 by index
        cos, sin = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
    return cos, sin, lens if first is None else first


def _angles(rotary: Rotary, sequence: torch.Tensor, nth: torch.Tensor | int) -> torch.Tensor:
    """Return cosines, then sines, of the nth tokens of their sequences: `[tokens, rotary_dim]`."""
    cos, sin, first = rotary
    positions = (first.index_select(0, sequence) + nth).clamp_(0, max(0, len(cos) - 1))
    return torch.cat((cos.index_select(0, positions), sin.index_select(0, positions)), 1)


def _rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x `[tokens, heads, head_dim]` rotated; 8-bit tensors come back in 16 bits."""
    cos, sin = angles.chunk(2, 1)
    return rotate(x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x, cos, sin, interleaved)


def _append_places(total: int, starts: torch.Tensor, keys: PagedKV, rotary: Rotary | None) -> Appended:
    """Compute slots, lengths and angles of `total` new keys with PyTorch. Sequences begin at the rows `starts`."""
    lens, tables, block_size = keys.lens, keys.tables, keys.key_cache.shape[1]
    token, sequence = sequence_of_token(starts, total)
    nth = token - starts.index_select(0, sequence)
    positions = lens.index_select(0, sequence) + nth
    columns = positions.div(block_size, rounding_mode="floor")
    inside = columns.clamp(0, max(0, tables.shape[1] - 1))
    numbers = tables[sequence, inside].long()
    written = (columns == inside) & (numbers >= 0) & (token < starts[-1])
    slots = torch.where(written, numbers * block_size + positions % block_size, -1)
    return slots, lens + starts.diff(), None if rotary is None else _angles(rotary, sequence, nth)


def build_append_places(
    count: int, block_size: int, lens: torch.Tensor, tables: torch.Tensor, rotary: Rotary | None
) -> Callable[[torch.Tensor, torch.Tensor, Rotary | None], Appended] | None:
    """Return a function that gives slots and lengths of new keys, and their angles `[batch * count, rotary_dim]`.

    Each sequence has `count` new keys. The function takes lens `[batch]`, tables `[batch, max_blocks]` and a rotation,
    with the same metadata as the arguments here. Return None if PyTorch must compute these values.
    """
    given = [lens, tables, *(rotary or ())]
    half, num_tokens = 0 if rotary is None else rotary[0].shape[1], lens.shape[0] * count
    if needs_dispatcher() or not num_tokens or not runs_kernels(given) or any(x.stride(-1) != 1 for x in given):
        return None
    if tables.dtype != torch.int32:
        return None
    require_triton("flash_attn_with_kvcache")
    from ..kernels.append import _append_kernel

    constants = {"HALF": half, "BLOCK_H": next_power_of_2(max(1, half)), "TILE": _TOKENS_A_PROGRAM}
    rows, steps = (0, (0, 0)) if rotary is None else (len(rotary[0]), (rotary[0].stride(0), rotary[1].stride(0)))
    numbers = (num_tokens, count, tables.shape[1], block_size, rows, tables.stride(0), *steps)
    programs = (-(-num_tokens // _TOKENS_A_PROGRAM), 1, 1)
    launch = Launch(_append_kernel, constants, programs, numbers, same_alignment=aligned(*given))
    # `empty_like` of these, which take no memory, costs the host half of `new_empty`.
    slots_like = torch.empty(1, dtype=torch.int64, device=lens.device).expand(num_tokens)
    angles_like = None if rotary is None else rotary[0].new_empty(1).expand(num_tokens, 2 * half)

    def run(lens: torch.Tensor, tables: torch.Tensor, rotary: Rotary | None) -> Appended:
        slots, new_lens = torch.empty_like(slots_like), torch.empty_like(lens)
        if rotary is None or angles_like is None:
            launch((slots, new_lens, slots, lens, lens, tables, slots, slots))
            return slots, new_lens, None
        angles = torch.empty_like(angles_like)
        cos, sin, first = rotary
        launch((slots, new_lens, angles, lens, first, tables, cos, sin))
        return slots, new_lens, angles

    return run


def _check_new(
    k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None, keys: PagedKV, rotary: Rotary | None
) -> None:
    """Check the metadata of new keys and values and of their rotation."""
    batch, device, lead = keys.lens.shape[0], keys.lens.device, k.shape[:-2]
    if v.shape[:-2] != lead or (starts is None and lead[0] != batch):
        name, got = ("v", v) if v.shape[:-2] != lead else ("k", k)
        needs = ", ".join(map(str, (batch, *lead[1:]) if starts is None else lead))
        raise bad_argument(name, describe(got), f"[{needs}, num_kv_heads, head_dim]")
    if rotary is not None:
        cos, sin, first = rotary
        is_wide = cos.dim() == 2 and 0 < 2 * cos.shape[1] <= k.shape[-1]
        if not is_wide or cos.device != device or not cos.is_floating_point():
            needs = f"floats [max_positions, rotary_dim / 2] of at most {k.shape[-1] // 2} on {device}"
            raise bad_argument("rotary_cos", describe(cos), needs)
        if sin.shape != cos.shape or sin.device != device or not sin.dtype.is_floating_point:
            needs = f"floats {list(cos.shape)} as rotary_cos on {device}"
            raise bad_argument("rotary_sin", describe(sin), needs)
        check_tensor("rotary_seqlens", first, "[batch]", INT32, device, (batch,))
    cache_dtype = keys.key_cache.dtype
    if k.dtype == torch.float8_e4m3fn and (cache_dtype, v.dtype) != (k.dtype, k.dtype):
        raise bad_argument("k", describe(k), f"dtype {cache_dtype} of k_cache, or 16 bits or 32", TypeError)


def build_append(
    query: torch.Tensor, keys: PagedKV, args: FlashArgs, check: Callable[[torch.Tensor, PagedKV, FlashArgs], object]
) -> Callable[[torch.Tensor, PagedKV, FlashArgs], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that writes new keys and values after those in the cache, for all calls of this kind.

    The function returns the rotated queries and the new lengths.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        keys: The cache before the call.
        args: The call; k is `[batch, count, num_kv_heads, head_dim]`, or `[total, num_kv_heads, head_dim]` with
            cu_seqlens_k_new.
        check: Checks the call that reads the keys, before they are written. Its keys have the new lengths where values
            are read.
    """
    rotary = _rotary(args, keys.lens)
    k, is_packed, cache_dtype = args.k, args.cu_seqlens_k_new is not None, keys.key_cache.dtype
    _check_new(k, args.v, args.cu_seqlens_k_new, keys, rotary)
    batch, count, total = keys.lens.shape[0], k.shape[-3], math.prod(k.shape[:-2])
    if not batch:  # all tokens are padding
        return lambda query, keys, args: (query, keys.lens)
    is_checked = checks_values(query)
    if args.context is not None and not is_checked:
        check(query, keys, args)
    is_code = k.dtype == torch.float8_e4m3fn
    is_scaled = cache_dtype in QUANTIZED_DTYPES and not is_code
    sees_ahead = args.causal or max(args.window_size) >= 0
    # Queries have the positions of the new keys.
    together = not is_packed and known(count == keys.max_queries) and query.shape[0] == total
    together = together and (sees_ahead or count == 1)
    is_fused = rotary is not None and together and args.v.shape == k.shape and not is_code
    token_rows = arange_i32(query.device, total, 1)
    begins = None if is_packed else arange_i32(query.device, batch + 1, count)
    places_of = None
    if not is_packed and not (is_code and rotary is not None):
        places_of = build_append_places(count, keys.key_cache.shape[1], keys.lens, keys.tables, rotary)

    def append(query: torch.Tensor, keys: PagedKV, args: FlashArgs) -> tuple[torch.Tensor, torch.Tensor]:
        rotary, interleaved = _rotary(args, keys.lens), args.rotary_interleaved
        starts = args.cu_seqlens_k_new if begins is None else begins
        assert starts is not None
        if is_checked:
            _check_new_values(total, starts, keys, rotary, sees_ahead)
        scales = _scales(args, keys.lens.shape[0]) if is_scaled else (None, None)
        if places_of is None:
            slots, lens, angles = _append_places(total, starts, keys, rotary)
        else:
            slots, lens, angles = places_of(keys.lens, keys.tables, rotary)
        num_blocks, block_size = keys.key_cache.shape[:2]
        if is_checked and slots.numel() and int(slots.max()) >= num_blocks * block_size:
            raise bad_argument("block_table", f"block {int(slots.max()) // block_size}", f"blocks below {num_blocks}")
        if is_checked:
            check(query, keys._replace(lens=lens), args)
        k, v = packed(args.k), packed(args.v)
        caches = (keys.key_cache, keys.value_cache, slots)
        if rotary is not None and angles is not None:
            if is_fused:
                return rope_and_cache(query, k, v, token_rows, angles, *caches, interleaved, *scales), lens
            k = _rotated(k, angles, interleaved).to(k.dtype)
            if not together:
                token, sequence = sequence_of_token(keys.starts, query.shape[0])
                nth = token - keys.starts.index_select(0, sequence) if sees_ahead else 0
                angles = _angles(rotary, sequence, nth)
            query = _rotated(query, angles, interleaved)
        if is_code:  # stored unchanged, without its scale
            codes = [x.view(torch.uint8) for x in (k, v, *caches[:2])]
            scatter_slots_list(codes[:2], codes[2:], slots)
        else:
            reshape_and_cache(k, v, *caches, *scales)
        return query, lens

    return append


def _check_new_values(total: int, starts: torch.Tensor, keys: PagedKV, rotary: Rotary | None, sees_ahead: bool) -> None:
    """Check the values of starts, lengths and positions of `total` new keys."""
    counts = starts.diff()
    if int(starts[0]) or bool((counts < 0).any()) or int(starts[-1]) > total:
        raise bad_argument("cu_seqlens_k_new", starts.tolist(), f"ascending from 0 to at most {total}")
    if bool((keys.lens + counts > keys.capacity).any()):
        longest, new = int(keys.lens.max()), int(counts.max())
        raise bad_argument("cache_seqlens", longest, f"at most {keys.capacity - new}, with {new} new")
    if rotary is not None:
        cos, _, first = rotary
        if bool(((first < 0) & (keys.lens >= 0)).any()):  # a sequence of length -1 is padding
            raise bad_argument("rotary_seqlens", first.tolist()[:16], "at least 0")
        most = max(int((first + counts).max()), int(first.max()) + 1)
        if sees_ahead:
            most = max(most, int((first + keys.starts.diff()).max()))
        if most > len(cos):
            raise bad_argument("rotary_cos", f"{len(cos)} positions", f"at least {most}")


def _scales(args: FlashArgs, batch: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scales that new keys and values of a quantized cache are divided by."""
    scales: list[torch.Tensor | None] = []
    for name, descale in (("k_descale", args.k_descale), ("v_descale", args.v_descale)):
        scale = None if descale is None else scale_of_heads(name, descale, batch)
        if scale is None and descale is not None:
            needs = "the same for every sequence, since new keys are stored divided by it"
            raise bad_argument(name, describe(descale), needs)
        scales.append(scale)
    return scales[0], scales[1]
