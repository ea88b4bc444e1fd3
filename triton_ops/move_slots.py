"""The operator that moves cached text to another position: it copies keys and values to slots, and rotates keys.

A key's features are rotated in pairs (a, b). For a token that moves by delta and a pair with inverse frequency w:

    a' = a * cos(delta * w) - b * sin(delta * w)
    b' = b * cos(delta * w) + a * sin(delta * w)

It moves single tokens, so text may begin anywhere in a block; `pc.rotate_keys` moves whole blocks of keys. It reads and
writes keys and values once. It rotates in float32 and computes angles in float64. See https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._attention.constants import next_power_of_2
from ._copy.cpu import gather_rows, scatter_rows
from ._core.cache import aligned
from ._core.checks import (
    CACHE_LAYOUT,
    FLOATS,
    INDEX_DTYPES,
    VALUE_LAYOUT,
    bad_argument,
    check_tensor,
    describe,
    is_same_memory,
    lowest_entry,
)
from ._core.launch import Launch
from ._core.operator import operator, record_of
from ._core.quantize import QUANTIZED_DTYPES, as_codes, code_kind, quantize
from .rope_and_cache import rotate

_DTYPES = (*FLOATS, *QUANTIZED_DTYPES)


def check_moved_keys(args: Any, *indexes: str) -> None:
    """Check the keys, the rotation and the index arguments of `move_slots` or `rotate_keys`, from metadata alone."""
    keys, count = args.key_cache, getattr(args, indexes[0]).shape
    check_tensor("key_cache", keys, CACHE_LAYOUT, _DTYPES, rows=True)
    for name in indexes:
        index = getattr(args, name)
        check_tensor(name, index, "[n]", INDEX_DTYPES, sizes=count)
        if index.device not in (keys.device, torch.device("cpu")):
            raise bad_argument(name, f"device {index.device}", f"device {keys.device} of key_cache, or the host")
    room = keys.shape[3] - args.first
    if args.first < 0 or room < 0:
        raise bad_argument("first", args.first, f"0 to {keys.shape[3]}, features of a key")
    if args.inv_freq is not None:
        check_tensor("inv_freq", args.inv_freq, "[rotary_dim / 2]", (torch.float32, torch.float64), keys.device)
        if not 1 <= args.inv_freq.shape[0] <= room // 2:
            needs = f"1 to {room // 2} elements, one for each pair of features from {args.first} on"
            raise bad_argument("inv_freq", describe(args.inv_freq), needs)


def _check(args: Any) -> None:
    check_moved_keys(args, "source_slots", "target_slots", "deltas")
    if args.value_cache is not None:
        sizes, device = args.key_cache.shape[:3], args.key_cache.device
        check_tensor("value_cache", args.value_cache, VALUE_LAYOUT, _DTYPES, device, sizes, rows=True)
        if is_same_memory(args.key_cache, args.value_cache):
            raise bad_argument("value_cache", "the memory of key_cache", "its own, or None to move keys alone")


def _check_values(args: Any) -> None:
    num_slots = args.key_cache.shape[0] * args.key_cache.shape[1]
    lowest_entry("source_slots", args.source_slots, num_slots)
    lowest_entry("target_slots", args.target_slots, num_slots)


def rotation_cos_sin(deltas: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of the rotations, `[n, rotary_dim / 2]` float32."""
    angles = deltas.double()[:, None] * inv_freq.double()
    return angles.cos().float(), angles.sin().float()


def move_on_cpu(args: Any) -> None:
    """Move tokens in PyTorch, with checked arguments of `move_slots`.

    Quantized keys are rotated and rounded again, with the same scale.
    """
    keys, values, sources, targets, deltas, inv_freq, is_neox, first = args
    for cache in (keys,) if values is None else (keys, values):
        moved = torch.empty((len(sources), *cache.shape[2:]), dtype=cache.dtype)
        gather_rows(cache, 2, sources, moved, -1)
        if cache is keys and inv_freq is not None:
            distances, which = deltas.unique(return_inverse=True)
            cos, sin = (part[which] for part in rotation_cos_sin(distances, inv_freq))
            pairs = moved[..., first : first + 2 * cos.shape[1]]
            rotated = rotate(pairs if keys.dtype in FLOATS else pairs.float(), cos, sin, not is_neox)
            if keys.dtype not in FLOATS:
                rotated = quantize(rotated, torch.ones(1), keys.dtype)
            as_codes(pairs).copy_(as_codes(rotated))
        scatter_rows(moved, cache, 2, targets, -1)


