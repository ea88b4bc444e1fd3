"""The operator that writes new keys and values into their cache slots, quantized if the cache is.

The operator sets cache[slot // block_size, slot % block_size] = key[token]. A quantized cache gets round(key[token] /
scale), clamped to the range of the cache's type. The operator reads and writes 2 * num_tokens * num_kv_heads * head_dim
elements. Slot -1 writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._attention.checks import MAX_HEAD_DIM, check_cache
from ._attention.constants import next_power_of_2
from ._copy.cpu import scatter_rows
from ._core.cache import aligned
from ._core.checks import FLOATS, bad_argument, check_tensor, debug_mode_enabled, is_same_memory, lowest_entry
from ._core.launch import Launch
from ._core.operator import operator
from ._core.quantize import as_codes, code_kind, equal_scales, quantize, refuse_nan, scale_kind


def check_write(args: Any) -> None:
    """Check the metadata of a cache write's arguments."""
    key, value = args.key, args.value
    layout = "[num_tokens, num_kv_heads, head_dim]"
    check_tensor("key", key, layout, FLOATS, rows=True)
    check_tensor("value", value, layout, (key.dtype,), key.device, key.shape[:2], rows=True)
    if not 1 <= key.shape[2] <= MAX_HEAD_DIM:
        raise bad_argument("key", f"head_dim {key.shape[2]}", f"1 to {MAX_HEAD_DIM}")
    check_cache(args, key, key.shape[1], value.shape[2])
    check_tensor("slot_mapping", args.slot_mapping, "[num_tokens]", (torch.int64,), key.device, key.shape[:1])
    if is_same_memory(args.key_cache, args.value_cache) and not is_same_memory(key, value):
        raise bad_argument("value_cache", "the memory of key_cache", "its own, since key and value differ")


def check_write_values(args: Any) -> int:
    """Check that slots are in the cache and return the lowest. In debug mode, refuse NaN for an int8 cache."""
    slots = args.slot_mapping
    if debug_mode_enabled() and args.key_cache.dtype == torch.int8:
        refuse_nan("key", args.key[slots >= 0])
        refuse_nan("value", args.value[slots >= 0])
    return lowest_entry("slot_mapping", slots, args.key_cache.shape[0] * args.key_cache.shape[1])


def reshape_and_cache_cpu(args: Any) -> None:
    """Compute `pc.reshape_and_cache` in PyTorch on CPU tensors, with checked arguments."""
    lowest = check_write_values(args)
    pairs = (args.key, args.key_cache, args.k_scale), (args.value, args.value_cache, args.v_scale)
    for rows, cache, scale in pairs:
        rows = rows if scale is None else quantize(rows, scale, cache.dtype)
        scatter_rows(rows, cache, 2, args.slot_mapping, lowest)


def _build(args: Any) -> Callable[[Any], None]:
    """Return a function that writes keys and values for calls of this kind, with one launch."""
    from .kernels.reshape_and_cache import _reshape_and_cache_kernel

    key, value, key_cache, value_cache = args.key, args.value, args.key_cache, args.value_cache
    num_tokens, kv_heads, head_dim = key.shape
    block_d = next_power_of_2(max(head_dim, value.shape[2]))
    block_r = max(1, 2048 // block_d)
    constexprs = {
        "KIND": code_kind(key_cache.dtype),
        "SCALES": scale_kind(args.k_scale, args.v_scale),
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": key_cache.shape[1],
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value.shape[2],
        "BLOCK_R": block_r,
        "BLOCK_D": block_d,
    }
    num_rows = num_tokens * kv_heads
    strides = (*key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3])
    programs = (-(-num_rows // block_r), 1, 1)
    is_aligned = aligned(*args)
    launch = Launch(_reshape_and_cache_kernel, constexprs, programs, (num_rows, *strides), same_alignment=is_aligned)

    def run(args: Any) -> None:
        if num_rows:
            launch((args.key, args.value, *cache_tensors(args, kv_heads)))

    return run


def cache_tensors(args: Any, kv_heads: int) -> tuple[Any, ...]:
    """Return the kernel's caches, slots and scales. Without scales, these are dummies that it never reads."""
    slots = args.slot_mapping.contiguous()
    if args.k_scale is None:
        return args.key_cache, args.value_cache, slots, args.key, args.key
    scales = equal_scales(args.k_scale, args.v_scale, kv_heads)
    return as_codes(args.key_cache), as_codes(args.value_cache), slots, *scales


@operator(
    check=check_write,
    run=reshape_and_cache_cpu,
    build=_build,
    check_values=check_write_values,
    mutates=("key_cache", "value_cache"),
)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of the cache.

    If two tokens share a slot, which one is kept is undefined.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, float16, bfloat16 or float32, with a contiguous last dimension.
        value: The values, with the dtype of key. Their head_dim may differ, as in latent attention with expanded keys
            and values.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides with a contiguous last dimension. It
            is written to, so no dimension may be expanded. It has key's dtype, or float8_e4m3fn or int8 with k_scale.
        value_cache: The cache of values, with the layout and dtype of key_cache and value's head_dim. It may be the
            same tensor only if value and key are.
        slot_mapping: `[num_tokens]` int64, block number * block_size + offset. -1 writes nothing.
        k_scale: A tensor of one number, or of one for each KV head. The cache stores key / k_scale, rounded to nearest
            and saturated. NaN stays NaN in float8_e4m3fn. int8 stores 0 for it, and debug mode raises ValueError.
        v_scale: The same for values.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is invalid, or a cache is expanded. For CPU tensors and in debug mode also: a slot
            is out of range.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> keys, values = torch.zeros(2, 4, 16, 2, 64).unbind()  # 4 blocks of 16 slots, 2 KV heads
        >>> key, value = torch.randn(2, 3, 2, 64).unbind()  # three tokens, the last of them padding
        >>> pc.reshape_and_cache(key, value, keys, values, torch.tensor([16, 17, -1]))
        >>> torch.equal(keys[1, :2], key[:2]), keys.count_nonzero().item() == 2 * 2 * 64
        (True, True)
    """
