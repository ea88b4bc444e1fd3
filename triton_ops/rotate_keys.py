"""Copies blocks of keys and turns each to another position: cached text reused where it was not computed.

With (a, b) a pair of features of a key and w its inverse frequency, for a block that moves by delta positions:

    a' = a * cos(delta * w) - b * sin(delta * w);  b' = b * cos(delta * w) + a * sin(delta * w)

Rotations add up, so a key rotated for position p becomes the one for p + delta. Reads and writes the bytes of n blocks
once; turns in float32. Angles are taken in float64: at 128k positions those of float32 are off by a hundredth.
https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

import torch

from ._attention.checks import QUERY_DTYPES
from ._attention.constants import next_power_of_2
from ._checks import bad_argument, check_tensor, describe, refuse_grad
from ._launcher import KernelLaunch, aligned, metadata, remember
from ._library import operator
from ._quantize import as_codes, code_kind, from_e4m3, quantize, to_code
from ._rows.checks import check_index
from ._rows.ops import lowest_entry
from ._triton import require_triton, tl, triton
from .rope_and_cache import rotate

KEY_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn, torch.int8)
_LAYOUT = "[num_blocks, block_size, num_kv_heads, head_dim]"
# Elements turned at a time on a CPU: their float32 copies stay in the caches.
_PIECE_ELEMENTS = 1 << 20

_prepared: dict[object, tuple[KernelLaunch, int]] = {}


def _check(
    key_cache: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    deltas: torch.Tensor,
    inv_freq: torch.Tensor,
) -> None:
    check_tensor("key_cache", key_cache, 4, _LAYOUT, KEY_DTYPES)
    head_dim = key_cache.shape[3]
    if head_dim > 1 and key_cache.stride(3) != 1:
        raise bad_argument("key_cache", f"strides {list(key_cache.stride())}", "a contiguous last dimension")
    check_index("source_ids", source_ids, "[n]")
    check_index("target_ids", target_ids, "[n]")
    check_tensor("deltas", deltas, 1, "[n]", (torch.int32, torch.int64))
    check_tensor("inv_freq", inv_freq, 1, "[rotary_dim / 2]", (torch.float32, torch.float64), key_cache.device)
    for name, vector in (("target_ids", target_ids), ("deltas", deltas)):
        if vector.shape != source_ids.shape:
            raise bad_argument(name, f"{vector.shape[0]} elements", f"{source_ids.shape[0]} as source_ids")
    for name, vector in (("source_ids", source_ids), ("target_ids", target_ids), ("deltas", deltas)):
        if vector.device not in (key_cache.device, torch.device("cpu")):
            raise bad_argument(name, f"device {vector.device}", f"device {key_cache.device} of key_cache, or the host")
    if not 1 <= inv_freq.shape[0] <= head_dim // 2:
        raise bad_argument("inv_freq", describe(inv_freq), f"1 to {head_dim // 2} elements, one per pair of head_dim")
    refuse_grad(key_cache=key_cache, inv_freq=inv_freq)
    limit = key_cache.shape[0]
    lowest_entry("source_ids", source_ids, limit)
    lowest_entry("target_ids", target_ids, limit)


def _turns(deltas: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[n, rotary_dim / 2]`, float32."""
    angles = deltas.double()[:, None] * inv_freq.double()
    return angles.cos().float(), angles.sin().float()