def build_move(args: Any) -> Callable[[Any], None]:
    """Return the launch for calls of this kind, with checked arguments of `move_slots`."""
    if not (args.source_slots.numel() and args.key_cache.numel()):
        return lambda args: None
    from .kernels.move_slots import _move_slots_kernel

    keys, values, inv_freq = args.key_cache, args.value_cache, args.inv_freq
    (_, block_size, kv_heads, head_dim), half = keys.shape, 0 if inv_freq is None else inv_freq.shape[0]
    value_dim = 0 if values is None else values.shape[3]
    widest = max(next_power_of_2(x) for x in (max(half, 1), head_dim if head_dim > 2 * half else 1, max(value_dim, 1)))
    block_h = min(next_power_of_2(kv_heads), max(1, 2048 // widest))
    constexprs = {
        "KIND": code_kind(keys.dtype),
        "IS_NEOX": args.is_neox,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "FIRST": args.first,
        "HALF": half,
        "BLOCK_H": block_h,
        "BLOCK_P": next_power_of_2(max(half, 1)),
        "BLOCK_D": next_power_of_2(head_dim),
        "BLOCK_V": next_power_of_2(max(value_dim, 1)),
    }
    programs = (args.source_slots.shape[0], -(-kv_heads // block_h), 1)
    strides = (*keys.stride()[:3], *(keys if values is None else values).stride()[:3])
    is_aligned = aligned(*_kernel_tensors(args))
    launch = Launch(_move_slots_kernel, constexprs, programs, strides, same_alignment=is_aligned)
    return lambda args: launch(_kernel_tensors(args))


def _kernel_tensors(args: Any) -> tuple[torch.Tensor, ...]:
    """Return the kernel's tensors: caches, slots, cosines and sines. Without values, the keys are a dummy for them."""
    keys, values, device = args.key_cache, args.value_cache, args.key_cache.device
    sources, targets, deltas = (
        x.to(device, non_blocking=True).contiguous() for x in (args.source_slots, args.target_slots, args.deltas)
    )
    cos, sin = rotation_cos_sin(deltas, torch.empty(0, device=device) if args.inv_freq is None else args.inv_freq)
    return as_codes(keys), as_codes(keys if values is None else values), sources, targets, cos, sin


def _run(args: Any) -> None:
    _check_values(args)
    move_on_cpu(args)


def _build(args: Any) -> Callable[[Any], None]:
    launch = build_move(args)

    def run(args: Any) -> None:
        _check_values(args)  # values of indices in host memory are always read
        launch(args)

    return run


@operator(check=_check, run=_run, build=_build, mutates=("key_cache", "value_cache"))
def move_slots(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    deltas: torch.Tensor,
    inv_freq: torch.Tensor | None = None,
    is_neox: bool = True,
    first: int = 0,
) -> None:
    """Copy keys and values of tokens to other slots, and rotate keys to their new positions.

    `pc.CacheManager` lists such moves in `Allocation.moved`.

    The result is undefined if a target appears twice, or is the source of another entry.

    Args:
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, float16, bfloat16, float32, float8_e4m3fn or
            int8, any strides with a contiguous last dimension. It holds keys rotated for their positions, and is
            written to. Quantized keys are rounded again with their scale and saturate at the type's limits.
        value_cache: The same for values, whose head_dim may differ. It is written to. None: rows are latent, so the
            keys include the values.
        source_slots: `[n]` int64 or int32, block number * block_size + offset, on the cache's device or the host. -1
            writes zeros.
        target_slots: `[n]`, like source_slots. -1 writes nothing.
        deltas: `[n]` int64 or int32, the target position minus the source position; may be negative.
        inv_freq: `[rotary_dim / 2]` float32 or float64, the inverse frequency of each pair in radians for each
            position, from this layer's rotary embedding with its scaling. None: keys do not depend on positions (as
            with ALiBi), and are copied.
        is_neox: Whether pairs are (i, i + rotary_dim / 2), as in GPT-NeoX and Llama. False: (2i, 2i + 1), as in GPT-J.
        first: The first feature that is rotated. Other features are copied.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, a device or `first` is invalid. For slots in host memory, and in debug mode, also: a slot
            is out of range.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> keys, values = torch.randn(2, 8, 16, 2, 64)
        >>> inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
        >>> text = torch.arange(5, 45)  # 40 tokens, now 70 slots and positions later
        >>> pc.move_slots(keys, values, text, text + 70, torch.full((40,), 70), inv_freq)
        >>> torch.equal(values.flatten(0, 1)[75:115], values.flatten(0, 1)[5:45])
        True
    """


Moves: Any = record_of(move_slots)
"""The arguments of `move_slots`."""