def _rotate_keys_cpu(
    key_cache: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    deltas: torch.Tensor,
    inv_freq: torch.Tensor,
    is_neox: bool = True,
) -> None:
    _check(key_cache, source_ids, target_ids, deltas, inv_freq)
    written = (target_ids >= 0).nonzero()[:, 0]
    _, block_size, heads, head_dim = key_cache.shape
    one = torch.ones(1)
    step = max(1, _PIECE_ELEMENTS // max(1, block_size * heads * head_dim))
    for begin in range(0, len(written), step):
        piece = written[begin : begin + step]
        sources, targets = source_ids[piece].long(), target_ids[piece].long()
        keys = key_cache.index_select(0, sources.clamp(min=0))
        absent = sources < 0
        cos, sin = (turn.repeat_interleave(block_size, 0) for turn in _turns(deltas[piece], inv_freq))
        rows = keys.view(-1, heads, head_dim)
        if key_cache.dtype in QUERY_DTYPES:
            rows = rotate(rows, cos, sin, not is_neox)
        else:  # a scale per head turns with its head: the codes themselves are turned and rounded anew
            turned = rotate(rows.float(), cos, sin, not is_neox)
            fresh = quantize(turned, one, key_cache.dtype)
            rotary = torch.arange(head_dim) < 2 * inv_freq.shape[0]
            rows = torch.where(rotary, fresh.view(torch.uint8), rows.view(torch.uint8)).view(key_cache.dtype)
        rows = rows.view(keys.shape)
        if absent.any():
            rows.view(torch.uint8)[absent] = 0
        as_codes(key_cache)[targets] = as_codes(rows)


@triton.jit
def _load_keys(ptrs, mask, KIND: tl.constexpr):
    """Keys, or codes as the numbers they stand for, in float32."""
    if KIND == 2:
        return from_e4m3(tl.load(ptrs, mask=mask, other=0)).to(tl.float32)
    else:
        return tl.load(ptrs, mask=mask, other=0).to(tl.float32)


@triton.jit
def _store_keys(ptrs, x, mask, KIND: tl.constexpr):
    if KIND == 0:
        tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)
    else:
        tl.store(ptrs, to_code(x, tl.full((1, 1), 1.0, tl.float32), KIND), mask=mask)


@triton.jit
def _rotate_keys_kernel(
    cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    source_ptr, target_ptr,  # [n]
    cos_ptr, sin_ptr,  # [n, HALF]
    stride_b, stride_t, stride_h,
    KIND: tl.constexpr, IS_NEOX: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (n, row tiles): rows are the heads of a block's tokens.

    A thread holds both features of its pairs, so that a block may be turned in place: but where a tile has fewer pairs
    than a program threads, several hold the same pair, and none may read what another has written.
    """
    move = tl.cast(tl.program_id(0), tl.int64)
    source = tl.cast(tl.load(source_ptr + move), tl.int64)
    target = tl.cast(tl.load(target_ptr + move), tl.int64)
    if target >= 0:
        offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_r = offs_r < BLOCK_SIZE * KV_HEADS
        rows = (offs_r // KV_HEADS).to(tl.int64) * stride_t + (offs_r % KV_HEADS).to(tl.int64) * stride_h
        reads = offs_r < tl.where(source >= 0, BLOCK_SIZE * KV_HEADS, 0)
        source_ptrs = cache_ptr + (source * stride_b + rows)[:, None]
        target_ptrs = cache_ptr + (target * stride_b + rows)[:, None]
        pair = tl.arange(0, BLOCK_P)
        mask_p = pair < HALF
        if IS_NEOX:
            first = pair
            second = pair + HALF
        else:
            first = 2 * pair
            second = 2 * pair + 1
        cos = tl.load(cos_ptr + move * HALF + pair, mask=mask_p, other=1.0)[None, :]
        sin = tl.load(sin_ptr + move * HALF + pair, mask=mask_p, other=0.0)[None, :]
        mask = reads[:, None] & mask_p[None, :]
        a = _load_keys(source_ptrs + first[None, :], mask, KIND)
        b = _load_keys(source_ptrs + second[None, :], mask, KIND)
        if HEAD_DIM > 2 * HALF:
            rest = 2 * HALF + tl.arange(0, BLOCK_D)
            mask_d = (rest < HEAD_DIM)[None, :]
            x = tl.load(source_ptrs + rest[None, :], mask=reads[:, None] & mask_d, other=0)
        tl.debug_barrier()
        mask = mask_r[:, None] & mask_p[None, :]
        _store_keys(target_ptrs + first[None, :], a * cos - b * sin, mask, KIND)
        _store_keys(target_ptrs + second[None, :], b * cos + a * sin, mask, KIND)
        if HEAD_DIM > 2 * HALF:
            tl.store(target_ptrs + rest[None, :], x, mask=mask_r[:, None] & mask_d)


def _launch_rotate_keys(
    key_cache: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    deltas: torch.Tensor,
    inv_freq: torch.Tensor,
    is_neox: bool = True,
) -> None:
    require_triton("rotate_keys")
    _check(key_cache, source_ids, target_ids, deltas, inv_freq)
    if not source_ids.numel() or not key_cache.numel():
        return
    device = key_cache.device
    sources, targets, deltas = (x.to(device, non_blocking=True) for x in (source_ids, target_ids, deltas))
    sources, targets = sources.contiguous(), targets.contiguous()
    cos, sin = _turns(deltas, inv_freq)
    is_aligned = aligned(key_cache, sources, targets, cos, sin)
    signature = (is_neox, is_aligned, inv_freq.shape, *metadata(key_cache, sources, targets))
    prepared = _prepared.get(signature)
    if prepared is None:
        prepared = remember(_prepared, signature, _prepare(key_cache, inv_freq.shape[0], is_neox, is_aligned))
    launch, tiles = prepared
    launch(
        _rotate_keys_kernel,
        (sources.shape[0], tiles, 1),
        as_codes(key_cache),
        sources,
        targets,
        cos,
        sin,
        *key_cache.stride()[:3],
    )


def _prepare(key_cache: torch.Tensor, half: int, is_neox: bool, is_aligned: bool) -> tuple[KernelLaunch, int]:
    _, block_size, kv_heads, head_dim = key_cache.shape
    block_p, block_d = next_power_of_2(half), next_power_of_2(max(1, head_dim - 2 * half))
    block_r = max(1, 2048 // max(block_p, block_d))
    constexprs = {
        "KIND": code_kind(key_cache.dtype),
        "IS_NEOX": is_neox,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_R": block_r,
        "BLOCK_P": block_p,
        "BLOCK_D": block_d,
    }
    return KernelLaunch(constexprs, 4, None, is_aligned), -(-block_size * kv_heads // block_r)


@operator(cpu=_rotate_keys_cpu, launch=_launch_rotate_keys, mutates=("key_cache",))
def rotate_keys(
    key_cache: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    deltas: torch.Tensor,
    inv_freq: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Copies blocks of keys and turns each by a number of positions, so that cached text serves at another place.

    Values do not depend on positions: they go through `pc.copy_blocks`. A block may be its own target. A target that
    appears twice, or is the source of another entry, is undefined.

    Args:
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]` with keys as they were rotated for their
            positions, written to; float16, bfloat16, float32, float8_e4m3fn or int8; any strides with a contiguous last
            dimension. Codes are turned and rounded anew under the scale they have; what leaves their range saturates.
        source_ids: `[n]` int32 or int64, on the cache's device or the host; -1 writes zeros to the target.
        target_ids: `[n]`, the same; -1 writes nothing.
        deltas: `[n]` int32 or int64, positions to move by, target minus source; may be negative.
        inv_freq: `[rotary_dim / 2]` float32 or float64, inverse frequency of each pair in radians a position, as the
            model's rotary embedding has it (scaled, if it scales). Features past rotary_dim are copied.
        is_neox: Pairs (i, i + rotary_dim / 2) as in GPT-NeoX and Llama; False: (2i, 2i + 1) as in GPT-J.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device; with ids in host memory, and in debug mode, also a block out of range.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> keys = torch.randn(8, 16, 2, 64)
        >>> inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
        >>> ids, deltas = torch.tensor([0, 1]), torch.tensor([160, 160], dtype=torch.int32)
        >>> pc.rotate_keys(keys, ids, ids + 4, deltas, inv_freq)  # blocks 4 and 5: the same keys 160 tokens later
    """
